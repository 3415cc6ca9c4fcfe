"""The messages of each path, as a proxy in front of PostgreSQL and Redis themselves count them.

A pipeline of several statements is one message: nobody waits in the middle of it.
"""

from __future__ import annotations

import os
import time
from functools import partial

import pytest
from flask import request
from sqlalchemy import event

from bench.network import Network
from flask_idempotency import idempotent
from flask_idempotency.client import new_key
from tests.drivers import EACH
from tests.stores import BOTH

pytestmark = [BOTH, EACH]


@pytest.fixture(scope="module")
def network(postgres, redis_server):
    with Network(postgres.url, redis_server.url) as network:
        yield network


@pytest.fixture
def counted(make_world, postgres, network, redis_server, store, add_view, gate):
    """An application, and a function that counts the messages of a request: Postgres, Redis."""
    database = postgres.database(f"trips_{os.urandom(3).hex()}")
    redis = {"IDEMPOTENCY_REDIS_URL": network.through(redis_server.url)} if store == "hybrid" else {}
    world = make_world(SQLALCHEMY_DATABASE_URI=network.through(database), **redis)

    def pay():
        payment = world.Payment(amount=request.get_json()["amount"])
        world.db.session.add(payment)
        world.db.session.commit()
        return {"id": payment.id}, 201

    def commit(times=1):
        for _ in range(times):
            world.db.session.add(world.Payment(amount=1))
            world.db.session.commit()
        return {}, 201

    @world.app.before_request
    def authenticate():
        if "early" in request.args:
            world.db.session.execute(world.db.text("select 1"))

    of_age = {"refuse_old_keys": "require"}
    views = {
        "/payments": (pay, {}),
        "/once": (commit, {}),
        "/twice": (partial(commit, 2), {}),
        "/leased": (pay, {"atomic": False}),
        "/aged": (pay, of_age),
        "/aged-leased": (pay, {"atomic": False, **of_age}),
    }
    for path, (view, options) in views.items():
        world.app.add_url_rule(f"/bare{path}", f"bare{path}", view, methods=["POST"])
        world.app.add_url_rule(path, path, idempotent(name=path, **options)(view), methods=["POST"])

    add_view(world, "/slow", endpoint="slow", during=gate)

    def count(path, key="key-1", **given):
        before = network.round_trips()
        answer = world.post(path, key, **given)
        return answer, *(after - was for after, was in zip(network.round_trips(), before, strict=True))

    for path in ("/bare/payments", *views):  # what is asked once, when a worker starts
        world.post(path, key=new_key())
    with world.app.app_context(), world.db.engine.connect(), world.db.engine.connect():
        pass  # opening one takes messages, too
    return world, count


MESSAGES = {
    # The bare view; a first request; the same where the session has read before: psycopg2, psycopg.
    "/payments": (6, 5, 9, 8),
    "/once": (3, 3, 7, 6),
    "/twice": (6, 5, 9, 8),
    "/leased": (6, 9, None, None),
}
"""For a view that is not atomic: the bare view's six, the claim, what its session has left, twice, and
the response."""


@pytest.mark.parametrize("path", MESSAGES)
def test_a_first_request_takes_no_more_messages_than_the_bare_view(counted, path, driver, store):
    _world, count = counted
    bare, first, *read_before = MESSAGES[path]
    redis = 2 if store == "hybrid" else 0
    assert count(f"/bare{path}")[1:] == (bare, 0)
    answer, *messages = count(path)
    assert (answer.status_code, messages) == (201, [first, redis])
    early = read_before[driver == "psycopg"]
    if early is not None:
        assert count(f"/bare{path}?early")[1:] == (bare + 1, 0)
        answer, *messages = count(f"{path}?early", "key-2")
        assert (answer.status_code, messages) == (201, [early, redis])


def test_a_listener_that_notes_something_about_the_connection_costs_no_message(counted, store):
    world, count = counted

    def note(connection, *_what):
        connection.info["statements"] = connection.info.get("statements", 0) + 1

    with world.app.app_context():
        event.listen(world.db.engine, "before_cursor_execute", note)
    assert count("/payments")[1:] == (5, 2 if store == "hybrid" else 0)


ONE_READ = {"hybrid": (1, 1), "postgres": (1, 0)}
"""The claim of a view that is not atomic reads the record itself."""
REPLAY = {"hybrid": (1, 1), "postgres": (2, 0)}
"""One plain read. Where no Redis says that there is something to read, a claim comes before it."""


def test_a_replay_and_a_reused_key_take_one_plain_read_and_without_redis_a_claim(counted, store):
    world, count = counted
    for path, messages in ("/payments", REPLAY[store]), ("/leased", ONE_READ[store]):
        world.post(path)
        answer, *taken = count(path)
        assert (answer.headers["Idempotent-Replayed"], tuple(taken)) == ("true", messages)
        answer, *taken = count(path, json={"amount": 6})
        assert (answer.status_code, tuple(taken)) == (422, messages)


def test_a_young_duplicate_is_refused_by_redis_alone(counted, store, gate, background):
    world, count = counted
    first = background(world.post, "/slow")
    gate.wait_until_reached()
    answer, *messages = count("/slow")
    gate.open()
    assert first.result().status_code == 201
    assert (answer.status_code, messages) == (409, [0, 1] if store == "hybrid" else [4, 0])


@pytest.mark.parametrize(("path", "aged"), [("/payments", "/aged"), ("/leased", "/aged-leased")])
def test_a_key_that_says_its_age_takes_no_message_more_and_an_old_one_one_read(
    counted, path, aged, store, monkeypatch
):
    _world, count = counted
    key, unknown, later = new_key(), new_key(), time.time() + 2 * 86400
    for _ in ("first", "replay"):
        plain, *usual = count(path, key)
        of_age, *messages = count(aged, key)
        assert (plain.status_code, of_age.status_code, messages) == (201, 201, usual)
    monkeypatch.setattr(time, "time", lambda: later)
    refused, *messages = count(aged, unknown)
    assert (refused.status_code, messages) == (409, [1, 0])
    replayed, *messages = count(aged, key)
    assert (replayed.headers["Idempotent-Replayed"], tuple(messages)) == ("true", ONE_READ[store])
