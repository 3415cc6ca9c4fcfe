"""What pytest-flask stands on: its ``client`` and ``live_server`` serve the usual ``app``.

And all that is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from flask import Flask

import flask_idempotency
from flask_idempotency import idempotent
from flask_idempotency.session import stray

SIGNALS = [name for name in flask_idempotency.__all__ if name.startswith(("operation_", "store_"))]


@pytest.fixture
def app(world: Any) -> Flask:
    return world.app


@pytest.fixture(autouse=True)
def _push_request_context() -> None:
    """Not pytest-flask's: a request in the context of another shares its ``g`` and its session."""


@pytest.fixture(autouse=True)
def _nobody_was_warned() -> None:
    """Some warnings are given once for each process."""
    stray.warn_once.cache_clear()


@pytest.fixture
def heard() -> Iterator[list[Any]]:
    """All events, each with the name of its signal."""
    events: list[Any] = []
    receivers = []
    with ExitStack() as stack:
        for name in SIGNALS:

            def receive(_sender: Any, event: Any, name: str = name) -> None:
                events.append((name, event))

            receivers.append(receive)  # a signal keeps a weak reference only
            stack.enter_context(getattr(flask_idempotency, name).connected_to(receive))
        yield events


def add(world: Any, view: Any = lambda: ("", 201), **options: Any) -> None:
    """Register a view at ``/payments`` as the operation ``pay``."""
    world.app.add_url_rule("/payments", "pay", idempotent(**options)(view), methods=["POST"])


def is_replayed(response: Any) -> bool:
    return "Idempotent-Replayed" in response.headers
