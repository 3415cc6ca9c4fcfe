"""The pytest plugin of Flask-Idempotency: the fixtures of ``flask_idempotency.testing``.

A module of its own beside the package, because pytest imports it at every start: whatever is below
``flask_idempotency`` imports Flask with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from flask import Flask

    from flask_idempotency.testing import Clock


@pytest.fixture
def idempotency_clock() -> Clock:
    """The clock of the records in memory: ``idempotency_clock.advance(seconds)``."""
    from flask_idempotency.testing import Clock

    return Clock()


@pytest.fixture
def idempotency_memory(idempotency_clock: Clock) -> Iterator[Callable[..., None]]:
    """Call it with an application: until the test ends its records are in memory, by the clock.

    ``redis`` is a client for the lock, as in ``memory_store``.
    """
    from flask_idempotency.testing import memory_store

    with ExitStack() as stack:

        def use(app: Flask, *, redis: Any = None) -> None:
            stack.enter_context(memory_store(app, idempotency_clock, redis=redis))

        yield use
