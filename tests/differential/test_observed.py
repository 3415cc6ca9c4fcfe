"""What is only observed does the same as without the extension: never refused, never different.

The random programs of ``tests.differential.programs``, in a plain application and in one that observes.
``PROGRAMS_SEED=7`` makes the same ones again.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from flask_idempotency import operation_observed
from servers.postgresql import drop_database
from tests.differential.kept import KEPT
from tests.differential.programs import Program, run_each
from tests.differential.steps import name_of
from tests.differential.twins import Request, Twin, make_twin

PROGRAMS = 60


class Pair:
    """A plain application, and one that observes."""

    def __init__(self, postgres: Any) -> None:
        self._postgres = postgres
        self._names = ["observed_plain", "observed"]
        urls = [postgres.database(name) for name in self._names]
        self.plain = make_twin(urls[0], "", protected=False, redis_url=None)
        self.observed = make_twin(urls[1], "", protected=True, redis_url=None, enforce=False)
        self._keys = itertools.count(1)

    @property
    def twins(self) -> list[Twin]:
        return [self.plain, self.observed]

    def differences(self, program: Program) -> list[str]:
        """Where two requests with one key differ in the two applications."""
        key, found = f"key-{next(self._keys)}", []
        plain, observed = ([*_done(twin, program, key)] for twin in self.twins)
        for what, mine, other in zip(_NAMES * 2 + ("state",), plain, observed, strict=True):
            if mine != other:
                found.append(f"{what}: {mine} in plain, {other} in observed")
        for twin in self.twins:
            if twin.state() or not twin.is_fresh():
                twin.forget_connections()
        return found

    def close(self) -> None:
        for twin, name in zip(self.twins, self._names, strict=True):
            twin.close()
            drop_database(self._postgres.dsn, name)


_NAMES = ("status", "text", "rows", "seen", "errors", "views")


def _done(twin: Twin, program: Program, key: str) -> Iterator[Any]:
    twin.clear()
    for _ in range(2):
        yield from _facts(twin.post(program, key))
    yield twin.state()


def _facts(request: Request) -> tuple[Any, ...]:
    assert not request.replayed
    run = request.run
    errors = [name_of(error) for error in request.errors]
    return request.status, request.text, request.rows, run.seen, errors, run.views


@pytest.fixture(scope="module")
def pair(postgres: Any, quiet: None) -> Iterator[Pair]:
    pair = Pair(postgres)
    yield pair
    pair.close()


@pytest.mark.parametrize("program", KEPT.values(), ids=KEPT)
def test_what_differs_or_is_refused_where_it_is_enforced_is_equal(pair: Pair, program: Program) -> None:
    assert pair.differences(program) == []


def test_random_programs_are_equal(pair: Pair) -> None:
    number = int(os.environ.get("PROGRAMS_SEED") or random.SystemRandom().randrange(10**6))
    print(f"PROGRAMS_SEED={number}")
    heard: list[Any] = []
    different: list[tuple[Program, list[str]]] = []

    def note(_app: Any, event: Any) -> None:
        heard.append(event.would)

    def run(program: Program) -> None:
        if found := pair.differences(program):
            different.append((program, found))

    with operation_observed.connected_to(note):
        run_each(PROGRAMS, number, run)
    assert not different, "\n\n".join(map(str, different[:3]))
    assert len(heard) >= PROGRAMS
    assert {"executed", "replayed"} <= {*heard}
