"""The laboratory of the differential suite, and how a case becomes a test."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from tests.databases import Databases
from tests.differential.harness import Case, Laboratory, Outcome


@pytest.fixture(scope="module")
def laboratory(databases: Databases) -> Iterator[Laboratory]:
    """Applications for the cases of a module."""
    laboratory = Laboratory(databases)
    yield laboratory
    laboratory.close()


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    """Without the log of each program that fails by name."""
    log = logging.getLogger("flask_idempotency")
    level = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(level)


@pytest.fixture
def run_pair(laboratory: Laboratory, driver: str) -> Callable[[Case, str], Outcome]:
    """Runs a case with a store in a plain and a protected application."""
    laboratory.driver = driver
    return laboratory.run_pair


@pytest.fixture
def hold(run_pair: Callable[[Case, str], Outcome]) -> Callable[[Case, str], Outcome]:
    """Runs a case and holds it against its verdict."""

    def check(case: Case, store: str) -> Outcome:
        outcome = run_pair(case, store)
        assert outcome.problems == [], "\n".join([case.name, *outcome.problems])
        return outcome

    return check
