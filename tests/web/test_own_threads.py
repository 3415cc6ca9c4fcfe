"""Threads of ours beside what an application hangs into its engine, its log and its signals.

Observing must go on whatever these do.
"""

import pytest
import sqlalchemy as sa
from flask import current_app, g

from flask_idempotency import idempotent
from flask_idempotency.web.signals import operation_observed
from tests.waiting import wait_until


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


@pytest.mark.usefixtures("patient_observing")
def test_requests_are_observed_beside_listeners_that_need_a_context(listened):
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
