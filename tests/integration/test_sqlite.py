"""SQLite does not commit, rolls back, or has no row to finish: nothing is stored."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest
import sqlalchemy as sa

from flask_idempotency import NotAtomic, after_commit, current_operation
from flask_idempotency.core.errors import StepError
from tests.sessions import factory_of

pytestmark = pytest.mark.parametrize("store", ["sql"], indirect=True)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "shop.db"


@pytest.fixture
def world(make_world, file):
    return make_world(
        SQLALCHEMY_DATABASE_URI=f"sqlite:///{file}",
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
def test_a_file_that_is_too_busy_is_a_503(world, file, view, assert_problem, during):
    """Another connection, such as one of a backup, reads and does not end: nobody can commit."""
    runs = []
    with closing(sqlite3.connect(file, isolation_level=None, check_same_thread=False)) as reader:

        def read():
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM payment").fetchone()

        def pay_while_it_reads():
            runs.append(current_operation.attempt)
            pay(world)
            if runs == [1] and during == "the commit":
                read()
            return {}, 201

        view(pay_while_it_reads)
        if during == "the claim":
            read()
        assert_problem(world.post(), 503, "store-unavailable", retry=True)
        assert world.count() == 0
        reader.execute("ROLLBACK")
    assert world.post().status_code == 201
    assert (runs, world.count()) == ([1] if during == "the claim" else [1, 2], 1)


DELETED = "delete from idempotency_record"
TAKEN_OVER = "update idempotency_record set owner = 'another'"


@pytest.mark.parametrize("behind", [DELETED, TAKEN_OVER])
@pytest.mark.parametrize("kind", ["atomic", "step", "leased"])
def test_an_operation_whose_row_is_no_longer_its_own_commits_nothing(
    world, view, assert_problem, kind, behind
):
    """Only the transaction of an atomic one itself can do that: nobody else may write meanwhile."""

    def lose_the_row():
        pay(world)
        world.db.session.execute(sa.text(behind))
        world.db.session.commit()

    def lose():
        match kind:
            case "atomic":
                lose_the_row()
            case "step":
                current_operation.step("pay", lose_the_row, atomic=True)
            case "leased":
                world.sql(behind)
        return {}, 201

    view(lose, atomic=kind == "atomic")
    assert_problem(world.post(), 409, "request-in-progress", retry=True)
    assert world.count() == 0
    assert "completed" not in [record.state for record in world.records()]


def test_a_step_that_leaves_a_write_open_is_recorded_and_told(world, view, caplog):
    effects = []

    def charge():
        effects.append(1)
        write(world)

    def leave_open():
        current_operation.step("charge", charge)
        return {}, 201

    view(leave_open, atomic=False, on_interrupted="retry")
    world.app.testing = False
    assert [world.post().status_code for _ in range(3)] == [500, 500, 500]
    assert "StepError: step 'charge' was done, and left changes in db.session" in caplog.text
    assert (effects, world.count()) == ([1], 0)
    assert world.sql("select key from json_each((select steps from idempotency_record))") == [
        ("charge",)
    ]


def test_a_write_that_is_open_is_refused_before_a_step_and_after_one(world, view):
    def step_beside_it():
        write(world)
        with pytest.raises(StepError, match="commit them first"):
            current_operation.step("charge", lambda: pytest.fail("it ran"))
        with pytest.raises(StepError, match="commit them first"):
            current_operation.extend(100)
        world.db.session.commit()
        current_operation.extend(100)
        with pytest.raises(StepError):
            current_operation.step("leaves it open", lambda: write(world))
        current_operation.step("save", lambda: pay(world))  # who catches that goes on from there
        return {"charge": current_operation.step("charge", lambda: "once")}, 201

    view(step_beside_it, atomic=False)
    assert world.post().json == {"charge": "once"}
    assert world.count() == 2


def test_a_write_that_is_open_before_the_operation_is_refused_before_it(world):
    with world.app.app_context():
        write(world)
        with pytest.raises(NotAtomic, match="db.session held changes when run"):
            world.idempotency.run("key", pytest.fail, name="pay", scope=None, atomic=False)
        world.db.session.commit()
        assert world.idempotency.run("key", dict, name="pay", scope=None, atomic=False) == {}
    assert world.count() == 1


def leave_open(world):
    write(world)


def use_two_sessions(world):
    write(world)
    with factory_of(world.app, world.db)() as other:
        other.add(world.Payment(amount=2))
        other.commit()
    world.db.session.commit()


def meet_a_trigger(world):
    for amount in (1, 99, 1):
        try:
            world.db.session.add(world.Payment(amount=amount))
            world.db.session.commit()
        except sa.exc.SQLAlchemyError:
            world.db.session.rollback()


REFUSED = [
    (leave_open, 201, 500, "changes"),
    (leave_open, 409, 409, ""),
    (use_two_sessions, 201, 500, "two sessions or connections of the view work at the same time"),
    (meet_a_trigger, 201, 500, "ended the operation's transaction"),
    (meet_a_trigger, 503, 500, "ended the operation's transaction"),
]


@pytest.mark.parametrize(("does", "status", "answer", "said"), REFUSED)
def test_what_cannot_be_committed_with_the_record_is_undone(
    world, view, caplog, does, status, answer, said
):
    """A trigger of SQLite's may roll the whole transaction back; what came after it is undone, too."""
    world.sql(
        "create trigger no before insert on payment when new.amount = 99"
        " begin select raise(rollback, 'no'); end"
    )

    def act():
        does(world)
        return {}, status

    view(act)
    world.app.testing = False
    assert [world.post().status_code for _ in range(2)] == [answer] * 2
    assert world.count() == 0
    assert said in caplog.text if said else "changes" not in caplog.text


def test_what_a_view_has_only_read_does_not_wait_for_a_commit(world, view):
    called = []

    def read_after_it():
        pay(world)
        assert world.db.session.query(world.Payment).count() == 1
        after_commit(lambda: called.append(world.count()))
        return {}, 201

    view(read_after_it)
    assert world.post().status_code == 201
    assert called == [1]
