"""An application, and views that are not atomic."""

import pytest
from flask import jsonify

from flask_idempotency import current_operation, idempotent


@pytest.fixture
def config():
    return {}


@pytest.fixture
def world(make_world, probing_at_once, config):
    # Redis is asked, but never believed about a lock: what is tested is the record.
    return make_world(PROPAGATE_EXCEPTIONS=False, **config)


@pytest.fixture
def add(world):
    """Adds a view that is not atomic and answers what ``does`` answers; gives the attempts it ran."""

    def add(does=lambda: ({"done": True}, 201), **options):
        runs = []

        def charge():
            runs.append(current_operation.attempt)
            return does()

        view = idempotent(atomic=False, **options)(charge)
        world.app.add_url_rule("/payments", "charge", view, methods=["POST"])
        return runs

    return add


@pytest.fixture
def add_json(add):
    """The same; what ``does`` returns is answered as JSON, with 201."""
    return lambda does, **options: add(lambda: (jsonify(does()), 201), **options)
