"""The promises behind PgBouncer. Not part of ``make test``: run ``make pgbouncer``.

Needs the program ``pgbouncer`` on the PATH, in /usr/sbin, or named by the variable ``PGBOUNCER``.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import servers
from flask_idempotency import current_operation, idempotent, operation_observed
from flask_idempotency.cli import cli
from tests.waiting import wait_until

SERVER_CONNECTIONS = 3
"""Fewer than the clients: each transaction may run on another of them."""


def program() -> str:
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    found = shutil.which(os.environ.get("PGBOUNCER", "pgbouncer"), path=places)
    if found is None:
        pytest.fail("There is no pgbouncer: install it, or name the program in PGBOUNCER.", False)
    return found


@contextmanager
def pgbouncer(database_url: str, mode: str) -> Iterator[str]:
    """PgBouncer before a database; the URL by way of it."""
    url = sa.make_url(database_url)
    port = servers.free_port()
    folder = Path(tempfile.mkdtemp(prefix="throwaway-pgbouncer-"))
    ini, users = folder / "pgbouncer.ini", folder / "users.txt"
    users.touch(mode=0o600)
    users.write_text(f'"{url.username}" "{url.password}"\n')
    ini.write_text(
        f"[databases]\n{url.database} = host={url.host} port={url.port}\n[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
        f"auth_type = scram-sha-256\nauth_file = {users}\npool_mode = {mode}\n"
        f"default_pool_size = {SERVER_CONNECTIONS}\nmax_client_conn = 100\n"
        "log_connections = 0\nlog_disconnections = 0\n"
    )
    identity: dict[str, Any] = {}
    if os.geteuid() == 0:  # it refuses to run as root
        nobody = pwd.getpwnam("nobody")
        identity = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        for path in (folder, ini, users):
            os.chown(path, nobody.pw_uid, nobody.pw_gid)
    process = subprocess.Popen([program(), "-q", str(ini)], cwd=folder, **identity)
    try:
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, "pgbouncer has ended"
                assert time.monotonic() < deadline, "pgbouncer does not answer"
                time.sleep(0.02)
        yield url.set(host="127.0.0.1", port=port).render_as_string(hide_password=False)
    finally:
        process.terminate()
        process.wait(10)
        shutil.rmtree(folder)


@pytest.fixture
def behind(make_world: Callable[..., Any], postgres: Any) -> Iterator[Callable[[str], Any]]:
    """A function that makes an application whose database is behind PgBouncer in the given mode."""
    stop = []

    def make(mode: str, **config: Any) -> Any:
        name = f"bounced_{mode}_{os.urandom(3).hex()}"
        bouncer = pgbouncer(postgres.database(name), mode)
        stop.append(bouncer)
        return make_world(SQLALCHEMY_DATABASE_URI=bouncer.__enter__(), **config)

    yield make
    for bouncer in stop:
        bouncer.__exit__(None, None, None)


def test_duplicates_run_once(behind, add_view, background):
    world = behind("transaction")
    runs = add_view(world)
    keys = [f"key-{number}" for number in range(40) for _ in range(3)]

    def pay(key):
        while (answer := world.post(key=key)).status_code == 409:
            time.sleep(0.01)
        return key, answer.status_code, answer.data

    told = {each.result() for each in [background(pay, key) for key in keys]}
    assert {status for _, status, _ in told} == {201}
    assert len(told) == len(runs) == world.count() == 40
    assert {record.state for record in world.records()} == {"completed"}
    world.assert_clean()


def test_a_duplicate_is_refused_while_the_view_runs(behind, add_view, gate, background):
    world = behind("transaction")
    runs = add_view(world, during=gate)
    first = background(world.post)
    gate.wait_until_reached()
    assert [world.post().status_code for _ in range(2)] == [409, 409]
    gate.open()
    assert first.result().status_code == 201
    assert world.post().headers["Idempotent-Replayed"] == "true"
    assert runs == [1]
    assert world.count() == 1
    world.assert_clean()


def test_a_holder_that_was_terminated_cannot_commit_and_the_retry_runs(
    behind, add_view, assert_problem
):
    world = behind("transaction")

    def lose_the_connection():
        if current_operation.attempt == 1:
            pid = world.db.session.scalar(sa.text("select pg_backend_pid()"))
            world.sql("select pg_terminate_backend(:pid, 5000)", pid=pid)

    runs = add_view(world, during=lose_the_connection)
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    assert world.count() == 0
    assert world.post().status_code == 201
    assert runs == [1, 2]
    assert world.count() == 1
    world.assert_clean()


def test_a_view_that_fails_is_rolled_back_and_leaves_no_setting_to_others(behind, add_view):
    world = behind("transaction")
    fails = [True]

    def fail():
        if fails:
            fails.pop()
            raise RuntimeError

    add_view(world, during=fail)
    settings = ("lock_timeout", "synchronous_commit", "client_connection_check_interval")
    before = [world.sql(f"show {name}") for name in settings]
    assert [world.post().status_code for _ in range(3)] == [500, 201, 201]
    with world.app.app_context():
        engine = world.db.engine
        barrier = threading.Barrier(SERVER_CONNECTIONS)

        def look():
            with engine.begin() as connection:  # all at once, so on each of the server's connections
                barrier.wait(10)
                return [list(connection.execute(sa.text(f"show {name}"))) for name in settings]

        seen = []
        threads = [
            threading.Thread(target=lambda: seen.append(look())) for _ in range(SERVER_CONNECTIONS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == [before] * SERVER_CONNECTIONS
    assert world.count() == 1
    world.assert_clean()


def test_what_is_only_observed_is_judged(behind, add_view):
    world, would = behind("transaction", IDEMPOTENCY_ENFORCE=False), []

    def note(_sender, event):
        would.append(event.would)

    with operation_observed.connected_to(note):
        runs = add_view(world)
        assert [world.post().status_code for _ in range(3)] == [201] * 3
    assert would == ["executed", "replayed", "replayed"]
    assert len(runs) == world.count() == 3
    world.assert_clean()


def test_a_lease_renews_itself(behind, background):
    world, ends = behind("transaction"), threading.Event()

    @world.app.post("/payments")
    @idempotent(atomic=False, lease=1, heartbeat=True)
    def charge():
        charged = current_operation.step("charge", lambda: 1)
        ends.wait(10)
        return {"charged": charged}, 201

    first = background(world.post)

    def lease():
        return next((record.lease_expires_at for record in world.records()), None)

    begun = wait_until(lease, "the operation is claimed")
    wait_until(lambda: lease() > begun + timedelta(seconds=0.5), "the lease is renewed")
    assert world.post().status_code == 409
    ends.set()
    assert first.result().json == {"charged": 1}
    world.assert_clean()


def test_the_commands_work(behind, add_view):
    world = behind("transaction")
    add_view(world)
    world.post()
    run = world.app.test_cli_runner().invoke
    assert run(cli, ["check"]).exit_code == 0
    assert "completed" in run(cli, ["stats"]).output
    world.sql("update idempotency_record set expires_at = now() - interval '1 day'")
    assert "1" in run(cli, ["purge"]).output
    assert world.records() == []
    world.assert_clean()


def test_pooling_by_statement_serves_no_application_at_all(behind):
    """It refuses every transaction: SQLAlchemy's create_all() fails before there is a request."""
    with pytest.raises(sa.exc.OperationalError):
        behind("statement")
