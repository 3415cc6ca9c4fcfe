"""A leader that was frozen and replaced comes back, and still takes writes for a moment."""

from __future__ import annotations

import gc
import threading
import time
from contextlib import closing

import psycopg2
import psycopg2.extras
import pytest
import sqlalchemy as sa

import servers
from flask_idempotency.stores.postgres import leadership
from tests.drivers import EACH
from tests.integration.postgres_faults.faults import first_time, new_name
from tests.stores import BOTH

pytestmark = [EACH, BOTH]

SILENCE = 0.5  # seconds


@pytest.fixture(scope="module")
def other(own_postgres):
    """A second server with the same password, as a replica has."""
    server = servers.Postgres(fsync=False)
    server.password = own_postgres.password
    with server:
        yield server


@pytest.fixture
def read_only(other):
    """A function that says whether the other server takes no writes; in the end it takes them."""

    def is_read_only(value: str) -> None:
        connection = psycopg2.connect(other.dsn)
        connection.autocommit = True
        with closing(connection), connection.cursor() as cursor:
            cursor.execute(f"ALTER SYSTEM SET default_transaction_read_only = {value}")
            cursor.execute("SELECT pg_reload_conf()")

    yield is_read_only
    is_read_only("off")


@pytest.fixture
def promote(read_only):
    """A function that lets the other server take writes, as well."""
    return lambda: read_only("off")


@pytest.fixture
def world(request, make_world, own_postgres, other, read_only, monkeypatch):
    """An application whose URL names two servers, of which the first leads."""
    own_postgres.start()
    monkeypatch.setattr(leadership, "SILENCE_SECONDS", SILENCE)
    name = new_name()
    places = [own_postgres.database(name), other.database(name)]
    world = make_world(SQLALCHEMY_DATABASE_URI=naming(places), **getattr(request, "param", {}))
    on_other = sa.create_engine(places[1])
    world.db.metadata.create_all(on_other)
    on_other.dispose()
    read_only("on")
    return world


def naming(places: list[str]) -> str:
    """The URL of a database that is on several servers, or that several proxies lead to."""
    urls = [sa.make_url(place) for place in places]
    query = {"host": [f"{url.host}:{url.port}" for url in urls], "target_session_attrs": "read-write"}
    several = urls[0].set(host=None, port=None).update_query_dict(query)
    return several.render_as_string(hide_password=False)


@pytest.fixture
def freeze(own_postgres, promote):
    """A function that freezes the leader until another has taken over, and some time more."""
    timers = []

    def happen() -> None:
        own_postgres.pause()
        promote()
        timers.append(threading.Timer(2 * SILENCE, own_postgres.resume))
        timers[0].start()

    yield happen
    for timer in timers:
        timer.join()


def test_what_was_under_way_when_it_froze_is_not_acknowledged(
    world, own_postgres, freeze, add_view, assert_problem
):
    runs = add_view(world, during=first_time(freeze))
    problem = assert_problem(world.post(), 503, "store-unavailable", retry=True)
    assert "two servers took writes" in problem["detail"]
    own_postgres.stop()  # its agent has noticed
    assert world.post().status_code == 201
    assert len(runs) == 2


def test_what_it_has_stored_is_not_replayed(world, promote, add_view, assert_problem):
    add_view(world)
    assert world.post().status_code == 201
    time.sleep(SILENCE)  # nothing was asked of it
    promote()
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    assert_problem(world.post(), 503, "store-unavailable", retry=True)


@pytest.mark.parametrize("world", [{"IDEMPOTENCY_ON_STORE_ERROR": "allow"}], indirect=True)
def test_a_view_is_not_let_go_unprotected_to_a_server_that_may_lead_no_longer(
    world, promote, add_view, assert_problem
):
    runs = add_view(world)
    assert world.post().status_code == 201
    time.sleep(SILENCE)
    promote()
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    assert len(runs) == 1


def test_no_connection_stays_open_behind_the_pool(world, own_postgres, promote, add_view, background):
    """Each request finds another pool, as the one before has given up on its own."""
    add_view(world)
    assert world.post().status_code == 201
    time.sleep(SILENCE)
    promote()
    gc.disable()
    try:
        posts = [background(world.post, key=f"key-{number}") for number in range(24)]
        assert {post.result().status_code for post in posts} == {503}
        with world.app.app_context():
            world.db.engine.dispose()
        with closing(psycopg2.connect(own_postgres.dsn)) as connection, connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = %s",
                [sa.make_url(world.app.config["SQLALCHEMY_DATABASE_URI"]).database],
            )
            assert cursor.fetchone() == (0,)
    finally:
        gc.enable()


def test_one_that_takes_writes_and_does_not_say_who_it_is_may_be_another(
    make_world, own_postgres, other, add_view, assert_problem, monkeypatch
):
    own_postgres.start()
    monkeypatch.setattr(leadership, "SILENCE_SECONDS", 0)
    name = new_name()
    with servers.FaultProxy(other.database(name)) as proxy:
        world = make_world(SQLALCHEMY_DATABASE_URI=naming([own_postgres.database(name), proxy.url]))
        runs = add_view(world)
        proxy.hold(b"pg_postmaster_start_time")
        assert_problem(world.post(), 503, "store-unavailable", retry=True)
        proxy.cut()
    assert runs == []


def test_a_silent_host_does_not_hide_the_one_behind_it(
    make_world, own_postgres, other, add_view, assert_problem, monkeypatch
):
    own_postgres.start()
    monkeypatch.setattr(leadership, "SILENCE_SECONDS", 0)
    name = new_name()
    places = [each.database(name) for each in (own_postgres, other)]
    with servers.FaultProxy(places[1]) as silent:
        silent.hang()
        world = make_world(SQLALCHEMY_DATABASE_URI=naming([places[0], silent.url, places[1]]))
        add_view(world)
        psycopg2.extensions.set_wait_callback(psycopg2.extras.wait_select)
        try:
            assert_problem(world.post(), 503, "store-unavailable", retry=True)
        finally:
            psycopg2.extensions.set_wait_callback(None)
            silent.cut()


def test_a_silent_host_is_not_waited_for_where_libpq_has_no_time_out(world, other, add_view):
    add_view(world)
    assert world.post().status_code == 201
    time.sleep(SILENCE)
    other.pause()
    psycopg2.extensions.set_wait_callback(psycopg2.extras.wait_select)
    began = time.monotonic()
    try:
        assert world.post(key="another").status_code == 201
        assert time.monotonic() - began < 10  # it is asked at the claim and at the end
    finally:
        psycopg2.extensions.set_wait_callback(None)
        other.resume()


def test_silence_alone_is_no_reason(world, add_view, assert_replayed):
    add_view(world, during=lambda: time.sleep(SILENCE))
    first = world.post()
    assert first.status_code == 201
    time.sleep(SILENCE)
    assert_replayed(first, world.post())


def test_two_ways_to_one_server_are_one_leader(make_world, own_postgres, add_view, monkeypatch):
    own_postgres.start()
    monkeypatch.setattr(leadership, "SILENCE_SECONDS", 0)
    place = own_postgres.database(new_name())
    with servers.FaultProxy(place) as one, servers.FaultProxy(place) as two:
        world = make_world(SQLALCHEMY_DATABASE_URI=naming([one.url, two.url]))
        add_view(world)
        assert world.post().status_code == 201
        assert two.connections > 0


def test_the_others_are_not_asked_while_it_answers(make_world, own_postgres, add_view):
    own_postgres.start()
    place = own_postgres.database(new_name())
    with servers.FaultProxy(place) as one, servers.FaultProxy(place) as two:
        world = make_world(SQLALCHEMY_DATABASE_URI=naming([one.url, two.url]))
        add_view(world)
        world.post(key="first")
        asked = two.connections
        for number in range(5):
            assert world.post(key=f"key-{number}").status_code == 201
        assert two.connections == asked == 1
