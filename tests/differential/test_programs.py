"""Random programs, and chosen ones: plain and protected, they do the same, or one is refused by name.

``make differential`` runs ten thousand; here are a hundred for each driver, so that each run of the
tests sees others. What they are made from is printed: ``PROGRAMS_SEED=7`` makes the same ones again.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from tests import sessions
from tests.databases import Databases
from tests.differential import sentences
from tests.differential.__main__ import run
from tests.differential.chosen import EITHER, EQUAL, HELPER, HIDDEN, REFUSED
from tests.differential.comparison import Twins, normal
from tests.differential.manuals import OF_DRIVER
from tests.differential.steps import COMMIT, ROLLBACK, Program, do
from tests.differential.verdicts import is_on_the_page
from tests.drivers import each_unless_named

PROGRAMS = 100


@pytest.fixture(scope="module")
def both(databases: Databases, quiet: None) -> Iterator[dict[str, Twins]]:
    """The applications that all programs run in, with each driver."""
    made = {driver: Twins(databases, driver) for driver in ("psycopg2", "psycopg")}
    yield made
    for twins in made.values():
        twins.close()


@pytest.fixture
def twins(both: dict[str, Twins], driver: str) -> Twins:
    return both[driver]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    each_unless_named(metafunc)


def test_a_read_that_writes_is_no_read(databases: Databases, quiet: None) -> None:
    twins = Twins(databases, "psycopg2", hidden=True)
    for program in HIDDEN.values():
        verdict = twins.compare(program)
        assert not verdict.differences, str(verdict)
    twins.close()


def seed() -> int:
    number = int(os.environ.get("PROGRAMS_SEED") or random.SystemRandom().randrange(10**6))
    print(f"PROGRAMS_SEED={number}")
    return number


OF_DRIVERS = {
    *("fail", "text", "cursor", "driver SQL", "for a connection", "insert by connection"),
    *("open a stream", "in a savepoint of the connection", "a session on the connection"),
}
"""What the file of a driver hears otherwise than that of another."""

CHOSEN = {
    f"{driver}-{name}": (driver, program, expected)
    for driver in ("psycopg2", "psycopg")
    for expected, programs in {"equal": EQUAL, "equal or refused": EITHER, "refused": REFUSED}.items()
    for name, program in programs.items()
    if driver == "psycopg2" or program.before or program.kinds & OF_DRIVERS
}


@pytest.mark.parametrize(
    ("driver", "program", "expected"), CHOSEN.values(), ids=CHOSEN, indirect=["driver"]
)
def test_a_chosen_program_is_equal_or_refused(twins: Twins, program: Program, expected: str) -> None:
    verdict = twins.compare(program)
    assert not verdict.differences, str(verdict)
    if sessions.usual == "plain" and HELPER in program.kinds:
        return  # that session is the view's
    assert ("refused" if verdict.refusal else "equal") in expected, str(verdict)


def test_random_programs_are_equal_or_refused(twins: Twins) -> None:
    print(run(twins, PROGRAMS, seed()))


WAYS = {way for ways in OF_DRIVER.values() for way in ways}


@pytest.mark.parametrize("way", sorted(WAYS))
def test_each_way_of_a_driver_is_part_of_a_unit(twins: Twins, way: str) -> None:
    """Undone, rolled back, and committed, behind a unit that was committed."""
    if way not in OF_DRIVER[twins.driver]:
        return
    step = do("driver", way)
    undone, end = do("nested, undone", step), (do("text", "authors"), do("text", "journal"))
    steps = (do("add", "a"), COMMIT, undone, step, ROLLBACK, do("add", "b"), ROLLBACK, step, COMMIT)
    verdict = twins.compare(Program(view=steps + end))
    assert (verdict.differences, verdict.refusal) == ([], ""), str(verdict)


# The instrument itself

FAILED_END = Program(
    view=(
        *(do("count up"), do("add", "c")),
        do("nested, undone", do("savepoint"), do("insert", "c"), do("release the savepoint")),
        COMMIT,
    )
)
"""The commit of the plain application is a rollback, which nobody is told."""

BY_CLASS = Program(
    view=(do("insert", "c"), COMMIT, do("fail", "unique"), do("open a stream"), ROLLBACK)
)

LISTED = {"an end that failed": FAILED_END, "another class of error": BY_CLASS}


@pytest.mark.parametrize("program", LISTED.values(), ids=LISTED)
def test_a_difference_on_the_page_is_none(twins: Twins, program: Program) -> None:
    verdict = twins.compare(program)
    assert (verdict.differences, verdict.refusal) == ([], ""), str(verdict)
    differs = program is FAILED_END or twins.driver == "psycopg2"  # else it would prove nothing
    assert (verdict.plain.first.text != verdict.protected.first.text) is differs


@pytest.mark.parametrize(
    "sentence",
    [
        *(sentences.UNRELEASED, sentences.BY_CLASS, sentences.SECOND_COMMIT),
        *(sentences.KEPT, sentences.ROLLED_BACK),
    ],
)
def test_what_the_verdict_forgives_is_on_the_page(sentence: str) -> None:
    assert is_on_the_page(sentence)


WRONG = {
    "lost": "delete from item where label = 'c'",
    "doubled": "update tally set amount = amount + 1",
    "another's": "insert into audit values ('again')",
}


@pytest.mark.parametrize("program", LISTED.values(), ids=LISTED)
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_row_that_is_lost_or_doubled_is_found(twins: Twins, program: Program, wrong: str) -> None:
    with twins.at_each_commit(wrong):
        assert any(each.startswith("rows") for each in twins.compare(program).differences)


def test_another_class_of_error_where_nothing_had_failed_is_found() -> None:
    failed, aborted = ["open a stream", "DataError"], ["open a stream", "InternalError 25P02"]
    before, end = ["fail", "IntegrityError 23505"], ["rollback", "done"]
    assert normal([failed]) != normal([aborted])
    assert normal([before, failed]) == normal([before, aborted])
    assert normal([before, end, failed]) != normal([before, end, aborted])
    assert normal([before, ["read", [1]]]) != normal([before, ["read", "InternalError 25P02"]])
