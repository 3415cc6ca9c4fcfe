"""What pytest-flask stands on: its ``client`` and ``live_server`` serve the usual ``app``.

And all that is told.
"""

import re
from contextlib import ExitStack

import pytest

import flask_idempotency
from flask_idempotency import idempotent
from flask_idempotency.session import stray


@pytest.fixture
def app(world):
    return world.app


@pytest.fixture(autouse=True)
def _push_request_context():
    """Not pytest-flask's: a request in the context of another shares its ``g`` and its session."""


@pytest.fixture(autouse=True)
def _nobody_was_warned():
    """Some warnings are given once for each process."""
    stray.warn_once.cache_clear()


@pytest.fixture
def heard():
    """All events, each with the name of its signal."""
    events = []
    with ExitStack() as stack:
        for name in filter(re.compile("operation_|store_").match, flask_idempotency.__all__):
            receive = lambda _sender, event, name=name: events.append((name, event))  # noqa: E731
            stack.enter_context(getattr(flask_idempotency, name).connected_to(receive))
        yield events


def add(world, view=lambda: ("", 201), **options):
    """Register a view at ``/payments`` as the operation ``pay``."""
    world.app.add_url_rule("/payments", "pay", idempotent(**options)(view), methods=["POST"])


def is_replayed(response):
    return "Idempotent-Replayed" in response.headers
