"""What an application does with the driver's own cursors before the view reaches it, or is refused."""

from __future__ import annotations

import io

import psycopg
import pytest
import sqlalchemy as sa
from flask import g, request
from psycopg2.extras import LoggingConnection, NamedTupleCursor

from flask_idempotency import NotAtomic, idempotent
from tests.drivers import has_own_cursors, own_cursor, ways

SEEN = """select current_setting('app.tenant', true) as tenant, current_user as role,
  current_setting('search_path') as path, current_setting('lock_timeout') as timeout"""

LOCAL = "set local app.tenant = '7'"


ONE_CONNECTION = {"pool_size": 1, "max_overflow": 0}


class Logging(LoggingConnection):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.initialize(io.StringIO())


def execute(*arguments):
    return lambda cursor: cursor.execute(*arguments)


SETTINGS = {
    "set local": execute(LOCAL),
    "set": execute("set app.tenant = '7'"),
    "role": execute("set local role pg_monitor"),
    "role for the connection": execute("set role pg_monitor"),
    "search path": execute("set local search_path = pg_temp, public"),
}


def shop(make_world, set_up, connect_args=None):
    """An application whose requests begin with ``set_up``, and two views that say what they see."""
    options = {"connect_args": connect_args or {}, **ONE_CONNECTION}
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=options)
    world.app.testing = True

    @world.app.before_request
    def before():
        raw = world.db.session.connection().connection
        with raw.cursor() as cursor:
            set_up(cursor)

    def see():
        return list(world.db.session.execute(sa.text(SEEN)).one())

    world.app.add_url_rule("/plain", "plain", see, methods=["POST"])
    world.app.add_url_rule("/payments", "pay", idempotent(see), methods=["POST"])
    return world


@pytest.mark.parametrize("set_up", SETTINGS.values(), ids=SETTINGS)
def test_a_setting_made_with_a_cursor_reaches_the_view(make_world, set_up):
    world = shop(make_world, set_up)
    plain = world.post("/plain").json
    assert world.post().json == plain
    unset = world.sql(SEEN)[0]
    assert plain != list(unset)


@ways(
    "connect_args",
    {"plain": {}},
    psycopg2={
        "a cursor class": {"cursor_factory": NamedTupleCursor},
        "a connection class": {"connection_factory": Logging},
    },
    psycopg={
        "a cursor class": {"cursor_factory": psycopg.ClientCursor},
        "named tuples": {"row_factory": psycopg.rows.namedtuple_row},
    },
)
def test_also_on_an_engine_with_classes_of_its_own(make_world, connect_args):
    world = shop(make_world, SETTINGS["set local"], connect_args)
    plain = world.post("/plain").json
    assert plain[0] == "7"
    assert world.post().json == plain


def test_a_setting_does_not_outlive_its_request(make_world):
    def set_once(cursor):
        if request.headers["Idempotency-Key"] == "first":
            cursor.execute(LOCAL)

    world = shop(make_world, set_once)
    for path in ("/plain", "/payments"):
        assert [world.post(path, key=key).json[0] or None for key in ("first", "second")] == ["7", None]


def test_a_transaction_that_was_made_read_only_is_refused_by_name(make_world):
    world = shop(make_world, execute("set transaction read only"))
    assert world.post("/plain").status_code == 200
    with pytest.raises(NotAtomic, match="READ ONLY"):
        world.post()


def test_a_migration_behind_the_claim_leaves_the_transaction_to_the_application(make_world):
    """It has the records' table when the row is to be locked: a 503, and nothing is undone."""
    world, locked = shop(make_world, execute(LOCAL)), []

    def migrate(*_connection):
        if g.get("meets_migration") and not locked:
            locked.append(migration.connect())
            locked[0].execute(sa.text("lock table idempotency_record in access exclusive mode"))

    @world.app.after_request
    def after(response):
        response.headers["X-Set"] = world.db.session.scalar(sa.text(SEEN)) or "gone"
        return response

    @world.app.before_request
    def note():
        g.meets_migration = request.headers["Idempotency-Key"] == "key-2"

    with world.app.app_context():
        migration = sa.create_engine(world.db.engine.url, poolclass=sa.NullPool)
        sa.event.listen(world.db.engine, "checkin", migrate)  # of the claim's connection
    world.post()
    answer = world.post(key="key-2")
    locked[0].close()
    assert (answer.status_code, answer.headers["X-Set"]) == (503, "7")


def test_the_application_has_its_own_cursors_in_the_view_and_after_it(make_world):
    world = shop(make_world, execute(LOCAL))
    seen = []

    @world.app.after_request
    def after(response):
        world.db.session.rollback()
        driver = world.db.session.connection().connection.driver_connection
        seen.append(has_own_cursors(driver))
        return response

    world.post()
    assert seen == [True]
    with world.app.app_context(), world.db.engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert has_own_cursors(driver)
        assert type(driver.cursor()) is type(own_cursor(driver))
