"""Flask-SocketIO on the same application: one event for a retry, handlers by ``run``."""

from __future__ import annotations

from typing import Any

import pytest
from flask_socketio import SocketIO

from flask_idempotency import after_commit, idempotent


@pytest.fixture
def shop(make_world: Any) -> Any:
    world = make_world(SECRET_KEY="tests only")
    world.socketio = SocketIO(world.app, async_mode="threading")

    def pay() -> Any:
        payment = world.Payment(amount=5)
        world.db.session.add(payment)
        world.db.session.commit()
        after_commit(lambda: world.socketio.emit("paid", 5))
        return {"id": payment.id}

    @world.app.post("/payments")
    @idempotent
    def view() -> Any:
        return pay(), 201

    @world.socketio.on("pay")
    def handle(message: Any) -> Any:
        return world.idempotency.run(message["key"], pay, scope="alice", payload=message, name="pay")

    return world


def heard(client: Any) -> list[Any]:
    return [each["args"] for each in client.get_received() if each["name"] == "paid"]


def test_an_event_of_a_view_is_sent_once_after_the_commit(shop, assert_replayed):
    watcher = shop.socketio.test_client(shop.app)
    first = shop.post()
    assert first.status_code == 201
    assert heard(watcher) == [[5]]
    assert_replayed(first, shop.post())
    assert heard(watcher) == []
    assert shop.count() == 1
    watcher.disconnect()


def test_an_event_that_comes_again_is_handled_once(shop):
    client = shop.socketio.test_client(shop.app)
    answers = [client.emit("pay", {"key": "key-1"}, callback=True) for _ in range(2)]
    assert answers[0] == answers[1] != None  # noqa: E711
    assert heard(client) == [[5]]
    assert client.emit("pay", {"key": "key-2"}, callback=True) != answers[0]
    assert shop.count() == 2
    client.disconnect()
    shop.assert_clean()
