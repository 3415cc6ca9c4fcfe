"""A session whose statement has failed, and that nobody has rolled back when the operation ends."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from flask_idempotency import idempotent


def by_text(world):
    """The session does not know: the server refuses what follows."""
    world.db.session.execute(sa.text("select 1 / 0"))


def by_flush(world):
    """The session itself refuses what follows."""
    world.db.session.add(world.Payment(amount=None, note="\0"))
    world.db.session.flush()


def pay(world, amount):
    world.db.session.add(world.Payment(amount=amount))
    world.db.session.commit()
    return amount


@pytest.fixture(params=[by_text, by_flush])
def failing(world, request):
    """What a view does that catches an error, and answers."""

    def fail():
        pay(world, 1)
        with pytest.raises((sa.exc.DBAPIError, ValueError)):
            request.param(world)
        return "failed"

    return fail


def test_the_next_operation_that_rolls_back_first_goes_on(world, failing):
    with world.app.app_context():
        assert world.idempotency.run("a", failing, scope="s", name="pay") == "failed"
        world.db.session.rollback()
        assert world.idempotency.run("b", lambda: pay(world, 2), scope="s", name="pay") == 2
        assert world.idempotency.run("b", lambda: pay(world, 3), scope="s", name="pay") == 2
    assert world.sql("select amount from payment order by 1") == [(1,), (2,)]
    world.assert_clean()


def test_one_that_rolls_back_inside_goes_on(world, failing):
    def roll_back_and_pay():
        world.db.session.rollback()
        return pay(world, 2)

    with world.app.app_context():
        world.idempotency.run("a", failing, scope="s", name="pay")
        assert world.idempotency.run("b", roll_back_and_pay, scope="s", name="pay") == 2
    assert world.sql("select amount from payment order by 1") == [(1,), (2,)]
    world.assert_clean()


def test_a_savepoint_that_a_failed_transaction_refuses_does_not_break_the_operation(world):
    def roll_back_and_pay():
        with pytest.raises(sa.exc.DBAPIError, match="zero"):
            by_text(world)
        with pytest.raises(sa.exc.DBAPIError, match="aborted"), world.db.session.begin_nested():
            world.db.session.execute(sa.select(1))
        world.db.session.rollback()
        return pay(world, 1)

    with world.app.app_context():
        assert world.idempotency.run("a", roll_back_and_pay, scope="s", name="pay") == 1
    assert world.sql("select amount from payment") == [(1,)]
    world.assert_clean()


def test_one_that_touches_no_database_goes_on(world, failing):
    with world.app.app_context():
        world.idempotency.run("a", failing, scope="s", name="pay")
        assert world.idempotency.run("b", lambda: "done", scope="s", name="other") == "done"
        assert world.idempotency.run("b", lambda: "again", scope="s", name="other") == "done"


def test_requests_in_one_context_go_on(world, failing):
    @world.app.post("/payments")
    @idempotent
    def view():
        world.db.session.rollback()
        failing()
        return {}, 409

    with world.app.app_context():
        assert [world.post(key=key).status_code for key in ("one", "two", "two")] == [409] * 3
    assert world.count() == 2
    world.assert_clean()


def test_one_that_ended_with_an_error_disturbs_no_later_one(world):
    def run(key, job):
        return world.idempotency.run(key, job, scope="s", name="job", atomic=False)

    with world.app.app_context():
        with pytest.raises(sa.exc.IntegrityError):
            run("a", lambda: pay(world, None))
        assert run("b", lambda: pay(world, 2)) == 2
    assert world.sql("select amount from payment") == [(2,)]
    world.assert_clean()


@pytest.mark.parametrize("atomic", [True, False])
def test_what_was_rolled_back_to_a_savepoint_needs_no_commit(world, atomic):
    def get_or_create():
        with pytest.raises(sa.exc.IntegrityError), world.db.session.begin_nested():
            world.db.session.add(world.Payment(amount=None))
        return "old"

    def run():
        return world.idempotency.run("k", get_or_create, scope="s", name="job", atomic=atomic)

    with world.app.app_context():
        assert [run(), run()] == ["old", "old"]
    world.assert_clean()
