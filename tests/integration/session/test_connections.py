"""The view's connection and its cursors: before the view, in it, and how it comes back to the pool."""

from __future__ import annotations

import io

import psycopg
import psycopg2.extras
import pytest
import sqlalchemy as sa
from flask import g, request

from flask_idempotency import NotAtomic
from tests.drivers import PSYCOPG, has_own_cursors, ways
from tests.integration.views import pay_once, protect

ONE_CONNECTION = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 2}
SEEN = """select current_setting('app.tenant', true) as tenant, current_user as role,
  current_setting('search_path') as path"""
LOCAL = "set local app.tenant = '7'"


class Logging(psycopg2.extras.LoggingConnection):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.initialize(io.StringIO())


def shop(make_world, before, connect_args=None):
    """An application whose requests begin with a cursor, and two views that say what they see."""
    options = {"connect_args": connect_args or {}, **ONE_CONNECTION}
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=options)
    world.app.testing = True

    @world.app.before_request
    def use_a_cursor():
        with world.db.session.connection().connection.cursor() as cursor:
            cursor.execute(before() if callable(before) else before)

    def see():
        return list(world.db.session.execute(sa.text(SEEN)).one())

    world.app.add_url_rule("/plain", "plain", see, methods=["POST"])
    protect(world, see)
    return world


@ways(
    "connect_args",
    {"plain": {}},
    psycopg2={
        "a cursor class": {"cursor_factory": psycopg2.extras.NamedTupleCursor},
        "a connection class": {"connection_factory": Logging},
    },
    psycopg={
        "a cursor class": {"cursor_factory": psycopg.ClientCursor},
        "named tuples": {"row_factory": psycopg.rows.namedtuple_row},
    },
)
@pytest.mark.parametrize(
    "statement", [LOCAL, "set local role pg_monitor", "set local search_path = pg_temp, public"]
)
def test_a_setting_made_with_a_cursor_reaches_the_view(make_world, statement, connect_args):
    world = shop(make_world, statement, connect_args)
    plain = world.post("/plain").json
    assert world.post().json == plain != list(world.sql(SEEN)[0])


def test_a_setting_does_not_outlive_its_request(make_world):
    world = shop(make_world, lambda: LOCAL if request.headers["Idempotency-Key"] == "1" else "select 1")
    for path in ("/plain", "/payments"):
        assert [world.post(path, key=key).json[0] or None for key in ("1", "2")] == ["7", None]


def test_a_transaction_that_was_made_read_only_is_refused_by_name(make_world):
    world = shop(make_world, "set transaction read only")
    assert world.post("/plain").status_code == 200
    with pytest.raises(NotAtomic, match="READ ONLY"):
        world.post()


def test_a_migration_behind_the_claim_leaves_the_transaction_to_the_application(make_world):
    """It has the records' table when the row is to be locked: a 503, and nothing is undone."""
    world, locked = shop(make_world, LOCAL), []

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


@pytest.mark.parametrize("status", [201, 500])
def test_a_connection_comes_back_as_it_went_and_its_savepoints_work(make_world, status):
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=ONE_CONNECTION)
    session, add = world.db.session, lambda amount: session.add(world.Payment(amount=amount))

    def pay():
        pay_once(world)
        list(session.execute(sa.select(world.Payment.id).execution_options(yield_per=5)))
        session.begin_nested()
        return {}, status

    protect(world, pay)
    assert world.post().status_code == status
    with world.app.app_context():
        driver = session.execute(sa.text("select 1")).cursor.connection
        assert not driver.autocommit
        assert has_own_cursors(driver)
        add(2)
        with session.begin_nested() as savepoint:
            add(3)
            session.flush()
            savepoint.rollback()
        session.commit()
        add(4)
        session.flush()
        session.rollback()
    assert world.sql("select amount from payment where amount > 1") == [(2,)]


NOTE = "select current_setting('synchronous_commit')"


def note_commits(world, when):
    """Note how each write of a record waits for the disk."""
    world.sql("create table commits (how text)")
    world.sql(
        "create function note() returns trigger language plpgsql as $$"
        f" begin insert into commits {NOTE}; return null; end $$"
    )
    world.sql(f"create {when} for each row execute function note()")


def test_a_server_that_commits_asynchronously_does_not_do_so_with_a_response(world):
    database = world.sql("select current_database()")[0][0]
    world.sql(f"alter database {database} set synchronous_commit = off")
    with world.app.app_context():
        world.db.engine.dispose()
    deferred = "on idempotency_record deferrable initially deferred"
    note_commits(world, f"constraint trigger note after update {deferred}")
    protect(world, list)
    assert world.post().status_code == 200
    assert world.sql("select how from commits") == [("on",)]
    assert world.sql(NOTE) == [("off",)]


@pytest.mark.parametrize(
    ("options", "reads", "waits"),
    [({}, False, "off"), ({}, True, "off"), ({"atomic": False}, False, "on")],
    ids=["on a connection of its own", "in the session's transaction", "with a lease"],
)
def test_only_a_claim_that_is_all_there_is_waits_for_the_disk(world, options, reads, waits):
    """That of an atomic operation is lost only together with what the view commits after it."""
    note_commits(world, "trigger note after insert on idempotency_record")
    if reads:
        world.app.before_request(lambda: world.db.session.execute(sa.text("select 1")) and None)
    protect(world, list, **options)
    assert world.post().status_code == 200
    assert world.sql("select how from commits") == [(waits,)]


@PSYCOPG
def test_a_cursor_made_past_the_session_is_in_its_unit(world):
    def pay():
        pay_once(world)
        raw = world.db.session.execute(sa.text("select 1")).cursor.connection
        raw.cursor().execute("insert into payment (amount) values (2)")
        raw.execute("insert into payment (amount) values (3)")
        world.db.session.rollback()
        return {}, 201

    protect(world, pay)
    assert world.post().status_code == 201
    assert world.sql("select amount from payment") == [(1,)]
