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
from tests.differential.comparison import Twins
from tests.differential.kept import KEPT
from tests.differential.programs import Program, run_each, shrunk
from tests.differential.steps import do
from tests.differential.summary import Summary
from tests.differential.tables import EQUAL, HELPER, OUTLASTING, REFUSED

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


@pytest.mark.parametrize("program", OUTLASTING.values(), ids=OUTLASTING)
def test_a_setting_that_would_outlast_its_transaction_is_refused(
    twins: Twins, program: Program
) -> None:
    verdict = twins.compare(program)
    assert not verdict.differences, str(verdict)
    assert "would still be in force" in verdict.refusal, str(verdict)


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
