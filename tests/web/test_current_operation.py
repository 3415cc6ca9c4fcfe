"""``current_operation``, and idempotent functions inside of requests that are one already."""

import pytest
import sqlalchemy as sa
from flask import request

from flask_idempotency import current_operation, idempotent
from flask_idempotency.core.keys import SHOWN


@pytest.fixture
def pay(world):
    """Writes a payment; its number is the answer."""

    def write():
        payment = world.Payment(amount=5)
        world.db.session.add(payment)
        world.db.session.commit()
        return {"id": payment.id}, 201

    return write


def test_the_present_operation_knows_what_it_is(app, world):
    @app.post("/payments")
    @idempotent(namespace="v2")
    def pay():
        operation = current_operation
        assert operation.connection.exec_driver_sql("select 7").scalar() == 7
        shown = repr(operation)
        return [operation.key, operation.scope, operation.attempt, operation.name, shown]

    key, *rest, shown = world.post(key='"ca\\"nary"', user="alice").json
    assert [key, *rest] == ['ca"nary', "alice", 1, "pay"]
    assert "nary" not in shown


def test_without_an_operation_there_is_none(app, client):
    @app.get("/")
    def index():
        return {"there": bool(current_operation)}

    assert client.get("/").json == {"there": False}
    for context in app.app_context(), app.test_request_context("/"):
        with context, pytest.raises(RuntimeError, match="while a view protected by @idempotent"):
            current_operation.attempt  # noqa: B018 -- asking is enough
    with pytest.raises(RuntimeError, match="@idempotent"):
        current_operation.key  # noqa: B018 -- asking is enough


def test_its_id_is_what_events_and_commands_call_it(app, world, heard):
    @app.post("/payments")
    @idempotent
    def view():
        return current_operation.id, 201

    told = world.post().text
    assert told == heard[0][1].id == world.records()[0].key.hex()[:SHOWN]


def test_a_setting_from_before_the_view_keeps_nobody_from_a_request_to_the_own_application(
    app, world, pay
):
    @app.before_request
    def choose_tenant():
        if request.path == "/outer":
            world.db.session.execute(sa.text("select set_config('app.tenant', 't1', true)"))

    app.post("/inner")(idempotent(pay))

    @app.post("/outer")
    @idempotent(atomic=False)
    def outer():
        assert world.post("/inner").status_code == 201
        return {}, 201

    app.testing = True
    assert world.post("/outer").status_code == 201
    assert [record.state for record in world.records()] == ["completed"] * 2


def test_what_its_connection_wrote_before_the_session_is_none_of_what_the_session_undoes(app, world):
    @app.post("/payments")
    @idempotent
    def pay():
        with current_operation.connection.connection.cursor() as cursor:
            cursor.execute("insert into payment (amount) values (1)")
        world.db.session.add(world.Payment(amount=2))
        world.db.session.flush()
        world.db.session.rollback()
        return {}, 201

    assert world.post().status_code == 201
    assert world.sql("select amount from payment") == [(1,)]
