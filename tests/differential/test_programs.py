"""Random programs, and those that found something: plain and protected, they do the same.

``make differential`` runs ten thousand; here are a hundred, so that each run of the tests sees
others. What they are made from is printed: ``PROGRAMS_SEED=7`` makes the same ones again.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

import servers.urls
from tests import sessions
from tests.differential import sentences
from tests.differential.comparison import Twins, unlike
from tests.differential.kept import KEPT
from tests.differential.programs import Program, run_each, shrunk
from tests.differential.steps import do
from tests.differential.summary import Summary
from tests.differential.tables import EQUAL, HELPER, REFUSED
from tests.differential.verdicts import is_on_the_page

PROGRAMS = 100


@pytest.fixture(scope="module", params=["psycopg2", "psycopg"])
def twins(request: pytest.FixtureRequest, postgres: Any, quiet: None) -> Iterator[Twins]:
    """The applications that all programs run in, with each driver."""
    usual, servers.urls.driver = servers.urls.driver, request.param
    twins = Twins(postgres, f"programs_{request.param}")
    yield twins
    twins.close()
    servers.urls.driver = usual


@pytest.mark.parametrize("program", KEPT.values(), ids=KEPT)
def test_what_once_was_different_is_equal_or_refused(twins: Twins, program: Program) -> None:
    verdict = twins.compare(program)
    assert not verdict.differences, str(verdict)


@pytest.mark.parametrize("program", EQUAL.values(), ids=EQUAL)
def test_what_need_not_be_refused_is_equal(twins: Twins, program: Program) -> None:
    verdict = twins.compare(program)
    assert (verdict.differences, verdict.refusal) == ([], ""), str(verdict)


@pytest.mark.parametrize("program", REFUSED.values(), ids=REFUSED)
def test_a_second_session_beside_uncommitted_work_is_refused(twins: Twins, program: Program) -> None:
    verdict = twins.compare(program)
    assert not verdict.differences, str(verdict)
    if not (sessions.usual == "plain" and HELPER in program.kinds):  # that session is the view's
        assert "session" in verdict.refusal, str(verdict)


def test_random_programs_are_equal_or_refused(twins: Twins) -> None:
    number = int(os.environ.get("PROGRAMS_SEED") or random.SystemRandom().randrange(10**6))
    print(f"PROGRAMS_SEED={number}")
    summary = Summary(twins)
    summary.run(PROGRAMS, number)
    print(summary)
    assert not summary.different, "\n".join(map(str, summary.shrunk(most=3)))
    assert not summary.emptiness


FAILED_END = Program(
    view=(
        do("count up"),
        do("add", "c"),
        do("nested, undone", do("savepoint"), do("insert", "c"), do("release the savepoint")),
        do("commit"),
    )
)
"""The commit of the plain application is a rollback, which nobody is told."""

BY_CLASS = Program(
    view=(
        do("insert", "c"),
        do("commit"),
        do("count up"),
        do("fail", "unique"),
        do("nested, first error ends it", do("fail", "cancelled")),
        do("fail", "NUL"),
        do("rollback"),
    )
)

LISTED = {"an end that failed": FAILED_END, "another class of error": BY_CLASS}


@pytest.mark.parametrize("program", LISTED.values(), ids=LISTED)
def test_a_difference_on_the_page_is_none(twins: Twins, program: Program) -> None:
    verdict = twins.compare(program)
    assert (verdict.differences, verdict.refusal) == ([], ""), str(verdict)
    assert verdict.plain.first.text != verdict.protected.first.text  # else it would prove nothing


@pytest.mark.parametrize("sentence", [sentences.UNRELEASED, sentences.BY_CLASS])
def test_what_the_verdict_forgives_is_on_the_page(sentence: str) -> None:
    assert is_on_the_page(sentence)


WRONG = {
    "lost": "delete from item where label = 'c'",
    "doubled": "update tally set amount = amount + 1",
    "another's": "insert into audit values ('again')",
}


@pytest.mark.parametrize("program", LISTED.values(), ids=LISTED)
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_row_that_is_lost_or_doubled_beside_it_is_found(
    twins: Twins, program: Program, wrong: str
) -> None:
    with twins.at_each_commit(wrong):
        assert any(each.startswith("rows") for each in twins.compare(program).differences)


def test_another_class_of_error_where_nothing_had_failed_is_found() -> None:
    failed, aborted = ["fail", "DataError"], ["fail", "InternalError 25P02"]
    before = ["fail", "IntegrityError 23505"]
    assert list(unlike([failed], [aborted])) == [(failed, aborted)]
    assert list(unlike([before, failed], [before, aborted])) == []
    end = ["rollback", "done"]
    assert list(unlike([before, end, failed], [before, end, aborted])) == [(failed, aborted)]
    assert list(unlike([before, failed], [before, ["fail", "OperationalError"]]))
    assert list(unlike([before, ["read", [1]]], [before, ["read", "InternalError 25P02"]]))


def test_a_seed_makes_the_same_programs_again() -> None:
    made: list[list[Program]] = [[], [], []]
    for number, programs in zip([7, 7, 8], made, strict=True):
        run_each(20, number, programs.append)
    assert made[0] == made[1] != made[2]


def test_a_shrunk_program_has_nothing_that_is_not_needed() -> None:
    inner = do("nested, kept", do("flush"), do("add", "a"), do("read"))
    program = Program((do("read"), do("nested, undone", inner), do("commit")), answer="conflict")
    smallest = shrunk(program, lambda each: {"add", "commit"} <= each.kinds)
    assert smallest == Program((do("add", "a"), do("commit")))
