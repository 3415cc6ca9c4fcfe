"""Each cure has a program that shows when it is taken away.

``python -m tests.differential --mutants`` tells which of all kept programs show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import servers.urls
from tests import sessions
from tests.differential.comparison import Twins
from tests.differential.mutants import MUTANTS, Mutant, applied, compare
from tests.differential.twins import Schema

pytestmark = pytest.mark.of_tests


@pytest.fixture(scope="module")
def twins(postgres: Any, quiet: None) -> Iterator[Callable[[Mutant], Twins]]:
    """The applications that a mutant serves in: the same for most."""
    made: dict[Schema, Twins] = {}

    def of(mutant: Mutant) -> Twins:
        if mutant.schema not in made:
            made[mutant.schema] = Twins(postgres, f"mutants_{len(made)}", schema=mutant.schema)
        return made[mutant.schema]

    yield of
    for each in made.values():
        each.close()


OF_DRIVER = {
    name: mutant for name, mutant in MUTANTS.items() if mutant.driver in ("", servers.urls.driver)
}


HELPER = "in a helper's context"


@pytest.mark.parametrize("mutant", OF_DRIVER.values(), ids=OF_DRIVER)
def test_a_mutant_is_caught_and_put_back(twins: Callable[[Mutant], Twins], mutant: Mutant) -> None:
    for program in mutant.programs.values():
        if sessions.usual == "plain" and HELPER in program.kinds:
            continue  # its session is the view's
        with applied(mutant):
            found = compare(twins(mutant), program, mutant.first)
            assert mutant.shows(found), f"not caught by\n{program}"
        sound = compare(twins(mutant), program, mutant.first)
        assert not mutant.shows(sound), str(sound)
