"""A request goes down through the rooms of the package once, and up once.

A folder is a room. A crossing is a call from one room into another; what Flask or SQLAlchemy calls
begins anew.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import redis

import flask_idempotency
import servers.urls
from bench.calls import no_collection
from flask_idempotency import current_operation, idempotent
from flask_idempotency.stores import lock
from flask_idempotency.testing import crash_at

ROOT = str(Path(flask_idempotency.__file__).parent)

pytestmark = [
    pytest.mark.parametrize("store", ["hybrid"]),  # Redis is one room more
    pytest.mark.usefixtures("nobody_listens"),
]


MOST = {
    "A first request": (180, 22, 52),
    "A replay": (82, 19, 14),
    "A rejected duplicate": (57, 14, 10),
    "A step": (215, 23, 51),
    "A take-over after a crash": (214, 22, 65),
}
"""By walk: calls of the package's own functions, files that they are in, and calls from room to room.
They are what a walk takes now, so that nobody adds to it unnoticed: lower them when it takes less."""


class Walk:
    """The package's functions that one call enters, in this thread."""

    def __init__(self) -> None:
        self.rooms: list[str] = []
        self.crossings: list[tuple[str, str]] = []
        self.functions: Counter[str] = Counter()
        self.files: set[str] = set()
        self._files: dict[str, str | None] = {}

    def __enter__(self):
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exc):
        sys.setprofile(None)

    def room_of(self, filename):
        if filename not in self._files:
            below = filename.removeprefix(ROOT).strip("/").removesuffix(".py").split("/")
            room = "/".join(below[:-1] or below)
            self._files[filename] = room if filename.startswith(ROOT) else None
        return self._files[filename]

    def _note(self, frame, event, _argument):
        room = self.room_of(frame.f_code.co_filename)
        if event != "call" or room is None:
            return
        self.functions[f"{room}.{frame.f_code.co_name}"] += 1
        self.files.add(frame.f_code.co_filename)
        if room not in self.rooms:
            self.rooms.append(room)
        caller = frame.f_back
        origin = caller and self.room_of(caller.f_code.co_filename)
        if origin not in {None, room} and frame.f_code.co_name != "__del__":
            self.crossings.append((origin, room))


@pytest.fixture
def shop(make_world, redis_server, monkeypatch):
    monkeypatch.setattr(lock, "PROBE_AFTER_SECONDS", 9)  # until then Redis alone rejects duplicates
    world = make_world()

    def pay():
        payment = world.Payment(amount=5)
        world.db.session.add(payment)
        world.db.session.commit()
        return {"id": payment.id}, 201

    def charge():
        return current_operation.step("charge", lambda: {"charged": 5}), 201

    world.app.add_url_rule("/payments", "pay", idempotent(pay), methods=["POST"])
    world.app.add_url_rule("/charges", "charge", idempotent(atomic=False)(charge), methods=["POST"])
    world.inside, world.resume = threading.Event(), threading.Event()

    @world.app.post("/slow")
    @idempotent
    def slow():
        world.inside.set()
        assert world.resume.wait(20)
        return {}

    world.forget_locks = lambda: redis.Redis.from_url(redis_server.url).flushdb()
    for path in ("/payments", "/charges"):  # what is asked once, when a worker starts
        for _ in range(2):
            world.post(path, key="warm-up")
    return world


def take(title, request, status):
    with no_collection(), Walk() as walk:  # what an earlier test left would be told to web
        response = request()
    assert response.status_code == status
    taken = walk.functions.total(), len(walk.files), len(walk.crossings)
    print(f"{title}: {taken[0]} calls in {taken[1]} files, {taken[2]} from room to room")
    if servers.urls.driver == "psycopg2":  # psycopg's pipelines take more
        assert all(map(int.__le__, taken, MOST[title])), (taken, walk.functions.most_common(5))
    return walk


def test_a_first_request_goes_down_once_and_up_once(shop):
    walk = take("A first request", shop.post, 201)
    assert len(walk.rooms) <= 13
    assert walk.functions["web.abandon"] == 0
    assert walk.functions["stores.abandon"] == 1


def test_a_replay_asks_the_record_and_no_view(shop):
    shop.post()
    take("A replay", shop.post, 201)


def test_a_duplicate_is_rejected_by_redis(shop):
    first = threading.Thread(target=lambda: shop.post("/slow"))
    first.start()
    assert shop.inside.wait(20)
    try:
        walk = take("A rejected duplicate", lambda: shop.post("/slow"), 409)
    finally:
        shop.resume.set()
        first.join(20)
    assert "stores/postgres" not in walk.rooms


def test_a_step_goes_to_the_record_before_and_after(shop):
    take("A step", lambda: shop.post("/charges"), 201)


def test_another_application_adds_no_call(shop, make_world):
    calls = []
    for key in ("one", "other"):
        with no_collection(), Walk() as walk:
            assert shop.post(key=key).status_code == 201
        calls.append(walk.functions.total())
        make_world()
    assert calls[0] == calls[1]


def test_a_take_over_locks_the_row_that_nobody_holds(shop):
    with crash_at("in-view", shop.app):
        shop.post()
    shop.forget_locks()
    take("A take-over after a crash", shop.post, 201)
