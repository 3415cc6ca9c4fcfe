"""``current_operation``, and idempotent functions inside of requests that are one already."""

import pytest

from flask_idempotency import current_operation, idempotent
from flask_idempotency.core.keys import SHOWN


def test_the_present_operation_knows_what_it_is(app, world, heard):
    @app.post("/payments")
    @idempotent(namespace="v2")
    def pay():
        operation = current_operation
        assert operation.connection.exec_driver_sql("select 7").scalar() == 7
        assert "nary" not in repr(operation)
        for call in (lambda: operation.step("charge", dict)), (lambda: operation.extend(5)):
            with pytest.raises(RuntimeError, match="atomic=False"):
                call()
        return [operation.key, operation.scope, operation.attempt, operation.name, operation.id]

    *known, operation_id = world.post(key='"ca\\"nary"', user="alice").json
    assert known == ['ca"nary', "alice", 1, "pay"]
    assert operation_id == heard[0][1].id == world.records()[0].key.hex()[:SHOWN]


def test_without_an_operation_there_is_none(app, client):
    app.get("/")(lambda: {"there": bool(current_operation)})
    assert client.get("/").json == {"there": False}
    with app.app_context(), pytest.raises(RuntimeError, match="while a view protected by @idempotent"):
        current_operation.attempt  # noqa: B018 -- asking is enough
