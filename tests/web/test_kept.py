"""Which responses are kept, and that the view's writes are there if and only if its response is."""

import pytest
from flask import abort, after_this_request, g
from sqlalchemy.orm.exc import ObjectDeletedError

from flask_idempotency import Retryable, current_operation, idempotent
from tests import sessions
from tests.log import undone

KEPT = [200, 204, 303, 400, 402, 404, 407, 409, 424, 426, 428, 430, 499]
NOT_KEPT = [401, 403, 408, 425, 429, 500, 503, 599]
UNKNOWN = [0, 99, 600, 99999]
"""No client understands these: they are not kept, and are a 500."""


@pytest.fixture
def pay(world):
    def pay():
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()

    return pay


def returned(status):
    return "", status


def raised(status):
    raise {409: LookupError, 500: ValueError, 503: Retryable}[status]


accepts = {"store": lambda response: response.status_code in {201, 503, *UNKNOWN}}
WAYS = {
    "returned": (returned, {}, KEPT, NOT_KEPT),
    "aborted": (abort, {}, [400, 404, 409, 422], [401, 403, 429, 500, 503]),
    "an error handler's": (raised, {}, [409], [500]),
    "an error's, whatever the route says": (raised, {"store": lambda _: True}, [409], [500, 503]),
    "as the route says": (returned, accepts, [201, 503], [200, 404]),
    "that no client understands": (returned, accepts, [], UNKNOWN),
}


@pytest.mark.parametrize(("does", "options", "kept", "not_kept"), WAYS.values(), ids=WAYS)
def test_writes_are_there_if_and_only_if_the_response_is(
    app, world, pay, caplog, does, options, kept, not_kept
):
    app.register_error_handler(LookupError, lambda _error: ("sold out", 409))
    app.register_error_handler(ValueError, lambda _error: ("sorry", 500))
    attempts = []

    @app.post("/answer/<int:status>")
    @idempotent(**options)
    def view(status):
        attempts.append(current_operation.attempt)
        pay()
        return does(status)

    for number, status in enumerate([*kept, *not_kept]):
        is_kept = number < len(kept)
        before = world.count()
        first, retry = (world.post(f"/answer/{status}", key=f"key-{status}") for _ in range(2))
        assert first.status_code == retry.status_code == (500 if status in UNKNOWN else status)
        assert ("Idempotent-Replayed" in retry.headers) == is_kept, status
        assert world.count() - before == is_kept, status
        assert first.data == retry.data
        assert not is_kept or undone(caplog) == []
        if status in UNKNOWN:
            assert f"the view returned the status {status}; allowed: 100 to 599" in caplog.text
    assert attempts == [1] * len(kept) + [1, 2] * len(not_kept)


@pytest.mark.parametrize("status", [201, 503])
@pytest.mark.parametrize("kind", ["lite", "plain"])
def test_so_it_is_with_sessions_of_other_kinds(make_world, monkeypatch, kind, status):
    monkeypatch.setattr(sessions, "usual", kind)
    world = make_world()

    @world.app.post("/payments")
    @idempotent
    def view():
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        return "", status

    assert [world.post().status_code for _ in range(2)] == [status] * 2
    assert world.count() == (status == 201)


def fails(error):
    raise error


# A view that commits, and then responds with what is not stored: that is undone, and said.


def flushes(world):
    world.db.session.add(world.Payment(amount=5))
    world.db.session.flush()


def commits(world):
    flushes(world)
    world.db.session.commit()


def on_the_operations_connection(world):
    current_operation.connection.execute(world.db.text("insert into payment (amount) values (5)"))


def on_its_own_connection(world):
    """What the warning tells to do."""
    world.sql("insert into payment (amount) values (5)")


def reads(world):
    world.db.session.execute(world.db.text("select 1"))
    world.db.session.commit()


def rolls_back(world):
    flushes(world)
    with world.db.session.begin_nested():
        flushes(world)
    world.db.session.rollback()
    world.db.session.commit()


def fails_afterwards(world):
    """Flask hands that to the handler, too: the client sees its 403, and nothing is stored."""
    after_this_request(lambda _response: 1 / 0)
    commits(world)


SAID = [commits, on_the_operations_connection, fails_afterwards]
NOT_SAID = [flushes, rolls_back, reads, on_its_own_connection]
REJECTIONS = {
    "returns": lambda: ({}, 403),
    "aborts": lambda: abort(403),
    "is handled": lambda: fails(PermissionError),
    "is handled above": lambda: fails(LookupError),
}


CASES = [(each, "returns") for each in SAID + NOT_SAID] + [(commits, end) for end in REJECTIONS][1:]


@pytest.mark.parametrize(("writes", "end"), CASES)
def test_it_is_said_once_where_something_was_committed(world, caplog, writes, end):
    def view():
        writes(world)
        return REJECTIONS[end]()

    def above(**_values):
        try:
            return protected()
        except LookupError:
            abort(403)

    protected = idempotent(name="sign_in")(view)
    world.app.register_error_handler(PermissionError, lambda _error: ({}, 403))
    world.app.register_error_handler(500, lambda _error: ({}, 403))
    world.app.post("/payments", endpoint="sign_in")(above)
    assert [world.post(key=key).status_code for key in "ab"] == [403] * 2
    assert world.count() == (2 if writes is on_its_own_connection else 0)
    said = [text for text in undone(caplog) if "of sign_in committed changes and" in text]
    assert len(said) == (writes in SAID)
    assert all("store=lambda response" in text for text in said)


@pytest.mark.parametrize("status", [403, 500])
def test_what_runs_later_can_show_the_id_of_what_is_undone(world, status):
    def pay():
        g.payment = world.Payment(amount=5)
        world.db.session.add(g.payment)
        world.db.session.commit()
        abort(status)

    @world.app.after_request
    def sign(response):
        response.headers["X-Payment"] = g.payment.id
        with pytest.raises(ObjectDeletedError):
            assert not g.payment.amount
        return response

    # The handler comes before the end of the operation, unless the view itself responds so.
    world.app.register_error_handler(500, lambda _error: (str(g.payment.amount), 500))
    world.app.post("/payments")(idempotent(pay))
    reply = world.post()
    assert reply.headers["X-Payment"] == "1"
    assert reply.text == "5" or status != 500
    assert (reply.status_code, world.count()) == (status, 0)
