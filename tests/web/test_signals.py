"""What receivers of the signals hear, and what the log says: never a key, never a body."""

import contextlib
import logging

import pytest

import flask_idempotency
from flask_idempotency import idempotent


@pytest.mark.usefixtures("failing_log")
def test_logging_that_fails_changes_no_response(make_world, add_view, assert_replayed, assert_problem):
    """Of an application whose Redis is away, where each kind of line is written."""
    world = make_world(IDEMPOTENCY_REDIS_URL="redis://127.0.0.1:1/0")
    runs = add_view(world, during=lambda: flask_idempotency.after_commit(refuse))
    first = world.post()
    assert (first.status_code, world.count()) == (201, 1)
    assert_replayed(first, world.post())
    assert_problem(world.post(json={"amount": 6}), 422, "key-reused")
    assert_problem(world.post(key=None), 400, "key-required")
    assert runs == [1]
    with flask_idempotency.operation_executed.connected_to(refuse, world.app):
        assert world.post(key="key-2").status_code == 201
    assert world.count() == 2


def refuse(*_, **__):
    raise LookupError


def test_a_receiver_that_fails_changes_no_response_and_keeps_no_other_from_hearing(
    world, add_view, assert_replayed, caplog
):
    heard = []

    def receiver(number):
        def receive(app, event):
            heard.append(number)
            raise LookupError

        return receive

    add_view(world)
    with contextlib.ExitStack() as stack:
        for function in (receiver(1), receiver(2), receiver(3)):
            stack.enter_context(flask_idempotency.operation_executed.connected_to(function, world.app))
        first = world.post()
    assert first.status_code == 201
    assert_replayed(first, world.post())
    assert sorted(heard) == [1, 2, 3]
    said = "a receiver of operation-executed failed"
    failures = [each for each in caplog.records if said in each.getMessage()]
    assert [each.exc_info[0] for each in failures] == [LookupError] * 3


def test_a_muted_signal_is_not_heard(world, add_view, heard):
    add_view(world)
    with flask_idempotency.operation_executed.muted():
        world.post()
    assert heard == []


def test_an_execution_is_signalled_after_its_commit(world, add_view):
    counts = []

    def look(app, event):
        counts.append(world.count())

    add_view(world)
    with flask_idempotency.operation_executed.connected_to(look, world.app):
        world.post()
    assert counts == [1]


def test_neither_key_nor_body_is_logged(make_world, store, heard, caplog):
    """All that goes wrong at once, at the finest level of logging that is not SQLAlchemy's own."""
    world = make_world(IDEMPOTENCY_ON_STORE_ERROR="allow")
    fail = []

    @world.app.post("/payments")
    @idempotent(name="payments")
    def pay():
        world.db.session.add(world.Payment(amount=5))
        world.db.session.flush()  # never committed, so it is undone with a warning
        if fail:
            raise RuntimeError("a view's own error")
        return "canary-answer", 409, {"X-Secret": "canary-header"}

    body = {"card": "canary-body"}
    with caplog.at_level(logging.DEBUG):
        world.post(key="canary-1", json=body, user="canary-user")
        world.post(key="canary-1", json=body, user="canary-user")
        world.post(key="canary-1", json={"card": "canary-other"}, user="canary-user")
        world.post(key="canary,2", json=body)
        fail.append(True)
        world.post(key="canary-3", json=body)
        world.sql("update idempotency_record set fingerprint_version = 99")
        world.post(key="canary-1", json=body, user="canary-user")
        world.sql("drop table idempotency_record")
        world.post(key="canary-4", json=body)
    messages = [record.message for record in caplog.records]
    assert any("left changes it did not commit" in message for message in messages)
    assert any("fingerprint was made in another way" in message for message in messages)
    assert "idempotency_record is missing" in caplog.text
    assert "canary" not in caplog.text
    assert "canary" not in repr(heard)
