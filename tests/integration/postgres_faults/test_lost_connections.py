"""PostgreSQL goes away in the middle: reset, lost or crashed."""

import gc
import logging
import weakref

import pytest
import sqlalchemy as sa
from flask import abort

from flask_idempotency import current_operation
from tests.drivers import EACH
from tests.faults.nemesis import COMPLETION
from tests.integration.postgres_faults.conftest import first_time
from tests.integration.views import protect
from tests.waiting import wait_until

pytestmark = EACH


def test_a_connection_reset_in_the_middle_of_a_statement(proxied, background, add_view, retries):
    world, proxy = proxied
    sleep = sa.text("select pg_sleep(30) /* the view's */")
    runs = add_view(world, during=first_time(lambda: world.db.session.execute(sleep)))
    first = background(world.post)
    busy = (
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and state = 'active' and query like '%the view%' and pid <> pg_backend_pid()"
    )
    wait_until(lambda: world.sql(busy) == [(1,)], "the view's statement runs")
    proxy.cut()
    retries(world, runs, first.result())


def lose_all(world):
    world.sql(
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
        " where datname = current_database() and pid <> pg_backend_pid()"
    )


def write(world):
    world.db.session.add(world.Payment(amount=1))
    world.db.session.flush()


def commit(world):
    write(world)
    world.db.session.commit()


def savepoint(world):
    with world.db.session.begin_nested():
        write(world)


@pytest.mark.parametrize(
    ("reads_before", "before", "then", "status"),
    [
        (False, bool, write, 201),
        (True, bool, write, 201),  # what authentication began is lost, too, and is not begun again
        (False, write, savepoint, 201),
        (True, write, lambda _world: abort(404), 404),
        (False, bool, lambda world: world.db.session.add(world.Payment(amount=1)), 201),
        (False, write, bool, 201),
        (False, commit, lambda world: world.db.session.get(world.Payment, 0), 201),
    ],
    ids=[
        *("a write", "a write behind a read", "a savepoint behind a write", "a rejection"),
        *("the view's commit", "a commit of the view's that sends nothing"),
        "a query behind a commit",
    ],
)
def test_a_connection_lost_between_two_statements_is_a_503(
    make_world, assert_problem, caplog, reads_before, before, then, status
):
    caplog.set_level(logging.CRITICAL, "flask_idempotency")  # what is logged keeps the error's frames
    gc.collect()  # and pytest those in which it hears of a connection that an earlier test left open
    world, lost = make_world(PROPAGATE_EXCEPTIONS=False), []
    if reads_before:
        world.app.before_request(lambda: world.db.session.execute(sa.select(1)) and None)

    def lose():
        lost.append(weakref.ref(current_operation.connection.connection.driver_connection))
        lose_all(world)

    lose = first_time(lose)

    def pay():
        before(world)
        lose()
        then(world)
        world.db.session.commit()
        return {}, 201

    protect(world, pay)
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    assert world.count() == 0
    gc.collect()
    assert [found() for found in lost] == [None], "nothing is kept of it"
    assert world.post().status_code == status
    assert (world.count() == 0) is (status == 404)
    world.assert_clean()


def test_a_connection_lost_before_the_view_breaks_nothing_above_it(make_world, add_view, retries):
    """``db.session.remove()`` of the application's teardown is quiet, as after its own statement."""
    world = make_world()
    lose = first_time(lambda: lose_all(world))

    @world.app.before_request
    def sign_in():
        world.db.session.execute(sa.select(1))
        lose()

    runs = add_view(world)
    retries(world, runs, world.post(), total=1)


@pytest.mark.parametrize(
    ("arrives", "shown"), [(True, True), (False, False)], ids=["COMMIT arrived", "COMMIT lost"]
)
def test_a_connection_reset_during_the_operations_commit_is_an_unknown_outcome(
    proxied, background, add_view, retries, arrives, shown
):
    """Also where the view has used the driver's own connection."""
    world, proxy = proxied

    def before_the_last_message():
        if shown:
            world.db.session.connection()
        proxy.lose_answer(COMPLETION) if arrives else proxy.hold(COMPLETION)

    runs = add_view(world, during=first_time(before_the_last_message))
    first = background(world.post)
    if not arrives:
        proxy.wait_until_held()
        proxy.cut()
    assert "not known whether" in first.result().json["detail"]
    retries(world, runs, first.result(), total=1 if arrives else 2, committed=arrives)
    assert proxy.lost == arrives


def test_a_server_that_crashes_in_the_view_is_down_and_restarts(
    make_world, own_postgres, own_database, add_view, assert_problem, retries
):
    """Connections that died in the pool cost nobody an error."""
    world = make_world(SQLALCHEMY_DATABASE_URI=own_database)
    runs = add_view(world, during=first_time(own_postgres.kill))
    first = world.post()
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    own_postgres.start()
    retries(world, runs, first)  # the crash may lose the claim: then it is a first attempt again
    own_postgres.restart()
    assert world.post().headers["Idempotent-Replayed"] == "true"
    own_postgres.restart()
    assert world.post(key="key-2").status_code == 201
