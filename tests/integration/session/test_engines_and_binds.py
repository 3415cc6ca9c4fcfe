"""Engines, pools and binds: which the session joins, and which are refused."""

from __future__ import annotations

import re

import psycopg
import pytest
import sqlalchemy as sa
from flask import Flask, current_app
from flask_sqlalchemy import SQLAlchemy
from flask_sqlalchemy.session import Session
from psycopg2 import sql
from sqlalchemy.ext.horizontal_shard import ShardedSession
from sqlalchemy.sql.dml import UpdateBase

from flask_idempotency import ConfigurationError, Idempotency, NotAtomic, current_operation, idempotent
from tests.drivers import ways
from tests.integration.views import pay_once, protect

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
        with pytest.raises(NotAtomic, match="uses another bind"):
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
    assert "uses another bind" in errors[0]
    other.dispose()
    world.assert_clean()


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
        with pytest.raises(NotAtomic, match=r"return what super\(\).get_bind\(\) returns"):
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


@ways(
    "statement",
    {"bytes": INSERT.format("payment").encode()},
    psycopg2={"composed": sql.SQL(INSERT).format(sql.Identifier("payment"))},
    psycopg={"composed": psycopg.sql.SQL(INSERT).format(psycopg.sql.Identifier("payment"))},
)
def test_what_only_the_driver_understands_is_refused(world, statement, caplog):
    @world.app.post("/payments")
    @idempotent
    def pay():
        world.db.session.connection().exec_driver_sql(statement)
        world.db.session.commit()
        return {}, 201

    assert world.post().status_code == 500
    assert "NotAtomic: the view sent" in caplog.text
    assert world.count() == 0


def test_a_bind_that_is_not_there_is_named(world):
    name = world.app.extensions["idempotency"].sessions.usual
    world.app.post("/payments", endpoint="pay")(idempotent(other_binds=["logs"])(dict))
    world.app.testing = True
    with pytest.raises(ConfigurationError, match=rf"'logs'.*\[{re.escape(repr(name))}\]"):
        world.post()


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
    assert caplog.text.count("a connection of its own") == 1
    other.assert_clean()


@SEVERAL_ENGINES
@pytest.mark.parametrize("has_served", [False, True])
def test_engines_that_were_made_anew_are_refused(make_world, postgres, add_view, has_served):
    """As where a suite gives each of its workers a database: after ``init_app``."""
    world, others = make_world(), postgres.database("made_anew")
    runs = add_view(world)
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
        with pytest.raises(NotAtomic, match="another bind, the database made_anew"):
            world.post(key="key-2")
