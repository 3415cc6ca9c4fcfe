"""Whatever becomes of the database that observing asks, requests and their views notice nothing."""

import os
import threading
import time
import warnings
from contextlib import closing, suppress

import psycopg2
import pytest
import sqlalchemy as sa
from flask import Flask, request

from flask_idempotency import ConfigurationError, idempotent
from flask_idempotency.core.errors import StoreUnavailable
from flask_idempotency.web.background import observer
from flask_idempotency.web.background.observer import CONNECTIONS, PAUSE_SECONDS, Observer
from flask_idempotency.web.setup.state import app_state
from servers.proxy import FaultProxy
from tests.waiting import wait_until
from tests.web.observed.heard import of, only

PATIENCE_SECONDS = 0.5
"""As without the fixture of this folder."""

pytestmark = pytest.mark.parametrize("store", ["postgres"], indirect=True)

AT_MOST = 2 * PATIENCE_SECONDS + 0.5
"""Seconds that a request may take beside a silent database: half a second is for a busy machine."""


@pytest.fixture
def proxy(databases):
    url = databases.take(tables=True)
    with FaultProxy(url) as proxy:
        yield proxy
    databases.give_back(url)


@pytest.fixture
def world(make_world, proxy):
    proxy.accept()
    world = make_world(IDEMPOTENCY_ENFORCE=False, SQLALCHEMY_DATABASE_URI=proxy.url)
    world.app.add_url_rule("/payments", "pay", idempotent(lambda: ("", 201)), methods=["POST"])
    return world


@pytest.fixture
def impatient(world, monkeypatch):
    """Requests wait no longer than in an application, from the second on."""
    world.post(key="key-0")
    monkeypatch.setattr(observer, "PATIENCE_SECONDS", PATIENCE_SECONDS)


def failures(heard):
    return [event.error for name, event in heard if name == "store_failed"]


def timed(world, **kwargs):
    began = time.monotonic()
    assert world.post(**kwargs).status_code == 201
    return time.monotonic() - began


@pytest.mark.parametrize("fault", ["refuse", "hang", "vanish", "cut"])
@pytest.mark.usefixtures("impatient")
def test_a_server_that_is_away_delays_one_request_for_a_moment(world, heard, proxy, caplog, fault):
    getattr(proxy, fault)()
    if fault == "refuse":
        proxy.cut()
    heard.clear()
    assert timed(world, key="key-2") < AT_MOST
    if fault == "cut":  # a new connection was there at once
        assert only(heard).would == "executed"
        return
    assert only(heard).would == "unknown"
    assert len(failures(heard)) == 1
    (line,) = [each for each in caplog.records if "nothing is observed for 10 s" in each.getMessage()]
    assert line.operation == "pay"
    assert line.id == only(heard).id is not None
    connections = proxy.connections
    world.post(key="key-3")
    assert [event.would for event in of(heard)] == ["unknown", "unknown"]
    assert (proxy.connections, len(failures(heard))) == (connections, 1)
    proxy.flow()
    proxy.accept()


def test_it_is_asked_again_after_a_pause(world, heard, proxy, monkeypatch):
    proxy.refuse()
    world.post()
    proxy.accept()
    world.post()
    monkeypatch.setattr(app_state(world.app).observer, "_paused_until", time.monotonic())
    world.post()
    world.post(key="key-2")
    assert [event.would for event in of(heard)] == ["unknown", "unknown", "executed", "executed"]


@pytest.mark.usefixtures("impatient")
def test_a_server_that_goes_away_during_the_view_is_told_of_at_its_end(world, heard, proxy):
    def lose_it():
        request.get_data()  # from now on it is observed
        proxy.hang()
        return "", 201

    world.app.view_functions["pay"] = idempotent(lose_it)
    heard.clear()
    assert world.post(key="key-2").status_code == 201
    proxy.flow()
    assert only(heard).would == "executed"
    assert len(failures(heard)) == 1


@pytest.mark.usefixtures("impatient")
def test_a_claim_that_comes_too_late_is_given_back(world, heard, proxy):
    proxy.hang()
    world.post(key="key-2")
    proxy.flow()
    wait_until(
        lambda: world.sql("select 1 from idempotency_record where state = 'in_progress'"
                          " and lease_expires_at is null"), "the claim is given back"
    )  # fmt: skip
    heard.clear()
    world.post(key="key-2")
    assert only(heard).would == "executed"


def test_a_table_that_is_missing_is_named_and_does_not_matter(world, heard, caplog):
    world.sql("drop table idempotency_record")
    assert world.post().status_code == 201
    assert only(heard).would == "unknown"
    assert "create-table" in caplog.text


@pytest.mark.usefixtures("impatient")
def test_a_table_that_somebody_has_locked_delays_a_request_for_a_moment(world, heard):
    with world.app.app_context(), world.db.engine.begin() as connection:
        connection.execute(sa.text("lock table idempotency_record in access exclusive mode"))
        heard.clear()
        assert timed(world) < AT_MOST
    assert only(heard).would == "unknown"


def test_a_new_connection_is_made_ready_as_the_applications_are(world, heard):
    def connected(driver, _record):
        with driver.cursor() as cursor:
            cursor.execute("set search_path to elsewhere")
        driver.commit()

    world.sql("create schema elsewhere")
    world.sql("alter table idempotency_record set schema elsewhere")
    world.sql("alter table idempotency_record_step set schema elsewhere")
    with world.app.app_context():
        sa.event.listen(world.db.engine, "connect", connected)
    world.post()
    assert only(heard).would == "executed"
    with world.app.app_context():
        world.db.engine.dispose()
    assert world.sql("select count(*) from elsewhere.idempotency_record") == [(1,)]


def test_a_listener_on_every_pool_is_told_of_a_new_connection_once(world, heard):
    told = []

    def connected(driver, _record):
        told.append(driver)

    sa.event.listen(sa.Pool, "connect", connected)
    try:
        world.post()
    finally:
        sa.event.remove(sa.Pool, "connect", connected)
    assert only(heard).would == "executed"
    assert len(told) == len(set(told)) == 1


def test_a_forked_process_leaves_the_connections_to_its_parent(world, heard):
    world.post()
    engine = app_state(world.app).own_engine
    before = engine.pool
    assert before.checkedin()
    with warnings.catch_warnings():
        # A thread that has asked may be about to end.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        with suppress(BaseException):
            world.post()
            assert engine.pool is not before
            assert [event.would for event in of(heard)] == ["executed", "replayed"]
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    world.post()
    assert [event.would for event in of(heard)] == ["executed", "replayed"]


def test_nothing_is_taken_from_the_pool_of_the_application(world, heard):
    taken = []
    with world.app.app_context():
        sa.event.listen(world.db.engine, "checkout", lambda *_: taken.append(1))
    world.post()
    world.post()
    assert [event.would for event in of(heard)] == ["executed", "replayed"]
    assert taken == []


def test_a_full_pool_of_the_application_does_not_matter(make_world, heard):
    options = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 0.1}
    world = make_world(IDEMPOTENCY_ENFORCE=False, SQLALCHEMY_ENGINE_OPTIONS=options)
    world.app.add_url_rule("/payments", "pay", idempotent(lambda: ("", 201)), methods=["POST"])
    with world.app.app_context(), world.db.engine.connect():
        world.post()
    assert only(heard).would == "executed"


def test_of_duplicates_at_one_time_one_would_have_run(make_world, heard, background):
    world = make_world(IDEMPOTENCY_ENFORCE=False)
    together = threading.Barrier(4)

    def view():
        request.get_data()
        together.wait(10)
        return "", 201

    world.app.add_url_rule("/payments", "pay", idempotent(view), methods=["POST"])
    for sent in [background(world.post) for _ in range(4)]:
        assert sent.result().status_code == 201
    assert sorted((event.would, event.problem) for event in of(heard)) == [
        ("executed", None), *[("rejected", "request-in-progress")] * 3,
    ]  # fmt: skip


def test_a_process_asks_a_few_questions_at_once_and_no_more(monkeypatch, background, store):
    monkeypatch.setattr(observer, "PATIENCE_SECONDS", 0.05)
    go_on, asked = threading.Event(), []
    observer_ = Observer(Flask(__name__), None, time)

    def act():
        asked.append(1)
        go_on.wait(10)

    for _ in range(CONNECTIONS + 2):
        observer_._paused_until = None
        with pytest.raises(StoreUnavailable):
            observer_.ask(act)
    assert len(asked) == CONNECTIONS
    go_on.set()


def test_a_process_that_can_start_no_thread_asks_again_when_it_can(monkeypatch, store):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    observer_ = Observer(Flask(__name__), None, time)
    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", refuse)
        for _ in range(CONNECTIONS):
            observer_._paused_until = None
            with pytest.raises(RuntimeError):
                observer_.ask(lambda: "there")
    observer_._paused_until = None
    assert observer_.ask(lambda: "there") == "there"


def test_a_pause_lets_one_request_try(store):
    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now

    clock = Clock()
    asked = Observer(Flask(__name__), None, clock)

    def fail():
        raise ConnectionError

    def fail_after_others():
        assert asked.ask(fail) is None
        raise ConnectionError

    with pytest.raises(ConnectionError):
        asked.ask(fail)
    clock.now = PAUSE_SECONDS - 0.1
    assert asked.ask(lambda: "there") is None
    clock.now = PAUSE_SECONDS + 0.1
    with pytest.raises(ConnectionError):
        asked.ask(fail_after_others)
    clock.now = 2 * PAUSE_SECONDS
    assert asked.ask(lambda: "there") is None
    clock.now = 2 * PAUSE_SECONDS + 0.2
    assert asked.ask(lambda: "there") == asked.ask(lambda: "there") == "there"


def test_of_requests_that_fail_together_one_tells(background, store):
    observer_, together = Observer(Flask(__name__), None, time), threading.Barrier(CONNECTIONS)

    def fail():
        together.wait(10)
        raise ConnectionError

    def outcome():
        try:
            return observer_.ask(fail)
        except ConnectionError as error:
            return error

    outcomes = [sent.result() for sent in [background(outcome) for _ in range(CONNECTIONS)]]
    assert sum(isinstance(each, ConnectionError) for each in outcomes) == 1
    assert outcomes.count(None) == CONNECTIONS - 1


def test_sqlite_and_a_store_of_ones_own_are_refused_by_name(make_world, tmp_path, store):
    with pytest.raises(ConfigurationError, match="IDEMPOTENCY_ENFORCE is False, which works with"):
        make_world(
            IDEMPOTENCY_ENFORCE=False,
            IDEMPOTENCY_STORE="sql",
            SQLALCHEMY_DATABASE_URI=f"sqlite:///{tmp_path}/shop.db",
        )


def test_a_database_can_be_dropped_once_its_engine_is_disposed(make_world, postgres, heard):
    """As a suite's teardown does. PostgreSQL refuses while anybody is connected."""
    url = postgres.database("dropped")
    world = make_world(IDEMPOTENCY_ENFORCE=False, SQLALCHEMY_DATABASE_URI=url)
    world.app.add_url_rule("/payments", "pay", idempotent(lambda: ("", 201)), methods=["POST"])
    for _ in range(2):
        world.post()
        assert app_state(world.app).own_engine.pool.checkedin()
        with world.app.app_context():
            world.db.engine.dispose()
    assert [event.would for event in of(heard)] == ["executed", "replayed"]
    with closing(psycopg2.connect(postgres.dsn)) as connection:
        connection.autocommit = True
        connection.cursor().execute(f"drop database {sa.make_url(url).database}")
