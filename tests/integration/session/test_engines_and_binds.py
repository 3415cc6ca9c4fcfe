"""Engines, pools and binds: which the session joins, and which are refused."""

from __future__ import annotations

import re

import pytest
import sqlalchemy as sa
from flask import Flask, current_app
from flask_sqlalchemy import SQLAlchemy
from flask_sqlalchemy.session import Session
from sqlalchemy.sql.dml import UpdateBase

from flask_idempotency import ConfigurationError, Idempotency, NotAtomic, current_operation, idempotent
from tests.integration.views import protect


def test_a_pool_with_one_connection_for_all_is_refused(postgres, store):
    app, db = Flask("shop"), SQLAlchemy(engine_options={"poolclass": sa.pool.StaticPool})
    app.config["SQLALCHEMY_DATABASE_URI"] = postgres.database("static_pool")
    db.init_app(app)
    with pytest.raises(ConfigurationError, match="StaticPool"):
        Idempotency().init_app(app, db, scope=None)


@pytest.mark.parametrize("atomic", [True, False])
def test_a_session_of_two_databases_is_refused_unless_the_view_is_not_atomic(
    make_world, postgres, atomic
):
    world = make_world(SQLALCHEMY_BINDS={"logs": postgres.database("logs")})

    class Log(world.db.Model):
        __bind_key__ = "logs"
        id = sa.Column(sa.Integer, primary_key=True)

    with world.app.app_context():
        world.db.create_all("logs")

    def pay():
        world.db.session.add_all([Log(), world.Payment(amount=1)])
        world.db.session.commit()
        return {}, 201

    protect(world, pay, atomic=atomic)
    world.app.testing = True
    for _ in range(2):
        if atomic:
            with pytest.raises(NotAtomic, match="uses another bind"):
                world.post()
        else:
            assert world.post().status_code == 201
    with world.app.app_context(), world.db.engines["logs"].begin() as logs:
        found = logs.scalar(sa.select(sa.func.count(Log.id)))
    assert (found, world.count()) == ((0, 0) if atomic else (1, 1))


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


def test_what_only_the_driver_understands_is_refused(world, caplog):
    sent = b"insert into payment (amount) values (1)"
    protect(world, lambda: world.db.session.connection().exec_driver_sql(sent) and {})
    assert world.post().status_code == 500
    assert "NotAtomic: the view sent" in caplog.text
    assert world.count() == 0


def test_a_bind_that_is_not_there_is_named(world):
    name = world.app.extensions["idempotency"].sessions.usual
    world.app.post("/payments", endpoint="pay")(idempotent(other_binds=["logs"])(dict))
    world.app.testing = True
    with pytest.raises(ConfigurationError, match=rf"'logs'.*\[{re.escape(repr(name))}\]"):
        world.post()


@pytest.mark.usefixtures("several_engines")
def test_engines_that_were_made_anew_are_refused(make_world, postgres, add_view):
    """As where a suite gives each of its workers a database: after ``init_app``."""
    world, others = make_world(), postgres.database("made_anew")
    add_view(world)
    world.app.testing = True
    del world.app.extensions["sqlalchemy"]
    world.app.config["SQLALCHEMY_DATABASE_URI"] = others
    world.db.init_app(world.app)
    for _ in range(2):
        with pytest.raises(NotAtomic, match="another bind, the database made_anew"):
            world.post(key="key-2")
