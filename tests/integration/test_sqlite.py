"""SQLite does not commit, rolls back, or has no row to finish: nothing is stored."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest
import sqlalchemy as sa
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency, NotAtomic, after_commit, current_operation, idempotent
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


@pytest.fixture
def reader(file):
    """Another connection, such as one of a backup."""
    with closing(sqlite3.connect(file, isolation_level=None, check_same_thread=False)) as connection:
        yield connection


def read(reader):
    """Begin to read and do not end: nobody can commit until then."""
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM payment").fetchone()


def pay(world):
    world.db.session.add(world.Payment(amount=1))
    world.db.session.commit()


def test_a_commit_for_which_the_file_is_too_busy_is_a_503(world, add_view, reader, assert_problem):
    runs = add_view(world, during=lambda: runs == [1] and read(reader))
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    assert world.count() == 0
    reader.execute("ROLLBACK")
    assert world.post().status_code == 201
    assert (runs, world.count()) == ([1, 2], 1)


def test_a_claim_for_which_the_file_is_too_busy_is_a_503(world, add_view, reader, assert_problem):
    runs = add_view(world)
    read(reader)
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    reader.execute("ROLLBACK")
    assert world.post().status_code == 201
    assert (runs, world.count()) == ([1], 1)


DELETED = "delete from idempotency_record"
TAKEN_OVER = "update idempotency_record set owner = 'another'"


@pytest.mark.parametrize("behind", [DELETED, TAKEN_OVER])
def test_an_operation_whose_row_is_no_longer_its_own_commits_nothing(world, assert_problem, behind):
    """Only the transaction of the view itself can do that: nobody else may write meanwhile."""
    attempts = []

    @world.app.post("/payments")
    @idempotent
    def view():
        attempts.append(current_operation.attempt)
        pay(world)
        if len(attempts) == 1:
            world.db.session.execute(sa.text(behind))
            world.db.session.commit()
        return {}, 201

    assert_problem(world.post(), 409, "request-in-progress", retry=True)
    assert world.count() == 0
    assert world.post().status_code == 201
    assert (attempts, world.count()) == ([1, 2], 1)


@pytest.mark.parametrize("behind", [DELETED, TAKEN_OVER])
def test_a_step_whose_row_is_no_longer_its_own_commits_nothing(world, assert_problem, behind):
    @world.app.post("/payments")
    @idempotent(atomic=False)
    def view():
        def step():
            pay(world)
            world.db.session.execute(sa.text(behind))
            world.db.session.commit()

        current_operation.step("pay", step, atomic=True)
        return {}, 201

    assert_problem(world.post(), 409, "request-in-progress", retry=True)
    assert world.count() == 0


def leave_open(world):
    """Write, and do not commit: nobody else can write until then."""
    world.db.session.add(world.Payment(amount=1))
    world.db.session.flush()


def test_a_step_that_leaves_a_write_open_is_recorded_and_told(world, caplog):
    effects = []

    def charge():
        effects.append(1)
        leave_open(world)

    @world.app.post("/payments")
    @idempotent(atomic=False, on_interrupted="retry")
    def view():
        current_operation.step("charge", charge)
        return {}, 201

    assert [world.post().status_code for _ in range(3)] == [500, 500, 500]
    assert "StepError: step 'charge' was done, and left changes in db.session" in caplog.text
    assert (effects, world.count()) == ([1], 0)
    assert world.sql("select key from json_each((select steps from idempotency_record))") == [
        ("charge",)
    ]


def test_who_catches_that_goes_on_from_there(world):
    @world.app.post("/payments")
    @idempotent(atomic=False)
    def view():
        with pytest.raises(StepError):
            current_operation.step("charge", lambda: leave_open(world))
        current_operation.step("save", lambda: pay(world))
        return {}, 201

    assert world.post().status_code == 201
    assert world.count() == 1


def test_a_write_that_is_open_before_a_step_is_refused_before_the_step(world):
    @world.app.post("/payments")
    @idempotent(atomic=False)
    def view():
        leave_open(world)
        with pytest.raises(StepError, match="commit them first"):
            current_operation.step("charge", lambda: pytest.fail("it ran"))
        with pytest.raises(StepError, match="commit them first"):
            current_operation.extend(100)
        world.db.session.commit()
        current_operation.extend(100)
        return {"charge": current_operation.step("charge", lambda: "once")}, 201

    assert world.post().json == {"charge": "once"}
    assert world.count() == 1


def test_a_write_that_is_open_before_the_operation_is_refused_before_it(world):
    with world.app.app_context():
        leave_open(world)
        with pytest.raises(NotAtomic, match="commit them before the operation"):
            world.idempotency.run("key", pytest.fail, name="pay", scope=None, atomic=False)
        world.db.session.commit()
        assert world.idempotency.run("key", dict, name="pay", scope=None, atomic=False) == {}
    assert world.count() == 1


@pytest.mark.parametrize(("status", "answer"), [(201, 500), (409, 409)])
def test_a_write_that_a_view_leaves_open_is_undone_and_no_success(world, caplog, status, answer):
    @world.app.post("/payments")
    @idempotent
    def view():
        leave_open(world)
        return {}, status

    assert [world.post().status_code for _ in range(2)] == [answer] * 2
    assert world.count() == 0
    assert ("changes" in caplog.text) is (status == 201)


def test_two_sessions_at_work_at_once_are_refused(world, caplog):
    @world.app.post("/payments")
    @idempotent
    def view():
        leave_open(world)
        with factory_of(world.app, world.db)() as other:
            other.add(world.Payment(amount=2))
            other.commit()
        world.db.session.commit()
        return {}, 201

    assert world.post().status_code == 500
    assert "NotAtomic: two sessions or connections of the view work at the same time" in caplog.text
    assert world.count() == 0


def test_what_a_view_has_only_read_does_not_wait_for_a_commit(world):
    called = []

    @world.app.post("/payments")
    @idempotent
    def view():
        pay(world)
        assert world.db.session.query(world.Payment).count() == 1
        after_commit(lambda: called.append(world.count()))
        return {}, 201

    assert world.post().status_code == 201
    assert called == [1]


@pytest.mark.parametrize("behind", [DELETED, TAKEN_OVER])
def test_a_response_whose_row_is_no_longer_its_own_is_not_sent(world, assert_problem, behind):
    @world.app.post("/payments")
    @idempotent(atomic=False)
    def view():
        world.sql(behind)
        return {}, 201

    assert_problem(world.post(), 409, "request-in-progress", retry=True)
    assert [record.state for record in world.records()] in ([], ["in_progress"])


@pytest.mark.parametrize("status", [201, 503])
def test_a_trigger_of_sqlites_that_rolls_all_back_ends_the_operation(tmp_path, store, status):
    app, db = Flask("sqlite"), SQLAlchemy()
    app.config["SQLALCHEMY_DATABASE_URI"] = f"sqlite:///{tmp_path}/shop.db"
    app.config["IDEMPOTENCY_STORE"] = "sql"
    db.init_app(app)

    class Payment(db.Model):
        id = sa.Column(sa.Integer, primary_key=True)
        amount = sa.Column(sa.Integer)

    Idempotency(app, db, scope=None)
    with app.app_context():
        db.create_all()
        db.session.execute(
            sa.text(
                "create trigger no before insert on payment when new.amount = 99"
                " begin select raise(rollback, 'no'); end"
            )
        )
        db.session.commit()

    @app.post("/payments")
    @idempotent
    def pay():
        for amount in (3, 99, 4):
            try:
                db.session.add(Payment(amount=amount))
                db.session.commit()
            except sa.exc.SQLAlchemyError:
                db.session.rollback()
        return {}, status

    for _ in range(2):
        response = app.test_client().post("/payments", json={}, headers={"Idempotency-Key": "key-1"})
        assert response.status_code == 500
    with app.app_context():
        assert db.session.scalar(sa.select(sa.func.count(Payment.id))) == 0
        db.engine.dispose()
