"""Threads of ours beside what an application hangs into its engine, its log and its signals.

The heartbeat, the background purge, the console's counts and observing must go on whatever these do.
"""

import logging
import threading
import time

import pytest
import sqlalchemy as sa
from flask import current_app, g, request

from flask_idempotency import current_operation, idempotent
from flask_idempotency.core.errors import StoreUnavailable
from flask_idempotency.stores.postgres.own_pool import OWN_CONNECTIONS
from flask_idempotency.stores.table import define_counts
from flask_idempotency.web.background.heartbeat import HEART
from flask_idempotency.web.background.purging import BackgroundPurge
from flask_idempotency.web.setup.state import app_state
from flask_idempotency.web.signals import operation_observed, store_failed
from tests.integration.commands.purging import FILL
from tests.waiting import PATIENCE_SECONDS, wait_until

LEFT = "select count(*) from idempotency_record where name = 'filled'"
LEASED = "select attempt from idempotency_record where lease_expires_at > clock_timestamp()"


@pytest.fixture
def store():
    return "postgres"


@pytest.fixture
def ask(databases):
    """Runs SQL past the listeners of the application."""
    engines = []

    def run(world, statement):
        if not engines:
            engines.append(sa.create_engine(world.app.config["SQLALCHEMY_DATABASE_URI"]))
        with engines[0].begin() as connection:
            result = connection.execute(sa.text(statement))
            return list(result) if result.returns_rows else []

    yield run
    for engine in engines:
        engine.dispose()


def on_connect(_driver, _record):
    assert current_app.config["SECRET_KEY"]  # as a listener that fetches a password


def on_checkout(driver, _record, _proxy):
    """As for row-level security."""
    with driver.cursor() as cursor:
        cursor.execute("select set_config('app.tenant', %s, false)", [g.account_id])
    driver.commit()


LISTENERS = {
    "check-outs": (("checkout", on_checkout),),
    "connections, too": (("checkout", on_checkout), ("connect", on_connect)),
}


@pytest.fixture(params=LISTENERS, name="listened")
def listened_(request, make_world):
    """Makes a world whose engine has listeners that need the application, or even a request."""

    def make(**config):
        options = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 5}
        if "connections" in request.param:
            options = {"pool_recycle": 0}  # each check-out is a new connection
        world = make_world(SECRET_KEY="secret", SQLALCHEMY_ENGINE_OPTIONS=options, **config)
        with world.app.app_context():
            engine = world.db.engine
        engine.dispose()
        for name, function in LISTENERS[request.param]:
            sa.event.listen(engine, name, function)
        return world

    return make


def add_leased(world, gate, **options):
    runs = []

    def charge():
        runs.append(current_operation.attempt)
        gate()
        return {"attempt": current_operation.attempt}, 201

    options = {"lease": 1, "heartbeat": True, "on_interrupted": "retry", **options}
    view = idempotent(atomic=False, **options)(charge)
    world.app.add_url_rule("/payments", "charge", view, methods=["POST"])
    return runs


def renewals(ask, world):
    """How long ago the lease began, in leases: more than two mean that it was renewed."""
    over = "select extract(epoch from clock_timestamp() - created_at) from idempotency_record"
    return ask(world, over)[0][0] > 2 and ask(world, LEASED)


def test_a_view_runs_once_at_a_time_beside_listeners_that_need_a_context(
    listened, ask, gate, background
):
    world = listened()
    runs = add_leased(world, gate)
    first = background(world.post)
    gate.wait_until_reached()
    wait_until(lambda: renewals(ask, world) or len(runs) > 1, "it is renewed, past two leases")
    assert world.post().status_code == 409
    gate.open()
    assert first.result().status_code == 201
    assert runs == [1]


def test_the_purge_deletes_beside_listeners_that_need_a_context(listened, ask):
    world = listened(IDEMPOTENCY_PURGE_INTERVAL=1)
    ask(world, FILL.format(20))
    world.app.add_url_rule("/payments", "pay", idempotent(lambda: ("", 201)), methods=["POST"])
    assert world.post().status_code == 201
    wait_until(lambda: ask(world, LEFT) == [(0,)], "what has expired is gone")
    app_state(world.app).purge.end(PATIENCE_SECONDS)


def test_the_counts_are_written_beside_listeners_that_need_a_context(listened, ask, monkeypatch):
    monkeypatch.setattr("flask_idempotency.console.rates.EVERY_SECONDS", 1)
    world = listened()
    world.app.register_blueprint(world.idempotency.console_blueprint(authorize=lambda: True))
    with sa.create_engine(world.app.config["SQLALCHEMY_DATABASE_URI"]).begin() as connection:
        define_counts(app_state(world.app).table).create(connection)
    world.app.add_url_rule("/payments", "pay", idempotent(lambda: ("", 201)), methods=["POST"])
    assert world.post().status_code == 201
    counted = "select sum(count) from idempotency_record_count"
    wait_until(lambda: ask(world, counted) == [(1,)], "it is counted")


def test_requests_are_observed_beside_listeners_that_need_a_context(listened, monkeypatch):
    monkeypatch.setattr("flask_idempotency.web.background.observer.PATIENCE_SECONDS", 10.0)
    world, heard = listened(IDEMPOTENCY_ENFORCE=False), []
    world.app.add_url_rule("/payments", "pay", idempotent(lambda: ("", 201)), methods=["POST"])
    note = lambda _app, event: heard.append(event.would)  # noqa: E731
    with operation_observed.connected_to(note, world.app):
        assert [world.post().status_code for _ in range(2)] == [201, 201]
    assert heard == ["executed", "replayed"]


def test_disposing_of_the_engine_closes_their_connections_too(make_world, ask):
    world = make_world(IDEMPOTENCY_ENFORCE=False)
    world.app.add_url_rule("/payments", "pay", idempotent(lambda: ("", 201)), methods=["POST"])
    there = "select count(*) from pg_stat_activity where datname = current_database()"

    def dispose():
        with world.app.app_context():
            world.db.engine.dispose()

    dispose()
    before = ask(world, there)
    for number in range(2):  # a later one opens its connections again
        assert world.post(key=f"key-{number}").status_code == 201
        assert ask(world, there) > before
        dispose()
        wait_until(lambda: ask(world, there) == before, "a database that could be dropped")


class Strict(logging.Filter):
    """An application's filter: it names the request, and is not meant for anything else."""

    def filter(self, record):
        record.path = request.path
        return True


@pytest.fixture
def strict():
    """The extension's logger with such a filter."""
    log, found = logging.getLogger("flask_idempotency"), Strict()
    log.addFilter(found)
    yield found
    log.removeFilter(found)


def lose(ask, world):
    """The database refuses every renewal of a lease for now."""
    ask(
        world,
        "create function refuse() returns trigger language plpgsql as"
        " $$ begin raise exception 'not now' using errcode = '53100'; end $$",
    )
    ask(
        world,
        "create trigger refuse before update of lease_expires_at on idempotency_record"
        " for each row execute function refuse()",
    )


@pytest.mark.usefixtures("strict")
def test_a_filter_of_the_log_that_raises_ends_no_heartbeat(world, ask, gate, background):
    add_leased(world, gate)
    first = background(world.post)
    gate.wait_until_reached()
    lose(ask, world)
    wait_until(lambda: not ask(world, LEASED), "it has run out, which the log is told")
    time.sleep(0.5)  # several renewals, of which one at least is told
    ask(world, "drop trigger refuse on idempotency_record")
    wait_until(lambda: ask(world, LEASED), "it is renewed again")
    gate.open()
    first.result()


def test_a_receiver_that_raises_ends_no_heartbeat(world, ask, gate, background):
    add_leased(world, gate)

    def fail(*_args, **_kwargs):
        raise RuntimeError("a receiver")

    with store_failed.connected_to(fail, world.app):
        first = background(world.post)
        gate.wait_until_reached()
        lose(ask, world)
        wait_until(lambda: not ask(world, LEASED), "it has run out, which the signal tells")
        ask(world, "drop trigger refuse on idempotency_record")
        wait_until(lambda: ask(world, LEASED), "it is renewed again")
        gate.open()
        assert first.result().status_code == 201


@pytest.mark.usefixtures("strict")
def test_a_filter_of_the_log_that_raises_ends_no_purge(world):
    rounds = []

    def purge(_batch):
        rounds.append(1)
        raise StoreUnavailable if len(rounds) % 2 else RuntimeError("a bug")

    purging = BackgroundPurge(world.app, purge, 0.01)
    purging.start()
    wait_until(lambda: len(rounds) > 3, "it goes on")
    purging.end(PATIENCE_SECONDS)
    assert purging._thread is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_was_ended_is_begun_again_by_the_next_operation(make_world, caplog):
    world = make_world(IDEMPOTENCY_PURGE_INTERVAL=3600)
    world.app.add_url_rule("/payments", "pay", idempotent(lambda: ("", 201)), methods=["POST"])
    purge = app_state(world.app).purge

    def end(_seconds):
        raise SystemExit

    def said():
        return [each for each in caplog.records if "idempotency-purge has ended" in each.getMessage()]

    purge.rest = end
    for times in 1, 2:
        assert world.post().status_code == 201
        wait_until(lambda times=times: len(said()) == times, "it has ended, and that is said")
        assert {each.levelname for each in said()} == {"WARNING"}
    del purge.rest
    assert world.post().status_code == 201
    assert purge._thread.is_alive()
    purge.end(PATIENCE_SECONDS)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_heartbeat_that_was_ended_is_begun_again_by_the_next_operation(world, gate, ask, background):
    class Fatal(logging.Filter):
        def filter(self, _record):
            raise SystemExit

    log, fatal = logging.getLogger("flask_idempotency"), Fatal()
    add_leased(world, gate, lease=2)
    first = background(world.post)
    gate.wait_until_reached()
    log.addFilter(fatal)
    try:
        lose(ask, world)
        wait_until(lambda: HEART._thread is None, "it has ended")
    finally:
        log.removeFilter(fatal)
    ask(world, "drop trigger refuse on idempotency_record")
    second = background(lambda: world.post(key="key-2"))
    wait_until(lambda: len(ask(world, LEASED)) == 2, "both are renewed")
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 3, "longer than a lease")
    assert len(ask(world, LEASED)) == 2
    gate.open()
    assert [first.result().status_code, second.result().status_code] == [201, 201]


def test_what_the_context_tears_down_is_no_failure_of_a_renewal(world, gate, ask, background):
    @world.app.teardown_appcontext
    def close(_error):
        if threading.current_thread().name == "idempotency-heartbeat":
            raise AttributeError("g has no connection")

    runs = add_leased(world, gate)
    first = background(world.post)
    gate.wait_until_reached()
    wait_until(lambda: renewals(ask, world) or len(runs) > 1, "it is renewed, past two leases")
    gate.open()
    assert first.result().status_code == 201
    world.app.teardown_appcontext_funcs.remove(close)


def only_requests_connect(world):
    """New connections are for requests alone, from now on."""

    def connected(_driver, _record):
        assert request.path

    with world.app.app_context():
        sa.event.listen(world.db.engine, "connect", connected)


def test_nothing_runs_where_the_heartbeat_could_not_renew(world, gate, caplog):
    runs = add_leased(world, gate, on_interrupted="hold")
    only_requests_connect(world)
    response = world.post()
    assert response.status_code == 503
    assert "cannot be renewed" in response.text
    assert runs == []
    assert "its lease cannot be renewed, and runs out in " in caplog.text
    assert "RuntimeError(" in caplog.text
    with world.app.app_context():
        records = app_state(world.app).own_engine
        world.db.engine.pool.dispatch.connect.clear()
    records.dispose()
    gate.open()
    assert world.post().status_code == 201
    assert runs == [2], "it was given back"


@pytest.mark.parametrize("what", ["step", "extend"])
def test_no_effect_begins_under_a_lease_that_cannot_be_kept(world, ask, background, caplog, what):
    """The heartbeat fails, and the next step is told before its function runs."""
    begun, go_on, effects = threading.Event(), threading.Event(), []

    def charge():
        begun.set()
        assert go_on.wait(PATIENCE_SECONDS)
        if what == "extend":
            current_operation.extend(100)
        current_operation.step("pay", lambda: effects.append(1))
        return "", 201

    options = {"atomic": False, "lease": 2, "heartbeat": True, "on_interrupted": "retry"}
    view = idempotent(**options)(charge)
    world.app.add_url_rule("/payments", "charge", view, methods=["POST"])
    first = background(world.post)
    assert begun.wait(PATIENCE_SECONDS)
    own = app_state(world.app).own_engine
    lent = [own.connect() for _ in range(OWN_CONNECTIONS)]  # so a renewal has none; a request has
    wait_until(lambda: "its lease cannot be renewed, and runs out in" in caplog.text, "it warns")
    (line,) = [each for each in caplog.records if "cannot be renewed, and" in each.getMessage()]
    assert (line.levelname, line.operation, line.attempt) == ("WARNING", "charge", 1)
    go_on.set()
    assert first.result().status_code == 503
    assert effects == []
    for connection in lent:
        connection.close()
    assert world.post().status_code == 201
    assert effects == [1]


def test_a_step_goes_on_once_the_heartbeat_works_again(world, background, caplog):
    begun, go_on = threading.Event(), threading.Event()

    def charge():
        begun.set()
        assert go_on.wait(PATIENCE_SECONDS)
        return {"paid": current_operation.step("pay", lambda: 5)}, 201

    view = idempotent(atomic=False, lease=30, heartbeat=True)(charge)
    world.app.add_url_rule("/payments", "charge", view, methods=["POST"])
    first = background(world.post)
    assert begun.wait(PATIENCE_SECONDS)
    own = app_state(world.app).own_engine
    lent = [own.connect() for _ in range(OWN_CONNECTIONS)]
    (beat,) = HEART._beats
    beat.due = 0
    HEART.begin()
    wait_until(lambda: "cannot be renewed, and runs out in" in caplog.text, "it fails")
    for connection in lent:
        connection.close()
    go_on.set()
    assert first.result().status_code == 201
