"""An application with the operator's page, and an operator who may use it."""

import re

import pytest
from flask import request

from flask_idempotency import current_operation, idempotent


@pytest.fixture
def store(request):
    return getattr(request, "param", "postgres")


@pytest.fixture
def config():
    return {}


@pytest.fixture
def world(make_world, config):
    world = make_world(PROPAGATE_EXCEPTIONS=False, **config)
    who = lambda: request.headers.get("X-Operator")  # noqa: E731
    world.app.register_blueprint(world.idempotency.console_blueprint(authorize=who))
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
        return self._seen(self._client.get(f"/operations{path}", headers=self._headers, **kwargs))

    def text(self, path="/"):
        """What a person reads."""
        return text_of(self.get(path))

    def post(self, path, *, site="same-origin", **fields):
        fields = {"seen": self.seen, **fields}
        data = {name: value for name, value in fields.items() if value is not None}
        headers = {**self._headers, **({"Sec-Fetch-Site": site} if site else {})}
        return self._seen(self._client.post(f"/operations{path}", data=data, headers=headers))

    def act(self, digits, action, **fields):
        """Fill in and send the form of an action."""
        self.get(f"/records/{digits}/{action}")
        fields = {"why": "looked it up", "status": "200", **fields}
        return self.post(f"/records/{digits}/{action}", **fields)

    def _seen(self, response):
        if found := re.search('name="seen" value="([^"]+)"', response.text):
            self.seen = found[1]
        return response


def text_of(response):
    return " ".join(re.sub(r"<[^>]+>", " ", response.text).split())


@pytest.fixture
def browser(world):
    return Browser(world.app, "ada")


@pytest.fixture
def newest(world):
    """The digits of the newest record."""
    query = "select encode(key, 'hex') from idempotency_record order by created_at desc"
    return lambda: world.sql(query)[0][0][:16]


@pytest.fixture
def interrupt(world, newest):
    """Leaves an operation that was begun, did one step and never ended; gives its digits."""

    def work():
        current_operation.step("reserve", lambda: {"ok": True})
        raise SystemExit(1)

    def leave(key="key-1", name="charge"):
        with world.app.app_context(), pytest.raises(SystemExit):
            world.idempotency.run(key, work, scope="alice", name=name, atomic=False)
        return newest()

    return leave


@pytest.fixture
def interrupted(interrupt):
    return interrupt()


@pytest.fixture
def completed(world, newest):
    assert world.post().status_code == 201
    return newest()


@pytest.fixture
def audit(world):
    """Who did what, and why."""

    def audit():
        found = world.sql("select audit from idempotency_record where audit is not null")
        return [(each["by"], each["did"], each["why"]) for (entries,) in found for each in entries]

    return audit
