"""Views as the manuals of SQLAlchemy, psycopg2 and PostgreSQL have them: plain and protected, the same.

``make differential ARGS="--documented 10000"`` runs many; here are the ones that found something, and
the same hundred each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import servers.urls
from tests.differential import documented_kept as kept
from tests.differential.comparison import Twins
from tests.differential.documented import documented
from tests.differential.documented_core import OF_DRIVER
from tests.differential.documented_schema import DOCUMENTED, WITH_HIDDEN
from tests.differential.programs import Program
from tests.differential.steps import do
from tests.differential.summary import Summary

PROGRAMS, SEED = 100, 23


@pytest.fixture(scope="module")
def twins(postgres: Any, quiet: None) -> Iterator[Twins]:
    """The applications that most programs run in."""
    twins = Twins(postgres, "documented", schema=DOCUMENTED)
    yield twins
    twins.close()


@pytest.fixture(scope="module")
def twins_with_hidden(postgres: Any, quiet: None) -> Iterator[Twins]:
    """The applications of a database in which reads may write."""
    twins = Twins(postgres, "hidden", schema=WITH_HIDDEN)
    yield twins
    twins.close()


@pytest.fixture(scope="module")
def twins_of(request: pytest.FixtureRequest, postgres: Any, quiet: None) -> Iterator[Twins]:
    """Applications for a driver: they are made when the first program comes."""
    twins = Twins(postgres, f"ways_{request.param}", schema=DOCUMENTED)
    yield twins
    twins.close()


KEPT = {**kept.KEPT, **(kept.PSYCOPG if servers.urls.driver == "psycopg" else {})}


@pytest.mark.parametrize("program", KEPT.values(), ids=KEPT)
def test_what_once_was_different_is_equal_or_refused(twins: Twins, program: Program) -> None:
    verdict = twins.compare(program)
    assert not verdict.differences, str(verdict)


WAYS = [pytest.param(of, of, way, id=f"{of}, {way}") for of, ways in OF_DRIVER.items() for way in ways]


@pytest.mark.parametrize(("twins_of", "of", "way"), WAYS, indirect=["twins_of"])
def test_each_way_of_a_driver_is_part_of_a_unit(
    twins_of: Twins, of: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a unit that was committed, so that a savepoint waits; undone, rolled back, committed."""
    monkeypatch.setattr(servers.urls, "driver", of)
    commit, rollback, step = do("commit"), do("rollback"), do("driver", of, way)
    first, second = (do("insert", "a"), commit), (do("insert", "b"), rollback)
    undone, end = do("nested, undone", step), (do("text", "read"), do("text", "journal"))
    verdict = twins_of.compare(
        Program(view=(*first, undone, step, rollback, *second, step, commit, *end))
    )
    assert (verdict.differences, verdict.refusal) == ([], ""), str(verdict)


@pytest.mark.parametrize("program", kept.HIDDEN.values(), ids=kept.HIDDEN)
def test_a_read_that_writes_is_no_read(twins_with_hidden: Twins, program: Program) -> None:
    verdict = twins_with_hidden.compare(program)
    assert not verdict.differences, str(verdict)


def test_views_from_the_manuals_are_equal_or_refused(twins: Twins) -> None:
    summary = Summary(twins, documented(servers.urls.driver))
    summary.run(PROGRAMS, SEED)
    print(summary)
    assert not summary.different, "\n".join(map(str, summary.shrunk(most=3)))
    assert not summary.emptiness
