"""PostgreSQL goes away in the middle: reset, crashed, paused, or cut off without a word."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import sqlalchemy as sa
from flask import abort

import servers
from flask_idempotency import current_operation, idempotent
from tests.drivers import EACH
from tests.faults.nemesis import COMPLETION
from tests.integration.postgres_faults.faults import first_time, new_name, settings
from tests.stores import BOTH
from tests.waiting import wait_until

pytestmark = EACH


def busy(world, statement: str) -> bool:
    """Whether a backend works on a statement with this text in it."""
    return world.sql(
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and state = 'active' and position(:text in query) > 0 and pid <> pg_backend_pid()",
        text=statement,
    ) != [(0,)]


def test_a_connection_reset_in_the_middle_of_a_statement(
    proxied, background, add_view, assert_problem, expect
):
    world, proxy = proxied
    sleep = sa.text("select pg_sleep(30) /* the view's */")
    runs = add_view(world, during=first_time(lambda: world.db.session.execute(sleep)))
    first = background(world.post)
    wait_until(lambda: busy(world, "/* the view's */"), "the view's statement runs")
    proxy.cut()
    assert_problem(first.result(), 503, "store-unavailable", retry=True)
    assert world.count() == 0
    expect.retry_runs(world, runs)


def lose_all(world):
    world.sql(
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
        " where datname = current_database() and pid <> pg_backend_pid()"
    )


def savepoint(world):
    with world.db.session.begin_nested():
        world.db.session.add(world.Payment(amount=1))


def reject(_world):
    abort(404)


def nothing(_world):
    pass


@BOTH
@pytest.mark.parametrize("reads_before", [False, True], ids=["", "after a read"])
@pytest.mark.parametrize("writes", [False, True], ids=["", "writes"])
@pytest.mark.parametrize("meets", [nothing, savepoint, reject])
def test_a_connection_lost_between_two_statements_is_a_503(
    make_world, assert_problem, meets, writes, reads_before
):
    """The transaction that authentication began is lost, too, and is not begun again."""
    world = make_world(PROPAGATE_EXCEPTIONS=False)
    if reads_before:
        world.app.before_request(lambda: world.db.session.execute(sa.select(1)) and None)
    lose = first_time(lambda: lose_all(world))

    def pay():
        if writes:
            world.db.session.add(world.Payment(amount=1))
            world.db.session.flush()
        lose()
        meets(world)
        world.db.session.add(world.Payment(amount=1))
        world.db.session.commit()
        return {}, 201

    world.app.add_url_rule("/payments", "pay", idempotent(pay), methods=["POST"])
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    assert world.count() == 0
    assert world.post().status_code == (404 if meets is reject else 201)
    assert (world.count() == 0) is (meets is reject)
    world.assert_clean()


@BOTH
def test_a_connection_lost_before_the_view_breaks_nothing_above_it(
    make_world, add_view, assert_problem, expect
):
    """``db.session.remove()`` of the application's teardown is quiet, as after its own statement."""
    world = make_world()
    lose = first_time(lambda: lose_all(world))

    @world.app.before_request
    def sign_in():
        world.db.session.execute(sa.select(1))
        lose()

    runs = add_view(world)
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    expect.retry_runs(world, runs, total=1)


def test_of_a_lost_connection_nothing_is_kept(make_world, add_view, assert_problem, caplog):
    caplog.set_level(logging.CRITICAL, "flask_idempotency")  # what is logged keeps the error's frames
    world, lost = make_world(), []
    end = sa.text("select pg_terminate_backend(pg_backend_pid())")

    def lose():
        lost.append(weakref.ref(current_operation.connection.connection.driver_connection))
        world.db.session.execute(end)

    add_view(world, during=first_time(lose))
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    gc.collect()
    assert [found() for found in lost] == [None]


@pytest.mark.parametrize("shown", [False, True], ids=["", "the driver's own was used"])
@pytest.mark.parametrize("arrives", [True, False], ids=["COMMIT arrived", "COMMIT lost"])
def test_a_connection_reset_during_the_commit_is_an_unknown_outcome(
    proxied, background, add_view, assert_problem, expect, arrives, shown
):
    world, proxy = proxied
    lose = proxy.lose_answer if arrives else proxy.hold

    def before_the_commit():
        if shown:
            world.db.session.connection()
        lose(COMPLETION)

    runs = add_view(world, during=first_time(before_the_commit))
    first = background(world.post)
    if not arrives:
        proxy.wait_until_held()
        proxy.cut()
    problem = assert_problem(first.result(), 503, "store-unavailable", retry=True)
    assert "not known whether" in problem["detail"]
    if arrives:
        assert proxy.lost == 1
        expect.retry_replays(world, runs)
    else:
        expect.retry_runs(world, runs)


def test_a_server_that_restarts_before_or_crashes_in_the_view(
    make_world, own_postgres, own_database, add_view, assert_problem, expect
):
    """Connections that died in the pool cost nobody an error."""
    world = make_world(SQLALCHEMY_DATABASE_URI=own_database)
    runs = add_view(world, during=first_time(lambda: own_postgres.restart(crash=True)))
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    assert world.count() == 0
    world.assert_clean()
    expect.retry_runs(world, runs)  # the crash may lose the claim: then it is a first attempt again
    own_postgres.restart()
    assert world.post().headers["Idempotent-Replayed"] == "true"
    own_postgres.restart()
    assert world.post(key="key-2").status_code == 201


def test_a_server_that_crashes_while_the_commit_is_on_its_way(
    make_world, own_postgres, own_database, background, add_view, assert_problem, expect
):
    with servers.FaultProxy(own_database) as proxy:
        world = make_world(SQLALCHEMY_DATABASE_URI=proxy.url)
        runs = add_view(world, during=first_time(lambda: proxy.hold(COMPLETION)))
        first = background(world.post)
        proxy.wait_until_held()
        own_postgres.kill()
        proxy.let_go()
        assert_problem(first.result(), 503, "store-unavailable", retry=True)
        assert_problem(world.post(), 503, "store-unavailable", retry=True)
        own_postgres.start()
        assert world.count() == 0
        expect.retry_runs(world, runs)


@BOTH
def test_a_server_that_pauses_delays_the_response_and_nothing_else(
    make_world, own_postgres, own_database, background, add_view, gate, expect, store
):
    world = make_world(SQLALCHEMY_DATABASE_URI=own_database)
    runs = add_view(world, during=gate)
    first = background(world.post)
    gate.wait_until_reached()
    own_postgres.pause()
    try:
        gate.open()
        if store == "hybrid":  # refused by Redis, which does not wait for Postgres
            assert world.post().status_code == 409
        later = background(world.post, key="later")
        assert not first.done()
    finally:
        own_postgres.resume()
    assert first.result().status_code == 201
    assert later.result().status_code == 201
    assert runs == [1, 1]
    assert world.count() == 2
    assert world.post().headers["Idempotent-Replayed"] == "true"
    world.assert_clean()


def test_a_partition_that_tells_neither_side_ends_with_the_servers_timeout(
    make_world, postgres, background, add_view, gate, assert_problem, expect
):
    """The server hears nothing more of the first worker; another worker can reach it."""
    url = postgres.database(new_name())
    with servers.FaultProxy(url) as proxy:
        cut_off = make_world(
            SQLALCHEMY_DATABASE_URI=proxy.url, **settings(idle_in_transaction_session_timeout=500)
        )
        world = make_world(SQLALCHEMY_DATABASE_URI=url)
        runs, others = add_view(cut_off, during=gate), add_view(world)
        first = background(cut_off.post)
        gate.wait_until_reached()
        proxy.hang()
        assert world.post().status_code == 409
        expect.retry_runs(world, others, total=1)
        assert others == [2]
        gate.open()
        proxy.flow()
        assert_problem(first.result(), 503, "store-unavailable", retry=True)
        assert runs == [1]
        assert world.count() == 1
        cut_off.assert_clean()
