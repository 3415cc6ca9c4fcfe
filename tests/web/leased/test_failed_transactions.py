"""A failed transaction in the session: a view that is not atomic keeps its response and its steps."""

import pytest
import sqlalchemy as sa

from flask_idempotency import current_operation
from tests.killed import Killed


def fail_a_statement(world):
    with pytest.raises(sa.exc.ProgrammingError):
        world.db.session.execute(sa.text("select * from nowhere"))


def test_a_failed_transaction_in_the_session_does_not_cost_the_response(world, add):
    def view():
        fail_a_statement(world)
        return {"done": True}, 201

    add(view)
    assert [world.post().status_code for _ in range(2)] == [201, 201]


def test_an_error_that_leaves_the_session_failed_is_stored(world, add):
    def view():
        world.db.session.execute(sa.text("select * from nowhere"))

    add(view)
    assert [world.post().status_code for _ in range(2)] == [500, 500]
    assert world.records()[0].state == "failed"


def test_nor_does_it_cost_the_recording_of_a_step(world, add):
    runs = []

    def charge():
        runs.append(1)
        fail_a_statement(world)

    def view():
        current_operation.step("charge", charge)
        world.db.session.rollback()
        if current_operation.attempt == 1:
            raise Killed
        return {}, 201

    add(view, on_interrupted="retry")
    with pytest.raises(Killed):
        world.post()
    assert world.post().status_code == 201
    assert runs == [1]
