"""One view, the usual way."""

from flask import request

from flask_idempotency import current_operation, idempotent
from tests.stores import BOTH


@BOTH
def test_a_retry_gets_the_same_response_and_the_view_runs_once(app, world):
    @app.post("/payments")
    @idempotent
    def pay():
        payment = world.Payment(amount=request.get_json()["amount"])
        world.db.session.add(payment)
        world.db.session.commit()
        return {"id": payment.id, "attempt": current_operation.attempt}, 201

    first, retry = world.post(), world.post()
    assert first.status_code == retry.status_code == 201
    assert first.data == retry.data
    assert "Idempotent-Replayed" not in first.headers
    assert retry.headers["Idempotent-Replayed"] == "true"
    assert world.count() == 1
    assert world.post(json={"amount": 6}).status_code == 422
