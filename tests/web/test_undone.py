"""A view that commits, and then responds with what is not stored: that is undone, and said."""

import pytest
from flask import abort, g
from sqlalchemy.orm.exc import ObjectDeletedError
from werkzeug.exceptions import Forbidden

from flask_idempotency import current_operation, idempotent
from flask_idempotency.session import stray


@pytest.fixture(autouse=True)
def nobody_was_warned():
    stray.warn_once.cache_clear()


@pytest.fixture
def shop(make_world):
    return make_world()


def add(shop):
    shop.db.session.add(shop.Payment(amount=5))


def insert(shop):
    shop.db.session.execute(shop.db.text("insert into payment (amount) values (5)"))


def add_and_read(shop):
    """What was written stays written when the next unit only reads."""
    add(shop)
    shop.db.session.commit()
    shop.db.session.execute(shop.db.text("select 1"))


def nested(shop):
    add(shop)
    with shop.db.session.begin_nested():
        add(shop)
    shop.db.session.rollback()
    shop.db.session.commit()


def by_a_connection_of_its_own(shop):
    """What the warning tells to do."""
    with shop.db.engine.begin() as connection:
        connection.execute(shop.db.text("insert into payment (amount) values (5)"))


def warnings(caplog):
    texts = (each.getMessage() for each in caplog.records)
    return [text for text in texts if "which is not stored" in text or "does not see" in text]


@pytest.mark.parametrize(
    ("write", "end"), [(add, "return"), (insert, "abort"), (add_and_read, "return")]
)
def test_it_is_said_once(shop, caplog, write, end):
    status = 403

    @shop.app.post("/payments", endpoint="sign_in")
    @idempotent
    def sign_in():
        write(shop)
        shop.db.session.commit()
        if end == "abort":
            abort(status)
        return {}, status

    assert [shop.post(key=key).status_code for key in "ab"] == [status] * 2
    (text,) = warnings(caplog)
    assert f"the view of sign_in committed changes and responded with {status}" in text
    assert "store=lambda response" in text
    assert "the changes are undone" in text
    assert shop.count() == 0


def test_it_is_said_of_what_the_operations_connection_wrote(make_world, caplog):
    shop = make_world()

    @shop.app.post("/payments")
    @idempotent
    def sign_in():
        current_operation.connection.execute(shop.db.text("insert into payment (amount) values (5)"))
        return {}, 403

    assert shop.post().status_code == 403
    assert len(warnings(caplog)) == 1
    assert shop.count() == 0


def test_the_option_that_it_names_keeps_the_changes(shop, caplog):
    @shop.app.post("/payments")
    @idempotent(store=lambda response: response.status_code < 500)
    def sign_in():
        add(shop)
        shop.db.session.commit()
        return {}, 403

    assert shop.post().status_code == 403
    assert (warnings(caplog), shop.count()) == ([], 1)


def test_an_error_handler_that_rejects(shop, caplog):
    @shop.app.errorhandler(PermissionError)
    def refuse(_error):
        return {}, 403

    def checked(view):
        def wrapper():
            try:
                return view()
            except LookupError:
                abort(403)

        return wrapper

    for path, error, endpoint in (
        ("/payments", PermissionError, "handled"),
        ("/b", LookupError, "above"),
    ):

        def view(error=error):
            add(shop)
            shop.db.session.commit()
            raise error

        shop.app.post(path, endpoint=endpoint)(checked(idempotent(name=endpoint)(view)))
    assert [shop.post(path).status_code for path in ("/payments", "/b")] == [403, 403]
    assert ["handled" in text or "above" in text for text in warnings(caplog)] == [True, True]


@pytest.mark.parametrize(
    "leave",
    [
        add,
        nested,
        by_a_connection_of_its_own,
        lambda shop: (add(shop), shop.db.session.flush()),
        lambda shop: (add(shop), shop.db.session.rollback(), shop.db.session.commit()),
        lambda shop: (shop.db.session.execute(shop.db.text("select 1")), shop.db.session.commit()),
    ],
    ids=["pending", "rolled back savepoint", "own connection", "flushed", "rolled back", "read"],
)
def test_not_where_nothing_was_committed(shop, caplog, leave):
    @shop.app.post("/payments")
    @idempotent
    def pay():
        leave(shop)
        return {}, 403

    assert shop.post().status_code == 403
    assert warnings(caplog) == []


@pytest.mark.parametrize("status", [201, 404])
def test_not_for_what_is_stored(shop, caplog, status):
    @shop.app.post("/payments")
    @idempotent
    def pay():
        add(shop)
        shop.db.session.commit()
        return {}, status

    assert shop.post().status_code == status
    assert warnings(caplog) == []


def show():
    """What can be told of a payment later."""
    try:
        return {"id": g.payment.id, "amount": g.payment.amount}
    except ObjectDeletedError:
        return {"id": g.payment.id, "amount": "gone"}


@pytest.fixture
def showing(shop):
    """A handler of 500 and an after_request function show the payment."""

    @shop.app.after_request
    def sign(response):
        response.headers["X-Payment"] = str(show())
        return response

    shop.app.config["PROPAGATE_EXCEPTIONS"] = False
    shop.app.register_error_handler(500, lambda _error: (show(), 500))
    return shop


@pytest.mark.parametrize("status", [403, 500])
@pytest.mark.parametrize("is_kept", [True, False], ids=["made before", "undone"])
def test_what_runs_later_can_show_what_is_kept_and_the_id_of_what_is_not(showing, status, is_kept):
    shop = showing

    def make():
        g.payment = shop.Payment(amount=4)
        shop.db.session.add(g.payment)
        shop.db.session.commit()

    @shop.app.post("/payments")
    @idempotent
    def pay():
        if not is_kept:
            make()
        g.payment.amount = 5
        shop.db.session.commit()
        raise LookupError if status == 500 else Forbidden

    if is_kept:
        shop.app.before_request(make)
    reply = shop.post()
    shown = {"id": 1, "amount": 4 if is_kept else "gone"}
    assert (reply.status_code, reply.headers["X-Payment"]) == (status, str(shown))
    if status == 500:  # its handler comes before the end of the operation
        assert reply.json == {"id": 1, "amount": 5}
    assert shop.sql("select amount from payment") == ([(4,)] if is_kept else [])


def test_a_deletion_that_was_undone_is_not_made_by_a_commit_above(world):
    """The view had not flushed it."""
    world.sql("insert into payment (id, amount) values (7, 5)")

    @world.app.after_request
    def commit(response):
        world.db.session.commit()
        return response

    @world.app.post("/payments")
    @idempotent
    def delete():
        world.db.session.delete(world.db.session.get(world.Payment, 7))
        return {}, 403

    assert world.post().status_code == 403
    assert world.count() == 1
