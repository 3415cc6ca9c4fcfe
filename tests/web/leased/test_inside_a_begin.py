"""Steps inside the view's own ``with db.session.begin()``."""

import pytest
import sqlalchemy as sa

from flask_idempotency import current_operation
from tests.web.leased.records import steps


def count(world):
    return world.db.session.scalar(sa.select(sa.func.count()).select_from(world.Payment))


def test_a_step_inside_a_transaction_that_has_only_read_leaves_it_open(world, add_json):
    def view():
        with world.db.session.begin():
            before = count(world)
            charged = current_operation.step("charge", lambda: "charged")
            world.db.session.add(world.Payment(amount=5))
            current_operation.extend(60)
            return {"before": before, "step": charged}

    runs = add_json(view)
    first, again = world.post(), world.post()
    assert (first.status_code, again.status_code) == (201, 201), first.data
    assert first.json == {"before": 0, "step": "charged"}
    assert (world.count(), runs, steps(world)) == (1, [1], [("charge", 1)])


def test_what_it_had_set_is_there_after_the_step(world, add_json):
    def view():
        with world.db.session.begin():
            world.db.session.execute(sa.text("set local app.tenant = 'a'"))
            current_operation.step("charge", lambda: "charged")
            return world.db.session.scalar(sa.text("select current_setting('app.tenant')"))

    add_json(view)
    assert world.post().json == "a"


def pay(world):
    world.db.session.add(world.Payment(amount=5))


def test_an_atomic_step_may_be_the_last_thing_in_it(world, add_json):
    def view():
        with world.db.session.begin():
            count(world)
            current_operation.step("pay", pay, world, atomic=True)
        return count(world)

    add_json(view)
    assert world.post().json == 1
    assert world.count() == 1


def test_an_atomic_step_ends_it_as_a_commit_in_it_does(world, add_json):
    def view():
        with world.db.session.begin():
            current_operation.step("pay", pay, world, atomic=True)
            with pytest.raises(sa.exc.InvalidRequestError, match="complete the context manager"):
                count(world)
        with world.db.session.begin():
            pay(world)
            world.db.session.commit()
            with pytest.raises(sa.exc.InvalidRequestError, match="complete the context manager"):
                count(world)
        return "done"

    add_json(view)
    assert world.post().json == "done"
    assert (world.count(), steps(world)) == (2, [("pay", 1)])
