"""Engines, pools and binds: which the session joins, and which are refused."""

from __future__ import annotations

import io
import re
from contextlib import closing

import psycopg
import pytest
import sqlalchemy as sa
from flask import Flask, current_app
from flask_sqlalchemy import SQLAlchemy
from flask_sqlalchemy.session import Session
from psycopg2 import sql
from psycopg2.extras import execute_values
from sqlalchemy.ext.horizontal_shard import ShardedSession
from sqlalchemy.sql.dml import UpdateBase

from flask_idempotency import ConfigurationError, Idempotency, NotAtomic, current_operation, idempotent
from tests.drivers import has_own_cursors, ways
from tests.integration.views import pay_once, protect
from tests.sessions import factory_of

SEVERAL_ENGINES = pytest.mark.usefixtures("several_engines")


def test_a_pool_with_one_connection_for_all_is_refused(postgres, store):
    app, db = Flask("shop"), SQLAlchemy(engine_options={"poolclass": sa.pool.StaticPool})
    app.config["SQLALCHEMY_DATABASE_URI"] = postgres.database("static_pool")
    db.init_app(app)
    with pytest.raises(ConfigurationError, match="StaticPool"):
        Idempotency().init_app(app, db, scope=None)


def sharded_shop(postgres, **options):
    """Rows go to one of two databases, by their amount; the records are in the first one."""

    class Sharded(ShardedSession):
        def __init__(self, db, **options):
            engines = {"even": db.engine, "odd": db.engines["odd"]}
            super().__init__(shards=engines, **options)

    app, db = (
        Flask("shop"),
        SQLAlchemy(
            session_options={
                "class_": Sharded,
                "shard_chooser": lambda _mapper, row, _clause=None: ("even", "odd")[row.amount % 2],
                "identity_chooser": lambda *_what, **_more: ["even", "odd"],
                "execute_chooser": lambda _context: ["even", "odd"],
            }
        ),
    )
    app.config["SQLALCHEMY_DATABASE_URI"] = postgres.database(f"even_{len(options)}")
    app.config["SQLALCHEMY_BINDS"] = {"odd": postgres.database(f"odd_{len(options)}")}
    db.init_app(app)
    Idempotency(app, db, scope=None)

    class Payment(db.Model):
        id = sa.Column(sa.Integer, primary_key=True)
        amount = sa.Column(sa.Integer)

    @app.post("/payments")
    @idempotent(**options)
    def pay():
        db.session.add_all([Payment(amount=1), Payment(amount=2)])
        db.session.commit()
        return {}, 201

    app.testing = True
    with app.app_context():
        for engine in db.engines.values():
            db.metadata.create_all(engine)
    return app, db, Payment


def count_rows(app, db, model):
    found = []
    with app.app_context():
        for engine in db.engines.values():
            with engine.connect() as connection:
                found.append(connection.scalar(sa.select(sa.func.count(model.id))))
            engine.dispose()
    return found


def test_a_session_of_several_databases_is_refused(postgres):
    app, db, payment = sharded_shop(postgres)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="ShardedSession.*several databases"):
            app.test_client().post("/payments", headers={"Idempotency-Key": "key-1"})
    assert count_rows(app, db, payment) == [0, 0]


def test_a_view_that_is_not_atomic_may_have_one(postgres):
    app, db, payment = sharded_shop(postgres, atomic=False)
    for _ in range(2):
        reply = app.test_client().post("/payments", headers={"Idempotency-Key": "key-1"})
        assert reply.status_code == 201
    assert count_rows(app, db, payment) == [1, 1]


def test_a_session_on_an_engine_of_somebody_elses_is_refused(world):
    """Its commit would be one of its own, with the same URL as with another."""
    with world.app.app_context():
        other = sa.create_engine(world.db.engine.url)
    statement = sa.insert(world.Payment).values(amount=1)
    errors = []

    @world.app.post("/payments")
    @idempotent
    def pay():
        try:
            world.db.session.execute(statement, bind_arguments={"bind": other})
        except NotAtomic as error:
            errors.append(str(error))
            raise
        world.db.session.commit()
        return {}, 201

    assert [world.post().status_code for _ in range(2)] == [500, 500]
    assert world.count() == 0
    assert "an engine that is none of its application's" in errors[0]
    other.dispose()
    world.assert_clean()


def test_a_session_with_a_bind_of_its_own_is_refused(world, view):
    def pay():
        with world.db.engine.connect() as connection:
            session = factory_of(world.app, world.db)()
            session.execute(sa.select(world.Payment), bind_arguments={"bind": connection})
        return {}, 201

    view(pay)
    with pytest.raises(NotAtomic, match="connection of its own"):
        world.post()


WRITE_LINE = "insert into line (note) values ('x')"


def in_a_transaction_of_its_own(raw, write):
    with raw.cursor() as cursor:
        write(cursor)
    raw.commit()


def through_a_raw_connection(world, write):
    with closing(world.db.engines["logs"].raw_connection()) as raw:
        in_a_transaction_of_its_own(raw, write)


def through_a_connection(world, write):
    with world.db.engines["logs"].connect() as connection:
        in_a_transaction_of_its_own(connection.connection.driver_connection, write)


def through_the_session(world, write):
    bind = {"bind": world.db.engines["logs"]}
    in_a_transaction_of_its_own(world.db.session.connection(bind_arguments=bind).connection, write)


RAW_WRITES = {
    "execute": lambda cursor: cursor.execute(WRITE_LINE),
    "bytes": lambda cursor: cursor.execute(WRITE_LINE.encode()),
    "behind a comment": lambda cursor: cursor.execute("/* tag */ " + WRITE_LINE),
    "executemany": lambda cursor: cursor.executemany("insert into line (note) values (%s)", [("x",)]),
}
OF_PSYCOPG2 = {
    "execute_values": lambda cursor: execute_values(
        cursor, "insert into line (note) values %s", [("x",)]
    ),
    "copy_from": lambda cursor: cursor.copy_from(io.StringIO("x\n"), "line", columns=["note"]),
    "copy_expert": lambda cursor: cursor.copy_expert("copy line (note) from stdin", io.StringIO("x\n")),
}


def through_copy(cursor):
    with cursor.copy("copy line (note) from stdin") as copy:
        copy.write_row(["x"])


OF_PSYCOPG = {
    "copy": through_copy,
    "stream": lambda cursor: list(cursor.stream(f"{WRITE_LINE} returning id")),
    "the connection": lambda cursor: cursor.connection.execute(WRITE_LINE),
}


@pytest.fixture
def world_with_logs(make_world, postgres, several_engines):
    def make(name, through, write, **options):
        world = make_world(SQLALCHEMY_BINDS={"logs": postgres.database(name)})
        world.app.testing = True
        with world.app.app_context():
            logs = world.db.engines["logs"]
            with logs.begin() as connection:
                connection.execute(sa.text("create table if not exists line (id serial, note text)"))
                connection.execute(sa.text("truncate line"))

        @world.app.post("/payments")
        @idempotent(**options)
        def pay():
            through(world, lambda cursor: cursor.execute("select count(*) from line"))
            through(world, write)
            return {}, 503

        def count():
            with world.app.app_context(), logs.connect() as connection:
                driver = connection.connection.driver_connection
                assert has_own_cursors(driver)
                return connection.scalar(sa.text("select count(*) from line"))

        return world, count

    return make


@pytest.mark.parametrize(
    "through", [through_a_raw_connection, through_a_connection, through_the_session]
)
def test_a_write_to_another_bind_with_the_drivers_cursor_is_refused(world_with_logs, through):
    world, count = world_with_logs("raw_bind", through, RAW_WRITES["execute"])
    for _ in range(2):
        with pytest.raises(NotAtomic, match="another bind"):
            world.post()
    assert count() == 0


@ways("write", RAW_WRITES, psycopg2=OF_PSYCOPG2, psycopg=OF_PSYCOPG)
def test_it_is_refused_however_the_driver_is_told(world_with_logs, write):
    world, count = world_with_logs("raw_writes", through_a_raw_connection, write)
    with pytest.raises(NotAtomic, match="another bind"):
        world.post()
    assert count() == 0


def test_it_is_also_refused_on_a_connection_that_the_session_used_before_the_view(world_with_logs):
    world, count = world_with_logs("raw_before", through_the_session, RAW_WRITES["execute"])

    @world.app.before_request
    def read():
        through_the_session(world, lambda cursor: cursor.execute("select 1"))

    with pytest.raises(NotAtomic, match="another bind"):
        world.post()
    assert count() == 0


def test_it_is_free_with_permission(world_with_logs):
    insert = RAW_WRITES["execute"]
    world, count = world_with_logs("raw_allowed", through_a_connection, insert, other_binds=["logs"])
    assert [world.post().status_code for _ in range(2)] == [503, 503]
    assert count() == 2


def test_an_autocommit_engine_is_refused(make_world):
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS={"isolation_level": "AUTOCOMMIT"})
    world.app.post("/payments", endpoint="pay")(idempotent(dict))
    world.app.testing = True
    with pytest.raises(NotAtomic, match="AUTOCOMMIT"):
        world.post()


@pytest.mark.parametrize("cured", [False, True])
def test_a_session_that_reads_from_a_replica_is_refused_with_the_cure(make_world, postgres, cured):
    class Routing(Session):
        """As SQLAlchemy's documentation has it, and with the cure that the error names."""

        def get_bind(self, mapper=None, *, clause=None, **kwargs):
            if self._flushing or isinstance(clause, UpdateBase) or (cured and current_operation):
                return super().get_bind(mapper, clause=clause, **kwargs)
            return current_app.extensions["sqlalchemy"].engines["replica"]

    replica = postgres.database("replica")  # nothing of the primary ever arrives in it
    db = SQLAlchemy(session_options={"class_": Routing})
    world = make_world(db=db, SQLALCHEMY_BINDS={"replica": replica})
    with world.app.app_context(), world.db.engines["replica"].begin() as connection:
        connection.execute(sa.text("create table payment (id int, amount int, note text)"))

    @world.app.get("/payments")
    def count():
        return {"count": world.db.session.query(world.Payment).count()}

    @world.app.post("/payments")
    @idempotent
    def pay():
        payment = world.Payment(amount=1)
        world.db.session.add(payment)
        world.db.session.commit()
        return {"id": payment.id, **count()}, 201

    world.app.testing = True
    if cured:
        assert [world.post().json for _ in range(2)] == [{"id": 1, "count": 1}] * 2
    else:
        with pytest.raises(ConfigurationError, match=r"return what super\(\).get_bind\(\) returns"):
            world.post()
    assert world.client.get("/payments").json == {"count": 0}
    assert world.count() == cured


def test_an_engine_with_a_schema_translate_map_keeps_it(make_world):
    class TenantSession(Session):
        def get_bind(self, *args, **kwargs):
            bind = super().get_bind(*args, **kwargs)
            return bind.execution_options(schema_translate_map={None: "tenant"})

    world = make_world(db=SQLAlchemy(session_options={"class_": TenantSession}))
    world.sql("create schema tenant")
    world.sql("create table tenant.payment (like payment including all)")
    protect(world, lambda: pay_once(world) or ({}, 201))
    status = world.post().status_code
    assert world.count() == 0, "the default schema is another tenant's"
    assert world.count("tenant.payment") == (1 if status == 201 else 0)


INSERT = "insert into {} (amount) values (1)"
WAYS = {
    "one row": lambda connection: connection.execute(sa.insert(LINE), {"id": 7}),
    "rows sent as one statement": lambda connection: connection.execute(
        sa.insert(LINE).returning(LINE.c.id), [{"id": 7}, {"id": 8}]
    ),
    "rows sent one by one": lambda connection: connection.execute(
        sa.text("insert into line values (:id)"), [{"id": 7}, {"id": 8}]
    ),
    "the driver's own SQL": lambda connection: connection.exec_driver_sql(
        "insert into line values (%s)", (7,)
    ),
    "no parameters": lambda connection: connection.execution_options(
        no_parameters=True
    ).exec_driver_sql("insert into line values (length('%1234567'))"),
    "a cursor on the server": lambda connection: connection.execution_options(
        stream_results=True
    ).exec_driver_sql("with new as (insert into line values (7) returning id) select id from new"),
}
LINE = sa.Table("line", sa.MetaData(), sa.Column("id", sa.Integer))


@pytest.fixture
def assert_refused(make_world, postgres, several_engines):
    """Checks that a view's write to another bind is refused; gives ``write`` a connection to that."""

    def check(write, **options):
        world = make_world(SQLALCHEMY_BINDS={"logs": postgres.database("ways_to_write")})
        with world.app.app_context():
            logs = world.db.engines["logs"]
        logs = logs.execution_options(**options) if options else logs
        with logs.begin() as connection:
            connection.execute(sa.text("create table if not exists line (id int)"))

        def pay():
            with logs.begin() as connection:
                write(connection)
            return {}, 201

        protect(world, pay)
        world.app.testing = True
        with pytest.raises(NotAtomic, match="another bind"):
            world.post()
        with logs.connect() as connection:
            assert connection.scalar(sa.text("select count(*) from line")) == 0

    return check


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_write_to_another_bind_is_noticed_however_it_is_sent(assert_refused, way):
    assert_refused(way)


def test_also_on_an_engine_with_options(assert_refused):
    assert_refused(WAYS["one row"], logging_token="logs")


def test_a_write_to_another_bind_is_noticed_where_a_listener_for_all_engines_sends_statements(
    assert_refused,
):
    def send(cursor, statement, parameters, context):
        cursor.execute(statement, parameters)
        return True

    sa.event.listen(sa.Engine, "do_execute", send)
    try:
        assert_refused(lambda connection: connection.execute(sa.insert(LINE).values(id=7)))
    finally:
        sa.event.remove(sa.Engine, "do_execute", send)


@pytest.mark.parametrize("is_protected", [False, True])
@ways(
    "statement",
    {"bytes": INSERT.format("payment").encode()},
    psycopg2={"composed": sql.SQL(INSERT).format(sql.Identifier("payment"))},
    psycopg={"composed": psycopg.sql.SQL(INSERT).format(psycopg.sql.Identifier("payment"))},
)
def test_a_statement_may_be_what_only_the_driver_understands(world, statement, is_protected):
    def pay():
        world.db.session.connection().exec_driver_sql(statement)
        world.db.session.commit()
        return {}, 201

    world.app.post("/payments")(idempotent(pay) if is_protected else pay)
    assert world.post().status_code == 201
    assert world.count() == 1


def test_a_bind_that_is_not_there_is_named(world):
    name = world.app.extensions["idempotency"].sessions.usual
    world.app.post("/payments", endpoint="pay")(idempotent(other_binds=["logs"])(dict))
    world.app.testing = True
    with pytest.raises(ConfigurationError, match=rf"'logs'.*\[{re.escape(repr(name))}\]"):
        world.post()


def test_a_refused_write_to_another_bind_is_named_and_its_values_are_not(world_with_logs):
    world, _ = world_with_logs("named_bind", through_a_raw_connection, RAW_WRITES["behind a comment"])
    said = "bind 'logs' (the database named_bind): '/* tag */ insert into line (note) values (…'"
    with pytest.raises(NotAtomic, match=re.escape(said)) as refused:
        world.post()
    assert "other_binds=['logs']" in str(refused.value)
    assert "'x'" not in str(refused.value)


@pytest.mark.parametrize("use", [pay_once, lambda other: other.sql("update payment set amount = 2")])
def test_the_database_of_another_application_is_no_bind_of_this_one(
    make_world, add_view, assert_replayed, caplog, driver, use
):
    """As any other effect outside of the operation: a retry may repeat it."""
    world, other = make_world(), make_world()

    def call():
        with other.app.app_context():
            use(other)

    runs = add_view(world, during=call, name=f"beside_{driver}_{use.__name__}")
    first = world.post()
    assert first.status_code == 201
    assert_replayed(first, world.post())
    assert runs == [1]
    assert "none of its application's" in caplog.text
    other.assert_clean()


@SEVERAL_ENGINES
@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("has_served", [False, True])
def test_engines_that_were_made_anew_are_refused(make_world, postgres, add_view, atomic, has_served):
    """As where a suite gives each of its workers a database: after ``init_app``."""
    world, others = make_world(), postgres.database("made_anew")
    runs = add_view(world, atomic=atomic)
    world.app.testing = True
    if has_served:
        assert world.post().status_code == 201
        runs.clear()
    del world.app.extensions["sqlalchemy"]
    world.app.config["SQLALCHEMY_DATABASE_URI"] = others
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.app, "_got_first_request", False)
        world.db.init_app(world.app)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"db\.init_app\(\) was called again"):
            world.post(key="key-2")
    assert runs == []
