"""An application that is only observed, and what is told of it."""

import pytest


@pytest.fixture
def world(make_world, store, tmp_path):
    file = {"SQLALCHEMY_DATABASE_URI": f"sqlite:///{tmp_path}/shop.db"} if store == "sql" else {}
    return make_world(IDEMPOTENCY_ENFORCE=False, IDEMPOTENCY_MAX_REQUEST_BYTES=1000, **file)


@pytest.fixture
def observed(heard):
    """The events of observed requests, so far."""
    return lambda: [event for name, event in heard if name == "operation_observed"]


@pytest.fixture
def would(observed):
    """What would have become of them."""
    return lambda: [event.would for event in observed()]
