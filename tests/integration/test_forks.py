"""A process that is forked inside an operation has no part in it: the child's work is its own.

Each case runs in a process of its own (``apps/forking_shop.py``): from Python 3.12 on, one with threads
warns of a fork.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from contextlib import closing
from itertools import product

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

HOW = ["fork", "process"]
ROUTES = ["atomic", "leased", "atomic-step"]
MIDDLE = "NotAtomic: the view's session or connection is used where the operation is not"
NOT_HERE = "LeaseLost: This process was forked inside the operation: it can neither end it nor tak"
NOT_PRESENT = "RuntimeError: current_operation is only there while a view"


@pytest.fixture
def environment(store, databases, redis_server, driver, tmp_path):
    if store == "sql":
        yield {"DATABASE_URL": f"sqlite:///{tmp_path}/shop.db", "STORE": "sql", "REDIS_URL": ""}
        return
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


def sql(environment, statement):
    url = environment["DATABASE_URL"]
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
            return connection.execute(statement).fetchall()
    connection = psycopg2.connect(servers.plain_dsn(url))
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall()
    finally:
        connection.close()


def rows(environment, table):
    """How many rows each case has, and how many of its keys."""
    grouped = f'select "case", count(*), count(distinct key) from {table} group by "case"'
    return sorted(sql(environment, grouped))


def assert_right(environment, cases, told):
    """Each operation has committed once, with its record; nothing is left open, or mixed up."""
    for case, each in zip(cases, told, strict=True):
        assert {answer["status"] for answer in each["answers"] + each["again"]} == {201}, (case, each)
        assert each["answers"] == each["again"], case
        assert each["is_sane"], case
        for number, answer in enumerate(each["answers"]):
            assert answer["seen"] == f"{case.name}/{number}", "another's reply"
            assert answer["left"] in (None, ROWS - 1), answer
            assert answer["journal"] is (environment["STORE"] == "sql"), "the parent's journal"
    assert rows(environment, "payment") == sorted((case.name, case.keys, case.keys) for case in cases)
    wanted = sum(case.keys for case in cases)
    records = "select count(*), count(distinct key) from idempotency_record where state = 'completed'"
    assert sql(environment, records + " and name <> 'note'") == [(wanted, wanted)]
    if environment["STORE"] == "sql":
        assert sql(environment, "pragma integrity_check") == [("ok",)]
        return
    still_open = (
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and state like 'idle in transaction%'"
    )
    wait_until(lambda: sql(environment, still_open) == [(0,)], "no transaction is open")


@pytest.fixture
def run(to_its_end, environment):
    """A function that runs cases, each of which must be right; how often each child wrote."""

    def run(cases, says=None):
        told, log = to_its_end(forking_shop.main, cases)
        assert len(told) == len(cases)
        assert "interrupted" not in log, "a child cannot tell"
        assert_right(environment, cases, told)
        if says is not None:
            said = {answer["told"] for each in told for answer in each["answers"]}
            assert {each[: len(says)] for each in said} == {says}, said
        return rows(environment, "note")

    return run


OWN = [
    Case(before, how, keys=8 if how == "process" else 2)
    for before, how in product(["clean", "added", "flushed", "committed"], HOW)
]
"""The child works on a session of its own."""


def test_a_child_writes_on_a_session_of_its_own_as_in_the_plain_application(run):
    wanted = [(case.name, 3 * case.keys) for case in OWN]
    assert [(name, count) for name, count, _ in run(OWN, "done")] == sorted(wanted)


REFUSED = {
    # What the view has done when it forks, what the child does then, and what that says.
    "between two transactions": (["clean", "committed"], ["inherited"], MIDDLE),
    "in the view's transaction": (
        ["added", "flushed", "cursor"],
        ["inherited", "query", "commit", "connection", "driver"],
        MIDDLE,
    ),
    "after it has let go of it": (["flushed", "cursor"], ["after remove", "after rollback"], MIDDLE),
    "an open cursor": (["cursor"], ["read on"], "OperationalError: "),
}


@EACH
@pytest.mark.parametrize("situation", REFUSED)
def test_the_views_session_is_refused_to_a_child_by_name(run, situation):
    befores, does, says = REFUSED[situation]
    cases = [Case(before, how, does=do) for before, do, how in product(befores, does, HOW)]
    assert run(cases, says) == []


@BOTH
def test_however_the_child_ends_the_operation_is_the_parents(environment, run):
    ends = ["exit", "sys.exit", "error", "return", "retryable", "collect"]
    run(
        [
            Case(before, "fork", does=does, ends=end, route=route, keys=1)
            for route, before, does, end in product(
                ROUTES, ["added", "flushed"], ["nothing", "own"], ends
            )
            # In a lease the session is the application's, with what that does.
            if route != "leased" or (before == "added" and end != "collect")
        ]
    )
    stored = sql(environment, "select steps::text from idempotency_record where steps is not null")
    assert not [steps for (steps,) in stored if "by a child" in steps]


def test_there_is_no_present_operation_in_the_child(run):
    run(
        [Case("clean", how, does="present", route=route) for route in ROUTES for how in HOW],
        NOT_PRESENT,
    )


def test_it_can_neither_take_a_step_nor_extend_the_lease(environment, run):
    does = ["step", "atomic step", "extend"]
    run([Case("clean", how, does=do, route="leased") for do, how in product(does, HOW)], NOT_HERE)
    assert sql(environment, "select count(steps) from idempotency_record") == [(0,)]


def test_run_in_the_child_is_an_operation_of_its_own(run):
    cases = [
        Case("committed" if route == "leased" else "flushed", how, does="run", route=route)
        for route, how in product(ROUTES, HOW)
    ]
    assert run(cases, "done, done") == sorted((case.name, 2, 2) for case in cases)


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_sqlite_does_not_know_that_it_was_forked(run):
    does = ["inherited", "query", "commit", "connection", "driver"]
    refused = [Case("flushed", how, does=do) for do, how in product(does, HOW)]
    ended = [
        Case("flushed", "fork", does="nothing", ends=end, route=route)
        for route in ("atomic", "atomic-step")
        for end in ("exit", "sys.exit", "error", "return", "collect")
    ]
    assert run(refused + ended) == []


@BOTH
def test_a_request_that_a_fork_copies_runs_in_the_parent_alone(environment, to_its_end):
    # A lease is claimed past the pool of the application.
    cases = ["atomic/lock", "atomic/checkout", "atomic/claim", "leased/lock", "leased/claim"]
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
