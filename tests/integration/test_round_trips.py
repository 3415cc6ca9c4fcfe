"""The messages of each path, as a proxy in front of PostgreSQL and Redis themselves count them.

A pipeline of several statements is one message: nobody waits in the middle of it.
"""

import os
import time
from functools import partial

import pytest
from flask import request

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
def count(make_world, postgres, network, redis_server, store, add_view, gate):
    """A function that counts the messages of a request to an application: Postgres, Redis."""
    database = postgres.database(f"trips_{os.urandom(3).hex()}")
    patient = f"{network.through(redis_server.url)}?socket_timeout=10&socket_connect_timeout=10"
    redis = {"IDEMPOTENCY_REDIS_URL": patient} if store == "hybrid" else {}
    world = make_world(SQLALCHEMY_DATABASE_URI=network.through(database), **redis)

    def pay():
        payment = world.Payment(amount=request.get_json()["amount"])
        world.db.session.add(payment)
        world.db.session.commit()
        return {"id": payment.id}, 201

    def commit(times):
        for _ in range(times):
            world.db.session.add(world.Payment(amount=1))
            world.db.session.commit()
        return {}, 201

    @world.app.before_request
    def authenticate():
        if "early" in request.args:
            world.db.session.execute(world.db.text("select 1"))

    views = {
        "/payments": (pay, {}),
        "/once": (partial(commit, 1), {}),
        "/twice": (partial(commit, 2), {}),
        "/leased": (pay, {"atomic": False}),
        "/aged": (pay, {"refuse_old_keys": "require"}),
    }
    for path, (view, options) in views.items():
        world.app.add_url_rule(f"/bare{path}", f"bare{path}", view, methods=["POST"])
        world.app.add_url_rule(path, path, idempotent(name=path, **options)(view), methods=["POST"])
    add_view(world, "/slow", endpoint="slow", during=gate)

    def counted(path, key="key-1", **given):
        before = network.round_trips()
        answer = world.post(path, key, **given)
        return answer, *(after - was for after, was in zip(network.round_trips(), before, strict=True))

    for path in ("/bare/payments", *views):  # what is asked once, when a worker starts
        world.post(path, key=new_key())
    with world.app.app_context(), world.db.engine.connect(), world.db.engine.connect():
        pass  # opening one takes messages, too
    return counted


MESSAGES = {
    # The bare view; a first request; the same where the session has read before: psycopg2, psycopg.
    "/payments": (6, 4, 8, 7),
    "/once": (3, 3, 7, 6),
    "/twice": (6, 5, 9, 8),
    "/leased": (6, 9, None, None),
    "/aged": (6, 4, 8, 7),
}
"""For a view that is not atomic: the bare view's six, the claim, what its session has left, twice, and
the response."""


@pytest.mark.parametrize("path", MESSAGES)
def test_a_first_request_takes_no_more_messages_than_the_bare_view(count, path, driver, store):
    bare, first, *read_before = MESSAGES[path]
    redis = 2 if store == "hybrid" else 0
    assert count(f"/bare{path}")[1:] == (bare, 0)
    answer, *messages = count(path, new_key())
    assert (answer.status_code, messages) == (201, [first, redis])
    early = read_before[driver == "psycopg"]
    if early is not None:
        assert count(f"/bare{path}?early")[1:] == (bare + 1, 0)
        answer, *messages = count(f"{path}?early", new_key())
        assert (answer.status_code, messages) == (201, [early, redis])


ONE_READ = {"hybrid": (1, 1), "postgres": (1, 0)}
"""The claim of a view that is not atomic reads the record itself."""
REPLAY = {"hybrid": (1, 1), "postgres": (2, 0)}
"""One plain read. Where no Redis says that there is something to read, a claim comes before it."""


def test_a_replay_and_a_reused_key_take_one_plain_read_and_without_redis_a_claim(count, store):
    for path, messages in ("/payments", REPLAY[store]), ("/leased", ONE_READ[store]):
        count(path)
        answer, *taken = count(path)
        assert (answer.headers["Idempotent-Replayed"], tuple(taken)) == ("true", messages)
        answer, *taken = count(path, json={"amount": 6})
        assert (answer.status_code, tuple(taken)) == (422, messages)


def test_a_young_duplicate_is_refused_by_redis_alone(count, store, gate, background):
    first = background(count, "/slow")
    gate.wait_until_reached()
    answer, *messages = count("/slow")
    gate.open()
    assert first.result()[0].status_code == 201
    assert (answer.status_code, messages) == (409, [0, 1] if store == "hybrid" else [4, 0])


def test_an_old_key_takes_one_read(count, store, monkeypatch):
    key, later = new_key(), time.time() + 2 * 86400
    assert count("/aged", key)[0].status_code == 201
    monkeypatch.setattr(time, "time", lambda: later)
    refused, *messages = count("/aged", new_key())
    assert (refused.status_code, messages) == (409, [1, 0])
    replayed, *messages = count("/aged", key)
    assert (replayed.headers["Idempotent-Replayed"], tuple(messages)) == ("true", ONE_READ[store])
