"""The promises behind a pooler, on each driver. Not part of ``make test``: run ``make poolers``.

Needs the programs ``pgbouncer`` and ``pgpool`` on the PATH, in /usr/sbin, or named by the variables
``PGBOUNCER`` and ``PGPOOL``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import sqlalchemy as sa

from flask_idempotency import current_operation
from flask_idempotency.cli import cli
from scale.poolers import POOLERS, SERVER_CONNECTIONS, PgBouncer
from tests.drivers import EACH


@pytest.fixture(params=POOLERS)
def pooler(request: pytest.FixtureRequest) -> str:
    """The name of one."""
    return str(request.param)


@pytest.fixture
def behind(
    make_world: Callable[..., Any], postgres: Any, driver: str, pooler: str
) -> Iterator[Callable[..., Any]]:
    """Makes an application whose database is behind the pooler."""
    # PgBouncer before 1.21 knows no prepared statements: psycopg's own page says to set this there.
    unprepared = driver == "psycopg" and not POOLERS[pooler].prepares()
    with ExitStack() as stop:

        def make(settings: Mapping[str, Any] = {}, **config: Any) -> Any:
            url = sa.make_url(postgres.database(f"pooled_{os.urandom(3).hex()}"))
            port = stop.enter_context(POOLERS[pooler](url, **settings)).port
            config["SQLALCHEMY_DATABASE_URI"] = url.set(port=port).render_as_string(hide_password=False)
            if unprepared:
                options = {"connect_args": {"prepare_threshold": None}}
                config.setdefault("SQLALCHEMY_ENGINE_OPTIONS", options)
            return make_world(**config)

        yield make


@EACH
def test_duplicates_run_once(behind, add_view, background):
    world = behind()
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


@EACH
def test_a_duplicate_is_refused_while_the_view_runs(behind, add_view, gate, background):
    world = behind()
    runs = add_view(world, during=gate)
    first = background(world.post)
    gate.wait_until_reached()
    assert [world.post().status_code for _ in range(2)] == [409, 409]
    gate.open()
    assert first.result().status_code == 201
    assert (runs, world.count()) == ([1], 1)
    world.assert_clean()


@EACH
def test_a_holder_that_was_terminated_cannot_commit_and_the_retry_runs(
    behind, add_view, assert_problem
):
    world = behind()

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


@EACH
def test_a_view_that_fails_is_rolled_back_and_leaves_no_setting_to_others(behind, add_view):
    world = behind()

    def fail():
        if current_operation.attempt == 1:
            raise RuntimeError

    add_view(world, during=fail)
    settings = ("lock_timeout", "synchronous_commit", "client_connection_check_interval")
    show = sa.text("select array_agg(setting order by name) from pg_settings where name = any(:names)")
    ((before,),) = world.sql(str(show), names=list(settings))
    assert [world.post().status_code for _ in range(3)] == [500, 201, 201]
    with world.app.app_context():
        engine = world.db.engine
    barrier = threading.Barrier(SERVER_CONNECTIONS)

    def look(_number):
        with engine.begin() as connection:  # all at once, so on each of the server's connections
            barrier.wait(10)
            return connection.scalar(show, {"names": list(settings)})

    with ThreadPoolExecutor(SERVER_CONNECTIONS) as pool:
        seen = list(pool.map(look, range(SERVER_CONNECTIONS)))
    assert seen == [before] * SERVER_CONNECTIONS
    assert world.count() == 1
    world.assert_clean()


@EACH
def test_the_commands_work(behind, add_view):
    world = behind()
    add_view(world)
    world.post()
    run = world.app.test_cli_runner().invoke
    assert run(cli, ["check"]).exit_code == 0
    assert "completed" in run(cli, ["list"]).output
    world.sql("update idempotency_record set expires_at = now() - interval '1 day'")
    assert "1" in run(cli, ["purge"]).output
    assert world.records() == []
    world.assert_clean()


@EACH
@pytest.mark.parametrize("pooler", ["pgbouncer"], indirect=True)
def test_a_pooler_that_knows_no_prepared_statements_is_recognised(
    behind: Callable[..., Any], add_view: Callable[..., Any], driver: str
) -> None:
    """Where psycopg may prepare, but never does: only what came before stays."""
    options: dict[str, Any] = {"pool_size": 8}
    if driver == "psycopg":
        options["connect_args"] = {"prepare_threshold": 10**6}
    without = {"max_prepared_statements": 0} if PgBouncer.prepares() else {}
    world = behind(without, SQLALCHEMY_ENGINE_OPTIONS=options)
    runs = add_view(world)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: world.post(key=f"key-{number}"), range(200)))
    assert {answer.status_code for answer in answers} == {201}
    assert len(runs) == world.count() == 200
    assert world.sql("select count(*) from pg_prepared_statements")[0][0] < 60


@EACH
@pytest.mark.parametrize("pooler", ["pgbouncer"], indirect=True)
def test_one_connection_more_than_requests_at_once_is_enough(behind, add_view):
    """Each holds one, as it has read before its view, while its claim needs another."""
    world = behind({"default_pool_size": 5}, SQLALCHEMY_ENGINE_OPTIONS={"pool_size": 4})
    add_view(world)
    barrier = threading.Barrier(4)

    @world.app.before_request
    def read():
        world.db.session.execute(sa.text("select 1"))
        barrier.wait(10)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda number: world.post(key=f"key-{number}"), range(20)))
    assert {answer.status_code for answer in answers} == {201}
