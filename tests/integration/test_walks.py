"""A request goes down through the rooms of the package once, and up once.

A folder is a room. A crossing is a call from one room into another; what Flask or SQLAlchemy calls
begins anew.
"""

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
    "A first request": (179, 22, 52),
    "A replay": (82, 19, 14),
    "A rejected duplicate": (57, 14, 10),
    "A step": (215, 23, 51),
    "A take-over after a crash": (213, 22, 65),
}
"""By walk: calls of the package's own functions, files that they are in, and calls from room to room.
They are what a walk takes now, so that nobody adds to it unnoticed: lower them when it takes less."""


def room_of(filename):
    below = filename.removeprefix(ROOT).strip("/").removesuffix(".py").split("/")
    return "/".join(below[:-1] or below)


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
    """The package's functions that a request enters, in this thread, each with its caller's file."""
    calls = []

    def note(frame, event, _argument):
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            caller = frame.f_back.f_code.co_filename if frame.f_back else ""
            calls.append((frame.f_code.co_filename, frame.f_code.co_name, caller))

    with no_collection(), profiling(note):  # what an earlier test left would be told to web
        response = Context().run(request)  # and what it left in its context would be asked
    assert response.status_code == status
    return calls


@pytest.mark.parametrize("title", MOST)
def test_a_request_goes_down_once_and_up_once(shop, redis_server, gate, background, title):
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
    entered = Counter((room_of(file), name) for file, name, _ in calls)
    rooms = {room for room, _ in entered}
    if title == "A rejected duplicate":
        assert "stores/postgres" not in rooms
    if title == "A first request":
        assert len(rooms) <= 13
        assert (entered["web", "abandon"], entered["stores", "abandon"]) == (0, 1)
    crossings = sum(
        origin.startswith(ROOT) and room_of(origin) != room_of(file) and name != "__del__"
        for file, name, origin in calls
    )
    found = len(calls), len({file for file, *_ in calls}), crossings
    print(f"{title}: {found[0]} calls in {found[1]} files, {found[2]} from room to room")
    if servers.urls.driver == "psycopg2":  # psycopg's pipelines take more
        assert all(map(int.__le__, found, MOST[title])), (found, entered.most_common(5))
