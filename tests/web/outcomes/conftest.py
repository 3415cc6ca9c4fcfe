"""An application whose outcomes can be looked up, and a client that does so."""

import pytest

from flask_idempotency.outcomes import outcomes_blueprint


@pytest.fixture
def store():
    return "postgres"


@pytest.fixture
def config():
    return {}


@pytest.fixture
def world(make_world, config):
    world = make_world(PROPAGATE_EXCEPTIONS=False, **config)
    world.app.register_blueprint(outcomes_blueprint())
    return world


@pytest.fixture
def look(world):
    def look(key="key-1", user="alice", operation="pay", headers=()):
        query = {} if operation is None else {"operation": operation}
        path = "/idempotency" if key is None else f"/idempotency/{key}"
        names = {"X-User": user, **dict(headers)}
        return world.client.get(path, query_string=query, headers=names)

    return look
