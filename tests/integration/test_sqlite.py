"""SQLite does not commit, rolls back, or has no row to finish: nothing is stored."""

import sqlite3
from contextlib import closing

import pytest
import sqlalchemy as sa

from flask_idempotency import current_operation
from flask_idempotency.core.errors import StepError
from tests.sessions import factory_of

pytestmark = pytest.mark.parametrize("store", ["sql"], indirect=True)


@pytest.fixture
def world(make_world, tmp_path):
    return make_world(
        SQLALCHEMY_DATABASE_URI=f"sqlite:///{tmp_path}/shop.db",
        SQLALCHEMY_ENGINE_OPTIONS={"connect_args": {"timeout": 0.05}},
        PROPAGATE_EXCEPTIONS=False,
    )


def write(world):
    """Nobody else can write until this is committed."""
    world.db.session.add(world.Payment(amount=1))
    world.db.session.flush()


def pay(world):
    write(world)
    world.db.session.commit()


@pytest.mark.parametrize("during", ["the claim", "the commit"])
def test_a_file_that_is_too_busy_is_a_503(world, tmp_path, add_view, assert_problem, during):
    """Another connection, such as one of a backup, reads and does not end: nobody can commit."""
    file = sqlite3.connect(tmp_path / "shop.db", isolation_level=None, check_same_thread=False)
    with closing(file) as reader:

        def read():
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM payment").fetchone()

        runs = add_view(world, during=lambda: read() if runs == [1] and during == "the commit" else 0)
        if during == "the claim":
            read()
        assert_problem(world.post(), 503, "store-unavailable", retry=True)
        assert world.count() == 0
        reader.execute("ROLLBACK")
    assert world.post().status_code == 201
    assert (runs, world.count()) == ([1] if during == "the claim" else [1, 2], 1)


@pytest.mark.parametrize("atomic", [True, False])
def test_an_operation_whose_row_is_no_longer_its_own_commits_nothing(
    world, view, assert_problem, atomic
):
    """Only the transaction of an atomic one itself can do that: nobody else may write meanwhile."""
    deleted = "delete from idempotency_record"

    def lose():
        if atomic:
            pay(world)
            world.db.session.execute(sa.text(deleted))
            world.db.session.commit()
        else:
            world.sql(deleted)
        return {}, 201

    view(lose, atomic=atomic)
    assert_problem(world.post(), 409, "request-in-progress", retry=True)
    assert world.count() == 0
    assert "completed" not in [record.state for record in world.records()]


def test_a_write_that_is_open_is_refused_before_a_step_and_told_after_one(world, view, caplog):
    effects = []

    def charge():
        effects.append(1)
        write(world)

    def steps():
        write(world)
        with pytest.raises(StepError, match="commit them first"):
            current_operation.step("early", lambda: pytest.fail("it ran"))
        with pytest.raises(StepError, match="commit them first"):
            current_operation.extend(100)
        world.db.session.commit()
        current_operation.extend(100)
        current_operation.step("charge", charge)

    view(steps, atomic=False, on_interrupted="retry")
    world.app.testing = False
    assert [world.post().status_code for _ in range(3)] == [500, 500, 500]
    assert "StepError: step 'charge' was done, and left changes in db.session" in caplog.text
    assert (effects, world.count()) == ([1], 1)


def use_two_sessions(world):
    write(world)
    with factory_of(world.app, world.db)() as other:
        other.add(world.Payment(amount=2))
        other.commit()
    world.db.session.commit()


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (write, "changes"),
        (use_two_sessions, "two sessions or connections of the view work at the same time"),
    ],
)
def test_what_cannot_be_committed_with_the_record_is_undone(world, view, caplog, does, said):
    view(lambda: does(world) or ({}, 201))
    world.app.testing = False
    assert [world.post().status_code for _ in range(2)] == [500, 500]
    assert world.count() == 0
    assert said in caplog.text
