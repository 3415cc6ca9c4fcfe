"""Flask-Session: sessions on a server, also in the tables and the ``db.session`` of the shop itself."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from flask import session
from flask_session import Session

from flask_idempotency import idempotent


@pytest.fixture(params=["redis", "sqlalchemy"])
def shop(request: Any, make_world: Any, redis_server: Any) -> Any:
    world = make_world(
        init={"scope": lambda: session.get("user")},
        SESSION_TYPE=request.param,
        SESSION_REDIS=redis.Redis.from_url(redis_server.url),
    )
    world.app.config["SESSION_SQLALCHEMY"] = world.db
    Session(world.app)

    @world.app.get("/sign-in/<user>")
    def sign_in(user: str) -> Any:
        session["user"] = user
        return {}

    @world.app.post("/payments")
    @idempotent
    def pay() -> Any:
        world.db.session.add(world.Payment(amount=5))
        session["paid"] = session.get("paid", 0) + 1
        world.db.session.commit()
        return {"paid": session["paid"]}, 201

    @world.app.get("/paid")
    def paid() -> Any:
        return {"paid": session.get("paid", 0)}

    yield world
    world.app.config["SESSION_REDIS"].close()


def post(client: Any, key: str = "key-1") -> Any:
    return client.post("/payments", json={"amount": 5}, headers={"Idempotency-Key": key})


def test_a_retry_pays_once_and_leaves_the_session_as_the_first_left_it(shop):
    client = shop.client
    client.get("/sign-in/alice")
    first, replay = post(client), post(client)
    assert (first.status_code, first.json) == (201, {"paid": 1})
    assert (replay.json, replay.headers["Idempotent-Replayed"]) == (first.json, "true")
    assert client.get("/paid").json == {"paid": 1}
    assert post(client, "key-2").json == {"paid": 2}
    assert shop.count() == 2
    shop.assert_clean()


def test_a_session_of_another_or_of_nobody_gets_no_replay(shop):
    alice, bob, nobody = shop.client, shop.client, shop.client
    alice.get("/sign-in/alice")
    bob.get("/sign-in/bob")
    assert [post(each).status_code for each in (alice, bob, nobody)] == [201, 201, 401]
    assert shop.count() == len(shop.records()) == 2


def test_a_view_that_fails_rolls_its_writes_back(shop):
    @shop.app.post("/orders")
    @idempotent
    def order() -> Any:
        shop.db.session.add(shop.Payment(amount=7))
        shop.db.session.commit()
        session["tried"] = True
        return {}, 503

    client = shop.client
    client.get("/sign-in/alice")
    headers = {"Idempotency-Key": "key-1"}
    for _ in range(2):
        assert client.post("/orders", json={}, headers=headers).status_code == 503
    assert shop.count() == 0
    shop.assert_clean()
