"""A resource that a request deletes: where it is loaded decides what its retry gets."""

import pytest
from flask import abort, g

from flask_idempotency import idempotent


@pytest.mark.parametrize(("below", "second"), [(True, 204), (False, 404)])
def test_a_retried_deletion_is_replayed_if_the_view_loads_the_row(world, below, second):
    """As the page on protecting views says."""
    world.sql("insert into payment (id, amount) values (7, 1)")

    def load():
        return world.db.session.get(world.Payment, 7) or abort(404)

    @world.app.before_request
    def before():
        if not below:
            g.payment = load()

    @world.app.delete("/payments/7")
    @idempotent
    def delete():
        world.db.session.delete(load() if below else g.payment)
        world.db.session.commit()
        return "", 204

    headers = {"Idempotency-Key": "key", "X-User": "alice"}
    answers = [world.client.delete("/payments/7", headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [204, second]
    assert world.count() == 0
