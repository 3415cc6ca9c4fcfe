"""A process that is forked inside an operation has no part in it: the child's work is its own.

Each run of cases is a process of its own: from Python 3.12 on, one with threads warns of a fork.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import product

import pytest
import sqlalchemy as sa

from tests.drivers import with_driver
from tests.integration.apps import forking_shop
from tests.waiting import wait_until

LONGEST_SECONDS = 120
"""How long a run may take. Processes that read each other's replies wait for ever."""

FREE_AFTER_SECONDS = 2.5
"""The second after which a duplicate asks for the owner, and what a busy machine adds."""

MIDDLE = "NotAtomic: the view's session or connection is used where the operation is not"
NOT_HERE = "LeaseLost: This process was forked inside the operation: it can neither end it nor tak"
NOT_PRESENT = "RuntimeError: current_operation is only there while a view"

USES = ["write", "query", "commit", "use_connection"]
ENDS = ["exit", "sys.exit", "error", "retryable", "return"]
ROUTES = ["atomic", "leased", "step"]
# Routes; what the view has done when it forks; what the child does then; how it ends; what that says,
# and how many rows it has written.
CASES = [
    (["atomic"], ["clean", "added", "flushed", "committed"], ["own"], ["exit"], "done", 1),
    (["atomic"], ["clean", "committed"], ["write"], ["exit"], MIDDLE, 0),
    (["atomic"], ["added", "flushed"], [*USES, "write_anew"], ["exit"], MIDDLE, 0),
    (ROUTES, ["clean"], ["present"], ["exit"], NOT_PRESENT, 0),
    (["leased"], ["clean"], ["step", "extend"], ["exit"], NOT_HERE, 0),
    (["atomic", "step"], ["flushed"], ["run"], ["exit"], "done, done", 1),
    (["leased"], ["committed"], ["run"], ["exit"], "done, done", 1),
    (["atomic", "step"], ["flushed"], ["nothing"], ENDS, "done", 0),
    # In a lease the session is the application's, with what that does.
    (["leased"], ["added"], ["own"], ENDS, "done", 1),
]
SQLITE_CASES = [
    (["atomic"], ["flushed"], USES, ["exit"], MIDDLE, 0),
    # But not sys.exit: SQLite rolls back a connection that Python closes at the child's own end.
    (["atomic"], ["flushed"], ["nothing"], ["exit", "error", "retryable", "return"], "done", 0),
]


POSTGRES = [("hybrid", "psycopg2"), ("postgres", "psycopg")]


@pytest.fixture
def start(store, driver, databases, redis_server, tmp_path, monkeypatch):
    """A function that starts the shop; its process and those forked in it end with the test."""
    database = databases.take()
    url = f"sqlite:///{tmp_path}/shop.db" if store == "sql" else with_driver(database, driver)
    redis_url = redis_server.url if store == "hybrid" else ""
    for name, value in ("DATABASE_URL", url), ("STORE", store), ("REDIS_URL", redis_url):
        monkeypatch.setenv(name, value)
    started = []
    with (tmp_path / "log").open("w+b") as log:

        def start(*cases):
            command = [sys.executable, "-m", forking_shop.__name__, *cases]
            started.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
            return started[-1], lambda: (tmp_path / "log").read_text().splitlines()

        yield start
    for shop in started:
        with suppress(ProcessLookupError):
            os.killpg(shop.pid, signal.SIGKILL)
        shop.wait()
    databases.give_back(database)


def sql(statement):
    engine = sa.create_engine(os.environ["DATABASE_URL"], poolclass=sa.NullPool)
    with engine.connect() as connection:
        return connection.exec_driver_sql(statement).all()


@pytest.mark.parametrize(("store", "driver"), [*POSTGRES, ("sql", "psycopg2")], indirect=True)
def test_a_child_has_its_own_work_and_no_part_in_the_operation(start, store):
    expected = {}
    for *parts, says, rows in SQLITE_CASES if store == "sql" else CASES:
        expected |= {"/".join(case): (says, rows) for case in product(*parts)}
    shop, lines = start(*expected)
    assert shop.wait(LONGEST_SECONDS) == 0, lines()
    assert "interrupted" not in "".join(lines()), "a child cannot tell"
    found = [json.loads(line) for line in lines() if line.startswith('["')]
    assert {case for case, *_ in found} == expected.keys()
    for case, (status, answer), again in found:
        assert (status, answer.get("seen"), again) == (200, case, [200, answer]), (case, status, answer)
        assert answer["told"].startswith(expected[case][0]), (case, answer)
    written = {case: rows for case, (_, rows) in expected.items() if rows}
    for table, rows in ("payment", dict.fromkeys(expected, 1)), ("note", written):
        assert dict(sql(f"select key, count(*) from {table} group by key")) == rows
    records = "select count(*) from idempotency_record where state = 'completed' and name <> 'note'"
    assert sql(records) == [(len(expected),)]


@pytest.mark.parametrize(("store", "driver"), POSTGRES, indirect=True)
def test_a_child_that_outlives_its_worker_does_not_keep_its_key(start):
    key = "atomic/flushed/pause/exit"
    shop, lines = start(key)
    worker, child = map(int, wait_until(lines, "the child tells")[0].split())
    os.kill(worker, signal.SIGKILL)
    died = time.monotonic()
    shop.wait()
    os.kill(child, 0)  # it lives
    client = forking_shop.create_app().test_client()
    retry = {"Idempotency-Key": key}
    while (status := client.post("/atomic", headers=retry).status_code) == 409:
        assert time.monotonic() - died < FREE_AFTER_SECONDS
    assert status == 200
