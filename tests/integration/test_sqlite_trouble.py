"""SQLite does not commit, or has no row to finish: nothing is kept, and the client is told."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest
import sqlalchemy as sa

from flask_idempotency import current_operation, idempotent

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


@pytest.mark.parametrize("behind", [DELETED, TAKEN_OVER])
def test_an_answer_whose_row_is_no_longer_its_own_is_not_given(world, assert_problem, behind):
    @world.app.post("/payments")
    @idempotent(atomic=False)
    def view():
        world.sql(behind)
        return {}, 201

    assert_problem(world.post(), 409, "request-in-progress", retry=True)
    assert [record.state for record in world.records()] in ([], ["in_progress"])
