"""A process that is forked inside an operation has no part in it: the child's work is its own.

Each case runs in a process of its own (``apps/forking_shop.py``): from Python 3.12 on, one with threads
warns of a fork. What the plain application does is the measure.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sqlite3
import time
from contextlib import closing

import psycopg2
import pytest

import servers
from tests.drivers import EACH, with_driver
from tests.forked import Program
from tests.integration.apps import copied_claim, forking_shop, orphan
from tests.integration.apps.forking_shop import ROWS, Case
from tests.stores import BOTH
from tests.waiting import wait_until

LONGEST_SECONDS = 120
"""How long a run of cases may take. Processes that read each other's replies wait for ever."""

FREE_AFTER_SECONDS = 2.5
"""The second after which a duplicate asks for the owner, and what a busy machine adds."""

BEFORE = ["clean", "added", "flushed", "committed"]
HOW = ["fork", "process", "pool"]
ROUTES = ["atomic", "leased", "step", "atomic-step"]
COPIED_AT = ["lock", "checkout", "claim"]
MIDDLE = "NotAtomic: the view's session or connection is used where the operation is not"
NOT_HERE = "LeaseLost: This process was forked inside the operation: it can neither end it nor tak"


@pytest.fixture
def environment(store, databases, redis_server, driver):
    url = with_driver(databases.take(), driver)
    redis_url = redis_server.url if store == "hybrid" else ""
    yield {"DATABASE_URL": url, "STORE": store, "REDIS_URL": redis_url}
    databases.give_back(with_driver(url, servers.urls.driver))


@pytest.fixture
def start(environment, tmp_path):
    """A function that starts a program; its process and those forked in it end with the test."""
    programs = []

    def start(main, *arguments):
        programs.append(Program(tmp_path, environment, main, *arguments))
        return programs[-1]

    yield start
    for program in programs:
        program.end()


@pytest.fixture
def to_its_end(start):
    """A function that runs a program to its end; the lines of JSON that it wrote, and its log."""

    def to_its_end(main, *arguments):
        program = start(main, *arguments)
        program.process.join(LONGEST_SECONDS)
        assert program.process.exitcode == 0, program.errors()
        return [json.loads(line) for line in program.lines()], program.errors()

    return to_its_end


@pytest.fixture
def run(to_its_end):
    """A function that runs cases; what each told."""

    def run(*cases):
        told, log = to_its_end(forking_shop.main, cases)
        assert len(told) == len(cases)
        assert "interrupted" not in log, "a child cannot tell"
        return told

    return run


def sql(environment, statement):
    connection = psycopg2.connect(servers.plain_dsn(environment["DATABASE_URL"]))
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall()
    finally:
        connection.close()


def rows(environment, table):
    """How many rows each case has, and how many of its keys."""
    return sql(
        environment,
        f'select "case", count(*), count(distinct key) from {table} group by "case" order by "case"',
    )


def assert_right(environment, cases, told):
    """Each operation has committed once, with its record; nothing is left open, or mixed up."""
    for case, each in zip(cases, told, strict=True):
        assert {answer["status"] for answer in each["answers"] + each["again"]} == {201}, (case, each)
        assert each["answers"] == each["again"], case
        assert each["is_sane"], case
        for number, answer in enumerate(each["answers"]):
            assert answer["seen"] == f"{case.name}/{number}", "another's reply"
            assert answer["left"] in (None, ROWS - 1), answer
    assert rows(environment, "payment") == sorted((case.name, case.keys, case.keys) for case in cases)
    wanted = sum(case.keys for case in cases)
    records = "select count(*), count(distinct key) from idempotency_record where state = 'completed'"
    assert sql(environment, records + " and name <> 'note'") == [(wanted, wanted)]
    still_open = (
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and state like 'idle in transaction%'"
    )
    wait_until(lambda: sql(environment, still_open) == [(0,)], "no transaction is open")


def told_by(told):
    return {answer["told"] for each in told for answer in each["answers"]}


def each_is(told, beginning):
    assert {each[: len(beginning)] for each in told_by(told)} == {beginning}, told_by(told)


def test_a_child_writes_on_a_session_of_its_own_as_in_the_plain_application(environment, run):
    cases = [
        Case(before, how, keys=8 if how == "process" else 2)
        for before, how in itertools.product(BEFORE, HOW)
    ]
    told = run(*cases)
    assert told_by(told) == {"done"}
    assert_right(environment, cases, told)
    protected = rows(environment, "payment"), rows(environment, "note")
    sql(environment, "with p as (delete from payment), n as (delete from note) select 1")
    plain = [Case(**{**vars(case), "plain": True}) for case in cases]
    # The plain view has no memory: the second request of each key writes again.
    assert told_by(run(*plain)) == {"done"}
    for table, found in zip(("payment", "note"), protected, strict=True):
        twice = [(name, 2 * count, keys) for name, count, keys in found]
        assert rows(environment, table) == twice


def test_a_session_that_is_between_two_transactions_is_the_parents_too(environment, run):
    cases = [
        Case(before, how, does="inherited")
        for before in ("clean", "committed")
        for how in ("fork", "process")
    ]
    told = run(*cases)
    each_is(told, MIDDLE)
    assert_right(environment, cases, told)
    assert rows(environment, "note") == []


def test_a_view_that_is_async_may_fork(environment, run):
    cases = [Case("flushed", "process", does=does, route="async") for does in ("own", "query")]
    told = run(*cases)
    assert told[0]["answers"][0]["told"] == "done"
    each_is(told[1:], MIDDLE)
    assert_right(environment, cases, told)


def test_a_session_in_the_middle_of_the_views_transaction_is_refused_by_name(environment, run):
    cases = [
        Case(before, how, does=does)
        for before in ("added", "flushed", "cursor")
        for how in ("fork", "process")
        for does in ("inherited", "query", "commit", "connection", "driver")
    ]
    told = run(*cases)
    each_is(told, MIDDLE)
    assert_right(environment, cases, told)
    assert rows(environment, "note") == []


@EACH
def test_an_open_cursor_is_the_parents(environment, run):
    """What the driver has fetched before the fork is in the child's memory; its socket is closed."""
    cases = [Case("cursor", how, does="read on", keys=5) for how in ("fork", "process")]
    told = run(*cases)
    each_is(told, "OperationalError: ")
    assert_right(environment, cases, told)


@EACH
def test_so_it_is_once_the_child_has_let_go_of_the_transaction(environment, run):
    cases = [
        Case(before, how, does=does)
        for before in ("added", "flushed", "cursor")
        for how in ("fork", "process")
        for does in ("after remove", "after rollback")
    ]
    told = run(*cases)
    each_is(told, MIDDLE)
    assert_right(environment, cases, told)
    assert rows(environment, "note") == []


@BOTH
def test_however_the_child_ends_the_operation_is_the_parents(environment, run):
    cases = [
        Case(before, "fork", does=does, ends=ends, route=route, keys=1)
        for route in ROUTES
        for before in ("added", "flushed")
        for does in ("nothing", "own", "query")
        for ends in ("exit", "sys.exit", "error", "return", "retryable", "collect")
        # Elsewhere the session is the application's, with what that does.
        if route in ("atomic", "atomic-step")
        or (before == "added" and does != "query" and ends != "collect")
    ]
    told = run(*cases)
    assert_right(environment, cases, told)
    stored = sql(environment, "select steps::text from idempotency_record where steps is not null")
    assert not [steps for (steps,) in stored if "by a child" in steps]


def test_there_is_no_present_operation_in_the_child(environment, run):
    cases = [Case("clean", how, does="present", route=route) for route in ROUTES for how in HOW]
    told = run(*cases)
    each_is(told, "RuntimeError: current_operation is only there while a view")
    assert_right(environment, cases, told)


def test_it_can_neither_take_a_step_nor_extend_the_lease(environment, run):
    cases = [
        Case("clean", how, does=does, route="leased")
        for does in ("step", "atomic step", "extend")
        for how in HOW
    ]
    told = run(*cases)
    each_is(told, NOT_HERE)
    assert_right(environment, cases, told)
    assert sql(environment, "select count(steps) from idempotency_record") == [(0,)]


def test_run_in_the_child_is_an_operation_of_its_own(environment, run):
    cases = [
        Case("committed" if route in ("leased", "step") else "flushed", how, does="run", route=route)
        for route in ROUTES
        for how in ("fork", "process")
    ]
    told = run(*cases)
    assert told_by(told) == {"done, done"}
    assert_right(environment, cases, told)
    assert rows(environment, "note") == sorted((case.name, 2, 2) for case in cases)


@BOTH
def test_a_request_that_a_fork_copies_runs_in_the_parent_alone(environment, to_its_end):
    cases = [f"{route}/{place}" for route in ("atomic", "leased") for place in COPIED_AT]
    cases.remove("leased/checkout")  # a lease is claimed past the pool of the application
    told, _ = to_its_end(copied_claim.main, cases)
    assert [case for case, _, _ in told] == [case for case in cases for _ in range(2)]
    for (_, status, ran), (_, *parent) in zip(told[::2], told[1::2], strict=True):
        assert parent == [201, True]
        assert not ran
        assert status >= 400
    assert sql(environment, "select count(*) from payment") == [(len(cases),)]


@BOTH
def test_a_child_that_outlives_its_worker_does_not_keep_its_key(environment, start, monkeypatch):
    program = start(orphan.main, "/atomic")
    wait_until(lambda: len(program.lines()) == 2, "the view and its child tell")
    (child,) = {int(line) for line in program.lines()} - {program.process.pid}
    os.kill(program.process.pid, signal.SIGKILL)
    died = time.monotonic()
    program.process.join()
    os.kill(child, 0)  # it lives
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    client = copied_claim.create_app().test_client()
    while (status := client.post("/atomic", headers=orphan.KEY).status_code) == 409:
        assert time.monotonic() - died < FREE_AFTER_SECONDS
    assert status == 201
    assert sql(environment, "select count(*) from payment") == [(1,)]


class TestSQLite:
    """Its locks belong to a process, and it does not know that it was forked."""

    @pytest.fixture
    def file(self, tmp_path):
        return tmp_path / "shop.db"

    @pytest.fixture
    def environment(self, file):
        return {"DATABASE_URL": f"sqlite:///{file}", "STORE": "sql", "REDIS_URL": ""}

    def check(self, cases, told, file):
        for case, each in zip(cases, told, strict=True):
            statuses = {answer["status"] for answer in each["answers"] + each["again"]}
            assert statuses == {201}, (case, each)
            assert each["answers"] == each["again"]
            assert each["is_sane"]
            assert {answer["journal"] for answer in each["answers"]} == {True}, "the parent's journal"
        with closing(sqlite3.connect(file)) as connection:
            assert connection.execute("pragma integrity_check").fetchall() == [("ok",)]
            found = connection.execute("select count(*), count(distinct key) from payment").fetchall()
            assert found == [(sum(case.keys for case in cases),) * 2]
            assert connection.execute("select count(*) from note").fetchall() == [(0,)]

    def test_a_child_is_refused_the_parents_transaction_by_name(self, run, file):
        does = ["inherited", "query", "commit", "connection", "driver"]
        cases = [Case("flushed", how, does=each) for how in HOW[:2] for each in does]
        told = run(*cases)
        each_is(told, MIDDLE)
        self.check(cases, told, file)

    def test_however_the_child_ends_the_transaction_is_the_parents(self, run, file):
        cases = [
            Case("flushed", "fork", does="nothing", ends=ends, route=route)
            for route in ("atomic", "atomic-step")
            for ends in ("exit", "sys.exit", "error", "return", "collect")
        ]
        self.check(cases, run(*cases), file)
