"""A failed transaction in the session: a view that is not atomic keeps its response and its steps."""

from contextlib import closing, suppress

import psycopg2
import pytest
import sqlalchemy as sa

from flask_idempotency import current_operation
from tests.databases import plain_dsn
from tests.drivers import EACH
from tests.killed import Killed
from tests.web.leased.records import lease_is_over, steps


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


def test_an_atomic_step_that_caught_an_error_without_a_rollback_is_not_recorded(world, add):
    """What it was to write is not there, and a ``commit()`` at its end would say so."""

    def save():
        world.db.session.add(world.Payment(amount=None))
        with pytest.raises(sa.exc.IntegrityError):
            world.db.session.flush()
        return "saved"

    def view():
        current_operation.step("save", save, atomic=True)
        return {}, 201

    add(view)
    assert world.post().status_code == 500
    assert steps(world) == []
    assert world.count() == 0


@EACH
@pytest.mark.parametrize("commits", [True, False])
def test_a_row_that_a_failed_statement_took_with_it_is_not_missing_in_silence(
    world, add, caplog, commits
):
    """PostgreSQL makes a rollback of the commit, and says nothing."""

    def save():
        world.db.session.add(world.Payment(amount=5))
        world.db.session.flush()
        with suppress(sa.exc.DBAPIError):
            world.db.session.execute(sa.text("select 1/0"))
        if commits:
            world.db.session.commit()
        return "saved"

    def view():
        return {"did": current_operation.step("save", save, atomic=True)}, 201

    add(view)
    assert world.post().status_code == 500
    assert "its error was caught without db.session.rollback()" in caplog.text
    assert (steps(world), world.count()) == ([], 0)


PASSING = {
    "a statement's time-out": ("set local statement_timeout = '50ms'", "select pg_sleep(10)"),
    "a lock's time-out": ("set local lock_timeout = '50ms'", "lock table other"),
    "a cancelled statement": ("select pg_cancel_backend(pg_backend_pid()), pg_sleep(10)",),
    "a full disk": ("do $$ begin raise exception 'full' using errcode = '53100'; end $$",),
    "an error of the system": ("do $$ begin raise exception 'i/o' using errcode = '58030'; end $$",),
}


@EACH
@pytest.mark.parametrize("statements", PASSING.values(), ids=PASSING)
def test_an_atomic_step_that_met_what_passes_leaves_the_operation_interrupted(
    world, add, assert_problem, statements
):
    """It was rolled back, so nothing speaks against another attempt: the step before is recorded."""
    charges, dsn = [], plain_dsn(world.app.config["SQLALCHEMY_DATABASE_URI"])

    def save():
        world.db.session.add(world.Payment(amount=5))
        world.db.session.flush()
        if current_operation.attempt == 1:
            for each in statements:
                world.db.session.execute(sa.text(each))
        world.db.session.commit()

    def view():
        current_operation.step("charge", lambda: charges.append(1))
        current_operation.step("save", save, atomic=True)
        return {}, 201

    add(view, on_interrupted="retry")
    world.sql("create table other ()")
    with closing(psycopg2.connect(dsn)) as other:
        other.cursor().execute("lock table other in row share mode")
        assert_problem(world.post(), 503, "store-unavailable", retry=True)
    assert (lease_is_over(world), steps(world)) == (True, [("charge", 1)])
    assert world.post().status_code == 201
    assert (charges, world.count()) == ([1], 1)
