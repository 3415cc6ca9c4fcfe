"""An application, and views that are not atomic."""

import pytest
from flask import jsonify

from flask_idempotency import current_operation, idempotent


@pytest.fixture
def config(store, tmp_path, redis_server):
    url = {"IDEMPOTENCY_REDIS_URL": redis_server.url, "IDEMPOTENCY_REDIS_PREFIX": tmp_path.name}
    file = {"SQLALCHEMY_DATABASE_URI": f"sqlite:///{tmp_path}/shop.db"}
    return {"redis": url, "sql": file}.get(store, {})


@pytest.fixture
def world(make_world, probing_at_once, config):
    # Redis is asked, but never believed about a lock: what is tested is the record.
    return make_world(PROPAGATE_EXCEPTIONS=False, **config)


@pytest.fixture
def add(world):
    """Adds a view that is not atomic; gives the attempts that it ran.

    It responds with what ``does`` returns: a body and a status, or what becomes JSON with 201.
    """

    def add(does=lambda: ({"done": True}, 201), **options):
        runs = []

        def charge():
            runs.append(current_operation.attempt)
            result = does()
            return result if isinstance(result, tuple) else (jsonify(result), 201)

        view = idempotent(atomic=False, **options)(charge)
        world.app.add_url_rule("/payments", "charge", view, methods=["POST"])
        return runs

    return add
