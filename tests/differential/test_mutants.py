"""Each cure has a program that shows when it is taken away.

``python -m tests.differential --mutants`` tells which of all kept programs show it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.differential.comparison import Twins
from tests.differential.mutants import MUTANTS, Mutant, applied, compare


@pytest.fixture(scope="module")
def twins(postgres: Any) -> Iterator[Twins]:
    """The applications that all mutants serve."""
    log = logging.getLogger("flask_idempotency")
    level = log.level
    log.setLevel(logging.CRITICAL)  # of each that fails by name
    twins = Twins(postgres, "mutants")
    yield twins
    twins.close()
    log.setLevel(level)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_is_caught_and_put_back(twins: Twins, mutant: Mutant) -> None:
    for program in mutant.programs.values():
        with applied(mutant):
            assert compare(twins, program).differences, f"not caught by\n{program}"
        sound = compare(twins, program)
        assert not sound.differences, str(sound)
