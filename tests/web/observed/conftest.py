"""Everything that is told."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

import flask_idempotency
from flask_idempotency.web.setup import observer

SIGNALS = [
    name for name in flask_idempotency.__all__ if name.startswith(("operation_", "store_", "lock_"))
]


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """On a busy machine a question may take longer than any application should wait."""
    monkeypatch.setattr(observer, "PATIENCE_SECONDS", 10.0)


@pytest.fixture
def heard():
    """All events, each with the name of its signal."""
    events, receivers = [], []
    with ExitStack() as stack:
        for name in SIGNALS:

            def receive(_sender, event, name=name):
                events.append((name, event))

            receivers.append(receive)
            stack.enter_context(getattr(flask_idempotency, name).connected_to(receive))
        yield events
