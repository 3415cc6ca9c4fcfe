"""An application with the operator's page, and an operator who may use it."""

import re

import pytest
from flask import request

from flask_idempotency import current_operation, idempotent

ROOT = "/operations"

INVISIBLE = "\u115f", "\u1160", "\u2800", "\u3164", "\uffa0", "\u034f", "\ufe0f"
"""Characters that Python calls printable, and of which nothing can be seen."""


@pytest.fixture
def store():
    return "postgres"


@pytest.fixture
def config():
    return {}


@pytest.fixture
def authorize():
    """Lets in whoever says a name."""
    return lambda: request.headers.get("X-Operator")


@pytest.fixture
def world(make_world, config, authorize):
    world = make_world(PROPAGATE_EXCEPTIONS=False, **config)
    world.app.register_blueprint(world.idempotency.console_blueprint(authorize=authorize))
    view = idempotent(atomic=world.store != "redis")(lambda: ({"secret": "canary"}, 201))
    world.app.add_url_rule("/payments", "pay", view, methods=["POST"])
    with world.app.app_context():
        world.db.create_all()
    return world


class Browser:
    """A client that says where a form comes from, and takes what it hides from the page before."""

    def __init__(self, app, operator):
        self._client, self._headers = app.test_client(), {"X-Operator": operator}
        self.seen = ""

    def get(self, path="/", **kwargs):
        return self._seen(self._client.get(ROOT + path, headers=self._headers, **kwargs))

    def post(self, path, *, site="same-origin", **fields):
        fields = {"seen": self.seen, **fields}
        data = {name: value for name, value in fields.items() if value is not None}
        headers = {**self._headers, **({"Sec-Fetch-Site": site} if site else {})}
        return self._seen(self._client.post(ROOT + path, data=data, headers=headers))

    def _seen(self, response):
        if found := re.search('name="seen" value="([^"]+)"', response.text):
            self.seen = found[1]
        return response


@pytest.fixture
def browser(world):
    return Browser(world.app, "ada")


@pytest.fixture
def another(world):
    """Another browser, of whoever one names."""
    return lambda operator: Browser(world.app, operator)


@pytest.fixture
def interrupted(world):
    """Leaves an operation that was begun, did one step and never ended; gives its digits."""

    def work():
        current_operation.step("reserve", lambda: {"ok": True})
        raise SystemExit(1)

    def leave(key="key-1", name="charge"):
        with world.app.app_context(), pytest.raises(SystemExit):
            world.idempotency.run(key, work, scope="alice", name=name, atomic=False)
        found = world.sql("select encode(key, 'hex') from idempotency_record order by created_at desc")
        return found[0][0][:16]

    return leave
