"""The messages of each path, as a proxy in front of PostgreSQL and Redis themselves count them.

A pipeline of several statements is one message: nobody waits in the middle of it.
"""

from __future__ import annotations

import os
import threading
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
def counted(make_world, postgres, network, redis_server, store):
    """An application, and a function that counts the messages of a call: (Postgres, Redis)."""
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

    views = {"/payments": pay, "/once": commit, "/twice": partial(commit, 2)}
    for path, view in views.items():
        world.app.add_url_rule(f"/bare{path}", f"bare{path}", view, methods=["POST"])
        world.app.add_url_rule(path, path, idempotent(name=path)(view), methods=["POST"])
    leased = idempotent(atomic=False)(pay)
    world.app.add_url_rule("/leased", "leased", leased, methods=["POST"])

    for path, of_age in ("/aged", {}), ("/aged-leased", {"atomic": False}):
        view = idempotent(refuse_old_keys="require", **of_age)(pay)
        world.app.add_url_rule(path, path, view, methods=["POST"])

    def count(call):
        before = network.round_trips()
        answer = call()
        after = network.round_trips()
        return answer, after[0] - before[0], after[1] - before[1]

    for path in ("/bare/payments", *views, "/leased"):  # what is asked once, when a worker starts
        world.post(path, key="warm-up")
    with world.app.app_context(), world.db.engine.connect(), world.db.engine.connect():
        pass  # opening one takes messages, too
    return world, count


BARE = {"/payments": 6, "/once": 3, "/twice": 6}
FIRST = {"/payments": 5, "/once": 3, "/twice": 5}
"""Messages of a first request that claims at once: its commit and a read, its commit, two commits."""
FIRST_IN_TRANSACTION = {
    "psycopg2": {"/payments": 9, "/once": 7, "/twice": 9},
    "psycopg": {"/payments": 8, "/once": 6, "/twice": 8},
}
"""The same where the session has read before, for which the bare view takes one more."""
REDIS = {"hybrid": 2, "postgres": 0}
"""What a first request asks of Redis, where there is one."""
EXPECTED_LEASED = {"hybrid": (9, 2), "postgres": (9, 0)}
"""The bare view's six; then the claim, what its session has left, twice, and the response."""
EXPECTED_REPLAY = {"hybrid": (1, 1), "postgres": (2, 0)}
"""One plain read. Where no Redis says that there is something to read, a claim comes before it."""
ONE_MESSAGE = {"hybrid": (1, 1), "postgres": (1, 0)}
"""The claim of a view that is not atomic reads the record itself."""
EXPECTED_DUPLICATE = {"hybrid": (0, 1), "postgres": (4, 0)}
EXPECTED_REUSED = EXPECTED_REPLAY


@pytest.mark.parametrize(("query", "more"), [("", 0), ("?early", 1)])
@pytest.mark.parametrize("path", BARE)
def test_a_bare_view_takes_these_messages_and_none_of_them_is_ours(counted, path, query, more):
    world, count = counted
    _, messages, asked_redis = count(lambda: world.post(f"/bare{path}{query}"))
    assert (messages, asked_redis) == (BARE[path] + more, 0)


@pytest.mark.parametrize("path", FIRST)
def test_a_first_request_takes_no_more_messages_than_the_bare_view(counted, path):
    world, count = counted
    answer, messages, asked_redis = count(lambda: world.post(path))
    assert answer.status_code == 201
    assert (messages, asked_redis) == (FIRST[path], REDIS[world.store])


@pytest.mark.parametrize("path", FIRST)
def test_a_first_request_whose_session_has_read_takes_two_or_three_more(counted, driver, path):
    world, count = counted
    answer, messages, asked_redis = count(lambda: world.post(f"{path}?early"))
    assert answer.status_code == 201
    assert (messages, asked_redis) == (FIRST_IN_TRANSACTION[driver][path], REDIS[world.store])


def test_a_view_that_is_not_atomic_and_leaves_its_session_open_takes_three_more(counted):
    world, count = counted
    answer, messages, asked_redis = count(lambda: world.post("/leased"))
    assert answer.status_code == 201
    assert (messages, asked_redis) == EXPECTED_LEASED[world.store]


def test_a_listener_that_notes_something_about_the_connection_costs_no_message(counted, store):
    world, count = counted

    def note(connection, *_what):
        connection.info["statements"] = connection.info.get("statements", 0) + 1

    with world.app.app_context():
        event.listen(world.db.engine, "before_cursor_execute", note)
    answer, *messages = count(lambda: world.post(key="noted"))
    assert (answer.status_code, messages) == (201, [FIRST["/payments"], REDIS[store]])


def test_a_replay_takes_one_plain_read_and_without_redis_a_claim(counted):
    world, count = counted
    world.post()
    answer, messages, asked_redis = count(world.post)
    assert answer.headers["Idempotent-Replayed"] == "true"
    assert (messages, asked_redis) == EXPECTED_REPLAY[world.store]


def test_a_reused_key_takes_one_plain_read_and_without_redis_a_claim(counted):
    world, count = counted
    world.post()
    answer, messages, asked_redis = count(lambda: world.post(json={"amount": 6}))
    assert answer.status_code == 422
    assert (messages, asked_redis) == EXPECTED_REUSED[world.store]


def test_a_replay_of_a_view_that_is_not_atomic_takes_one_message(counted):
    world, count = counted
    world.post("/leased")
    answer, messages, asked_redis = count(lambda: world.post("/leased"))
    assert answer.headers["Idempotent-Replayed"] == "true"
    assert (messages, asked_redis) == ONE_MESSAGE[world.store]


def test_a_young_duplicate_is_refused_by_redis_alone(counted):
    world, count = counted
    inside, resume = threading.Event(), threading.Event()

    @idempotent
    def slow():
        inside.set()
        assert resume.wait(20)
        return {}

    world.app.view_functions["/once"] = slow
    first = threading.Thread(target=lambda: world.post("/once"))
    first.start()
    assert inside.wait(20)
    answer, messages, asked_redis = count(lambda: world.post("/once"))
    resume.set()
    first.join(20)
    assert answer.status_code == 409
    assert (messages, asked_redis) == EXPECTED_DUPLICATE[world.store]


@pytest.mark.parametrize(("path", "aged"), [("/payments", "/aged"), ("/leased", "/aged-leased")])
def test_a_key_that_says_its_age_takes_no_message_more(counted, path, aged):
    world, count = counted
    key = new_key()
    for _ in ("first", "replay"):
        plain, *usual = count(lambda: world.post(path, key))
        of_age, *messages = count(lambda: world.post(aged, key))
        assert (plain.status_code, of_age.status_code) == (201, 201)
        assert messages == usual


@pytest.mark.parametrize("aged", ["/aged", "/aged-leased"])
def test_an_old_key_takes_one_plain_read_to_be_refused_or_replayed(counted, monkeypatch, aged):
    world, count = counted
    key, unknown, later = new_key(), new_key(), time.time() + 2 * 86400
    assert world.post(aged, key).status_code == 201
    monkeypatch.setattr(time, "time", lambda: later)
    refused, *messages = count(lambda: world.post(aged, unknown))
    assert (refused.status_code, messages) == (409, [1, 0])
    replayed, *messages = count(lambda: world.post(aged, key))
    assert replayed.headers["Idempotent-Replayed"] == "true"
    assert tuple(messages) == ONE_MESSAGE[world.store]
