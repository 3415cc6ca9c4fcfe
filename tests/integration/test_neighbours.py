"""Beside Flask-Login and Alembic, and on another bind."""

from __future__ import annotations

import flask_login
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import NotAtomic, current_operation, idempotent


def test_flask_login_loads_its_user_before_and_the_view_uses_it(make_world):
    world = make_world(
        init={"scope": lambda: flask_login.current_user.get_id()},  # noqa: PLW0108 -- a proxy
        SECRET_KEY="tests only",
    )

    class User(flask_login.UserMixin, world.db.Model):
        id = sa.Column(sa.Integer, primary_key=True)
        credit = sa.Column(sa.Integer, default=10)

    login = flask_login.LoginManager(world.app)
    login.request_loader(lambda request: world.db.session.get(User, int(request.headers["X-User"])))

    @world.app.post("/payments")
    @flask_login.login_required
    @idempotent
    def pay():
        flask_login.current_user.credit -= 1
        world.db.session.commit()
        return {"credit": flask_login.current_user.credit}

    with world.app.app_context():
        world.db.create_all()
        world.db.session.add_all([User(id=1), User(id=2)])
        world.db.session.commit()
    assert world.post(user="1").json == world.post(user="1").json == {"credit": 9}
    assert world.post(user="2").json == {"credit": 9}
    assert world.post(user="3").status_code == 401
    assert world.sql('select credit from "user"') == [(9,), (9,)]


def test_a_migration_sees_the_table_and_finds_nothing_to_change(world):
    with world.app.app_context(), world.db.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, world.db.metadata) == []
        connection.execute(sa.text("drop table idempotency_record"))
        changes = [change[0] for change in compare_metadata(context, world.db.metadata)]
        assert changes == ["add_table", "add_index", "add_index"]


def test_records_and_writes_on_a_bind_commit_together_there_and_no_write_elsewhere(
    make_world, postgres
):
    db = SQLAlchemy()

    class Entry(db.Model):
        __bind_key__ = "ledger"
        id = sa.Column(sa.Integer, primary_key=True)

    world = make_world(
        db=db,
        SQLALCHEMY_BINDS={"ledger": postgres.database("ledger")},
        IDEMPOTENCY_BIND_KEY="ledger",
        IDEMPOTENCY_TABLE="operations",
    )

    @world.app.post("/<kind>")
    @idempotent
    def pay(kind):
        db.session.add(Entry() if kind == "entries" else world.Payment(amount=1))
        db.session.commit()
        numbers = sa.select(sa.func.txid_current())
        of_session = db.session.scalar(numbers, bind_arguments={"mapper": Entry.__mapper__})
        assert of_session == current_operation.connection.scalar(numbers)
        return {}, 201

    def rows(table):
        with world.app.app_context(), db.engines["ledger"].connect() as connection:
            return connection.scalar(sa.text(f"select count(*) from {table}"))

    world.app.testing = True
    assert [world.post("/entries").status_code for _ in range(2)] == [201, 201]
    assert rows("entry") == rows("operations") == 1
    assert "operations" not in db.metadata.tables
    with pytest.raises(NotAtomic, match="another bind"):
        world.post("/payments", "key-2")
    assert (rows("entry"), world.count()) == (1, 0)
