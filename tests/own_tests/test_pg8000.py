"""A driver that the package has no file for: correct all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from flask_idempotency import current_operation, idempotent
from flask_idempotency.stores import own_pool
from tests.drivers import on
from tests.stores import BOTH

pytestmark = on("pg8000")


@pytest.fixture
def world(make_world: Callable[..., Any]) -> Any:
    """One connection is all that there is: one that is lost is missed by the next request."""
    options = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 5}
    world = make_world(PROPAGATE_EXCEPTIONS=False, SQLALCHEMY_ENGINE_OPTIONS=options)
    yield world
    world.assert_clean()


@pytest.fixture(autouse=True)
def nothing_idle(make_world):
    """Ours is closed when the engine's pool goes, which an error may keep, and pg8000 tells of it."""
    yield
    for own in list(own_pool.engines):
        own.dispose()


def write(world, amount):
    world.db.session.add(world.Payment(amount=amount))
    world.db.session.flush()


def amounts(world):
    return [amount for (amount,) in world.sql("select amount from payment order by id")]


@BOTH
def test_first_request_duplicate_replay_and_changed_body(
    make_world, background, gate, add_view, probing_at_once, assert_problem, assert_replayed
):
    world = make_world()
    runs = add_view(world, during=gate)
    first = background(world.post)
    gate.wait_until_reached()
    assert_problem(world.post(), 409, "request-in-progress", retry=True)
    gate.open()
    assert first.result().status_code == 201
    assert_replayed(first.result(), world.post())
    assert_problem(world.post(json={"amount": 6}), 422, "key-reused")
    assert (runs, amounts(world)) == ([1], [5])
    world.assert_clean()


FAILURES = {
    "of the database": lambda world: world.db.session.execute(sa.text("select 1 / 0")),
    "of the view": lambda world: world.lost,
    "a commit past the session": lambda world: world.db.session.connection().connection.commit(),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_an_error_undoes_all_that_the_request_has_done(world, add_view, failure):
    """Also what was written before the view."""
    world.app.before_request(lambda: write(world, 0))

    def during():
        if current_operation.attempt == 1:
            FAILURES[failure](world)

    runs = add_view(world, during=during)
    assert world.post().status_code == 500
    assert amounts(world) == []
    assert [world.post().status_code for _ in range(2)] == [201, 201]
    assert (runs, amounts(world)) == ([1, 2], [0, 5])


@BOTH
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_connection_lost_around_the_views_commit_is_met_once(world, assert_problem, when):
    runs = []

    def lose_all():
        end = (
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        with sa.create_engine(world.db.engine.url, poolclass=sa.NullPool).connect() as other:
            other.execute(sa.text(end))

    def pay():
        runs.append(current_operation.attempt)
        write(world, 5)
        if when == "after":
            world.db.session.commit()
        if len(runs) == 1:
            lose_all()
        world.db.session.commit()
        return {}, 201

    world.app.add_url_rule("/payments", "pay", idempotent(pay), methods=["POST"])
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    assert world.post().status_code == 201
    assert (runs, amounts(world)) == ([1, 2], [5])


@pytest.mark.parametrize("atomic", [True, False])
def test_run_gives_the_first_result(world, atomic):
    calls = []

    def job():
        calls.append(current_operation.attempt)
        if atomic:
            write(world, 5)
            world.db.session.commit()
        else:
            current_operation.step("write", write, world, 5, atomic=True)
        if calls == [1]:
            raise SystemExit
        return len(calls)

    def run():
        with world.app.app_context():
            options = {} if atomic else {"atomic": False, "on_interrupted": "retry"}
            return world.idempotency.run("key-1", job, scope=None, name="job", **options)

    with pytest.raises(SystemExit):
        run()
    assert amounts(world) == ([] if atomic else [5])
    assert (run(), run()) == (2, 2)
    assert (calls, amounts(world)) == ([1, 2], [5])
