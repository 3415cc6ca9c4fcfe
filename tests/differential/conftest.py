"""The laboratory of the differential suite, and how a case becomes a test."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from tests.databases import Databases
from tests.differential.harness import Case, Laboratory


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
def hold(laboratory: Laboratory, driver: str) -> Callable[[Case], None]:
    """Runs a case in a plain and a protected application, and holds it against its verdict."""

    def check(case: Case) -> None:
        laboratory.driver = driver
        problems = laboratory.run_pair(case).problems
        assert problems == [], "\n".join([case.name, *problems])

    return check
