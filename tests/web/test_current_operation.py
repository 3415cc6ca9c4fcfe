"""``current_operation``, and idempotent functions inside of requests that are one already."""

import pytest
from flask import abort, g

from flask_idempotency import current_operation, idempotent
from flask_idempotency.core.keys import SHOWN


def test_the_present_operation_knows_what_it_is(app, world, heard):
    @app.post("/payments")
    @idempotent(namespace="v2")
    def pay():
        operation = current_operation
        assert operation.connection.exec_driver_sql("select 7").scalar() == 7
        assert "nary" not in repr(operation)
        return [operation.key, operation.scope, operation.attempt, operation.name, operation.id]

    *known, operation_id = world.post(key='"ca\\"nary"', user="alice").json
    assert known == ['ca"nary', "alice", 1, "pay"]
    assert operation_id == heard[0][1].id == world.records()[0].key.hex()[:SHOWN]


def test_without_an_operation_there_is_none(app, client):
    app.get("/")(lambda: {"there": bool(current_operation)})
    assert client.get("/").json == {"there": False}
    for context in app.app_context(), app.test_request_context("/"):
        with context, pytest.raises(RuntimeError, match="while a view protected by @idempotent"):
            current_operation.attempt  # noqa: B018 -- asking is enough
    with pytest.raises(RuntimeError, match="@idempotent"):
        current_operation.key  # noqa: B018 -- asking is enough


@pytest.mark.parametrize(("below", "second"), [(True, 204), (False, 404)])
def test_a_retried_deletion_is_replayed_if_the_view_loads_the_row(app, world, below, second):
    """As the page on protecting views says."""
    world.sql("insert into payment (id, amount) values (7, 1)")

    def load():
        g.payment = world.db.session.get(world.Payment, 7) or abort(404)

    if not below:
        app.before_request(load)

    @app.delete("/payments")
    @idempotent
    def delete():
        if below:
            load()
        world.db.session.delete(g.payment)
        world.db.session.commit()
        return "", 204

    assert [world.post(method="DELETE").status_code for _ in range(2)] == [204, second]
    assert world.count() == 0
