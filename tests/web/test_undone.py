"""A view that commits, and then responds with what is not stored: that is undone, and said."""

import pytest
from flask import abort, after_this_request, g
from sqlalchemy.orm.exc import ObjectDeletedError
from werkzeug.exceptions import Forbidden

from flask_idempotency import current_operation, idempotent
from tests.log import undone

INSERT = "insert into payment (amount) values (5)"


def flushes(world):
    world.db.session.add(world.Payment(amount=5))
    world.db.session.flush()


def commits(world):
    flushes(world)
    world.db.session.commit()


def on_the_operations_connection(world):
    current_operation.connection.execute(world.db.text(INSERT))


def on_its_own_connection(world):
    """What the warning tells to do."""
    with world.db.engine.begin() as connection:
        connection.execute(world.db.text(INSERT))


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


def fail(error):
    raise error


SAID = [commits, on_the_operations_connection, fails_afterwards]
NOT_SAID = [flushes, rolls_back, reads, on_its_own_connection]
ENDS = {
    "returns": lambda: ({}, 403),
    "aborts": lambda: abort(403),
    "is handled": lambda: fail(PermissionError),
    "is handled above": lambda: fail(LookupError),
}


@pytest.mark.parametrize("writes", SAID + NOT_SAID)
@pytest.mark.parametrize("end", ENDS)
def test_it_is_said_once_where_something_was_committed(world, caplog, writes, end):
    def view():
        writes(world)
        return ENDS[end]()

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


@pytest.mark.parametrize(
    ("status", "options"), [(201, {}), (404, {}), (403, {"store": lambda _: True})]
)
def test_not_for_what_is_stored(world, caplog, status, options):
    """As the option does that the warning names."""
    view = idempotent(**options)(lambda: commits(world) or ({}, status))
    world.app.post("/payments", endpoint="pay")(view)
    assert world.post().status_code == status
    assert (undone(caplog), world.count()) == ([], 1)


def show():
    """What can be told of a payment later."""
    try:
        return {"id": g.payment.id, "amount": g.payment.amount}
    except ObjectDeletedError:
        return {"id": g.payment.id, "amount": "gone"}


@pytest.mark.parametrize("status", [403, 500])
def test_what_runs_later_can_show_the_id_of_what_is_undone(world, status):
    def pay():
        g.payment = world.Payment(amount=5)
        world.db.session.add(g.payment)
        world.db.session.commit()
        raise LookupError if status == 500 else Forbidden

    @world.app.after_request
    def sign(response):
        response.headers["X-Payment"] = str(show())
        return response

    world.app.config["PROPAGATE_EXCEPTIONS"] = False
    world.app.register_error_handler(500, lambda _error: (show(), 500))
    world.app.post("/payments")(idempotent(pay))
    reply = world.post()
    assert reply.headers["X-Payment"] == str({"id": 1, "amount": "gone"})
    if status == 500:  # its handler comes before the end of the operation
        assert reply.json == {"id": 1, "amount": 5}
    assert (reply.status_code, world.count()) == (status, 0)


def test_a_deletion_that_was_undone_is_not_made_by_a_commit_above(world):
    """The view had not flushed it."""
    world.sql("insert into payment (id, amount) values (7, 5)")
    world.app.after_request(lambda response: world.db.session.commit() or response)

    @world.app.post("/payments")
    @idempotent
    def delete():
        world.db.session.delete(world.db.session.get(world.Payment, 7))
        return {}, 403

    assert (world.post().status_code, world.count()) == (403, 1)
