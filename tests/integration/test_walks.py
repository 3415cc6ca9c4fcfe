"""A request enters few functions of the package, in few files."""

import logging
from collections import Counter
from contextvars import Context
from pathlib import Path

import pytest
import redis

import flask_idempotency
import servers.urls
from bench.calls import no_collection, profiling
from flask_idempotency import current_operation, idempotent
from flask_idempotency.stores import lock
from flask_idempotency.testing import crash_at

ROOT = str(Path(flask_idempotency.__file__).parent)

pytestmark = pytest.mark.usefixtures("nobody_listens")

MOST = {
    "A first request": (179, 22),
    "A replay": (82, 19),
    "A rejected duplicate": (57, 14),
    "A step": (215, 23),
    "A take-over after a crash": (213, 22),
}
"""By walk: calls of the package's own functions, and files that they are in. They are what a walk takes
now, so that nobody adds to it unnoticed: lower them when it takes less."""


@pytest.fixture
def shop(make_world, add_view, gate, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "flask_idempotency")  # as usual: a line takes ten calls
    monkeypatch.setattr(lock, "PROBE_AFTER_SECONDS", 9)  # until then Redis alone rejects duplicates
    world = make_world(IDEMPOTENCY_PURGE=False)  # which follows one in fifty

    @world.app.post("/payments")
    @idempotent
    def post():
        payment = world.Payment(amount=5)
        world.db.session.add(payment)
        world.db.session.commit()
        return {"id": payment.id}, 201

    add_view(world, "/slow", endpoint="slow", during=gate)

    @world.app.post("/charges")
    @idempotent(atomic=False)
    def charge():
        return current_operation.step("charge", lambda: {"charged": 5}), 201

    for path in ("/payments", "/charges"):  # what is asked once, when a worker starts
        for _ in range(2):
            world.post(path, key="warm-up")
    return world


def walk(request, status=201):
    """The package's functions that a request enters, in this thread: file and name."""
    calls = []

    def note(frame, event, _argument):
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            calls.append((frame.f_code.co_filename.removeprefix(ROOT), frame.f_code.co_name))

    with no_collection(), profiling(note):  # what an earlier test left would be told to web
        response = Context().run(request)  # and what it left in its context would be asked
    assert response.status_code == status
    return calls


@pytest.mark.parametrize("title", MOST)
def test_a_request_enters_few_functions_in_few_files(shop, redis_server, gate, background, title):
    if title == "A rejected duplicate":
        first = background(shop.post, "/slow")
        gate.wait_until_reached()
        calls = walk(lambda: shop.post("/slow"), 409)
        gate.open()
        assert first.result().status_code == 201
    elif title == "A step":
        calls = walk(lambda: shop.post("/charges"))
    else:
        if title == "A replay":
            shop.post()
        if title == "A take-over after a crash":
            with crash_at("in-view", shop.app):
                shop.post()
            redis.Redis.from_url(redis_server.url).flushdb()
        calls = walk(shop.post)
    files = {file for file, _ in calls}
    print(f"{title}: {len(calls)} calls in {len(files)} files")
    if title == "A rejected duplicate":
        assert "postgres" not in "".join(files)
    if servers.urls.driver == "psycopg2":  # psycopg's pipelines take more
        assert len(calls) <= MOST[title][0], Counter(calls).most_common(5)
        assert len(files) <= MOST[title][1]
