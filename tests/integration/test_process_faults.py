"""A worker dies: what is told and what a retry finds."""

import contextlib
import http.client
import json
import multiprocessing
import os
import signal
import time

import pytest
import sqlalchemy as sa

import servers
from laboratory import running
from tests import sessions
from tests.faults.app import POINTS, create_tables
from tests.faults.nemesis import COMPLETION
from tests.integration.shops import HELD, Shop, promises_hold
from tests.stores import BOTH
from tests.waiting import wait_until

BROKEN = (OSError, http.client.HTTPException)


PROBE_SECONDS = 0.1
"""How long a dead worker's lock in Redis is believed."""


@pytest.fixture(scope="module")
def faulty(postgres, redis_server, tmp_path_factory):
    """The application of the soak, whose workers die where a request asks for it."""
    url = postgres.database("points")
    create_tables(url)
    environment = {
        "DATABASE_URL": url,
        "REDIS_URL": redis_server.url,
        "FAULTS_JOURNAL": str(tmp_path_factory.mktemp("points") / "journal.jsonl"),
        "FAULTS_PROBE_AFTER": str(PROBE_SECONDS),
        "FAULTS_SESSIONS": sessions.usual,
    }
    application = "tests.faults.app:create_app()"
    kind = ("--worker-class", "sync", "--workers", "2", "--log-level", "critical")
    with running.gunicorn(application, environment, *kind) as (address, process):
        yield Shop(address, url, process.pid, None, None)


ROW_AND_RECORDS = {
    "lock": (0, []),
    "claim": (0, ["in_progress"]),
    "view": (0, ["in_progress"]),
    "write": (0, ["in_progress"]),
    "answer": (0, ["in_progress"]),
    "commit": (1, ["completed"]),
    "release": (1, ["completed"]),
}
"""What is there right after the death, at each of the soak's points."""


@pytest.mark.parametrize("point", POINTS)
def test_wherever_a_worker_is_killed_the_retry_finds_all_or_nothing(faulty, point):
    headers = {"Idempotency-Key": point, "X-User": "alice", "Content-Type": "application/json"}

    def pay(fault="", body='{"body": 1}'):
        return running.send(faulty.url, "POST", "/payments", {**headers, "X-Fault": fault}, body)

    def records():
        return dict(faulty.sql("SELECT encode(key, 'hex'), state FROM idempotency_record"))

    def there():
        """The rows of this key, and the states of the records that were not there before."""
        rows = faulty.sql(f"SELECT count(*) FROM payment WHERE key = '{point}'")
        return rows[0][0], [state for key, state in records().items() if key not in before]

    before = records()
    with pytest.raises(BROKEN):
        pay(point)
    assert there() == ROW_AND_RECORDS[point]
    if point != "lock":
        assert pay(body='{"body": 2}').status == 422, "a changed request is told so"
    died, answers = time.monotonic(), []
    while not answers or answers[-1].status == 409:
        assert time.monotonic() - died < PROBE_SECONDS + 1.5, "the probe age, and a little"
        answers.append(pay())
    replayed = answers[-1].headers.get("Idempotent-Replayed") == "true"
    assert (answers[-1].status, replayed) == (201, ROW_AND_RECORDS[point][0] == 1)
    assert json.loads(answers[-1].body)["attempt"] == (1 if replayed or point == "lock" else 2)
    assert pay().body == answers[-1].body
    assert there() == (1, ["completed"])
    wait_until(faulty.nothing_is_left_open, "no transaction is open")  # a new worker's first are


def test_a_worker_killed_while_its_commit_is_on_its_way(open_shop, clients):
    with contextlib.ExitStack() as stack:
        proxies, told = [], {}

        def through(url):
            proxies.append(stack.enter_context(servers.FaultProxy(url)))
            return proxies[0].url

        shop = open_shop(through=through)
        (proxy,) = proxies
        for number, (key, arrives) in enumerate({"arrives": True, "is-lost": False}.items()):
            first = clients.submit(shop.pay, key, HELD)
            worker = int(shop.arrived.read_text())
            proxy.hold(COMPLETION)  # whose COMMIT is in the same message
            shop.go_on.write_text("go on")
            proxy.wait_until_held()
            os.kill(worker, signal.SIGKILL)
            with pytest.raises(BROKEN):
                first.result()
            assert shop.sql("SELECT count(*) FROM payment") == [(number,)]
            assert shop.pay(key, HELD).status == 409
            proxy.let_go() if arrives else proxy.cut()
            told[key] = shop.pay_for_sure(key, HELD, may_break=True)
            body = json.loads(told[key][-1].body)
            assert body["attempt"] == (1 if arrives else 2)
            assert (body["process"] == worker) is arrives
            told[key].append(shop.pay(key, HELD))
        promises_hold(shop, told)


@BOTH
def test_a_worker_killed_inside_a_statement_blocks_nobody_for_long(world, add_view):
    def sleep_in_the_server():
        if multiprocessing.parent_process() is not None:
            world.db.session.execute(sa.text("select pg_sleep(30)"))

    add_view(world, during=sleep_in_the_server)
    worker = multiprocessing.get_context("fork").Process(target=world.post)
    worker.start()
    busy = "select count(*) from pg_stat_activity where query like '%pg_sleep(30)' and state = 'active'"
    wait_until(lambda: world.sql(busy) == [(1,)], "the view's statement runs")
    worker.kill()
    worker.join(20)
    retry = wait_until(lambda: (it := world.post()).status_code != 409 and it, "the row is free")
    assert retry.status_code == 201
    assert world.count() == 1
    assert world.sql("select state, attempt from idempotency_record") == [("completed", 2)]
