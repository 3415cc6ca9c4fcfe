"""Around the session: pools, cursor classes, functions, time-outs, other binds and triggers."""

from __future__ import annotations

import time

import pytest
import sqlalchemy as sa
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from psycopg2.extras import DictCursor, NamedTupleCursor

from flask_idempotency import ConfigurationError, Idempotency, NotAtomic, idempotent

pytestmark = pytest.mark.parametrize("store", ["postgres"])


def add(world, amount=1, note=None):
    world.db.session.add(world.Payment(amount=amount, note=note))
    world.db.session.commit()


def test_what_was_written_on_another_bind_before_the_view_is_refused(make_world, postgres):
    world = make_world(SQLALCHEMY_BINDS={"logs": postgres.database("written_before")})

    class Line(world.db.Model):
        __bind_key__ = "logs"
        id = sa.Column(sa.Integer, primary_key=True)

    with world.app.app_context():
        world.db.create_all("logs")

    @world.app.before_request
    def write():
        world.db.session.add(Line())
        world.db.session.flush()

    @world.app.post("/payments")
    @idempotent
    def pay():
        add(world)
        return {}, 503

    world.app.testing = True
    for _ in range(2):
        with pytest.raises(NotAtomic, match="another bind"):
            world.post()
    with world.app.app_context(), world.db.engines["logs"].connect() as connection:
        assert connection.scalar(sa.select(sa.func.count(Line.id))) == 0


def test_a_cursor_factory_that_the_view_chooses_is_used(world, view):
    def pay():
        raw = world.db.session.connection().connection.driver_connection
        raw.cursor_factory = DictCursor
        with raw.cursor() as cursor:
            cursor.execute("select 5 as amount")
            return {"amount": cursor.fetchone()["amount"]}

    view(pay)
    assert world.post().json == {"amount": 5}


def test_an_engine_with_a_cursor_class_of_its_own_may_read_before_the_view(make_world):
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS={"connect_args": {"cursor_factory": NamedTupleCursor}})
    world.app.before_request(lambda: world.db.session.scalar(sa.text("select 1")) and None)

    @world.app.post("/payments")
    @idempotent
    def pay():
        add(world)
        return {}, 201

    assert [world.post().status_code for _ in range(2)] == [201, 201]


def test_a_function_that_names_its_setting_at_run_time_does_no_harm(world, view):
    world.sql(
        "create function choose(kind text) returns void language sql as"
        " $$ select set_config('app.' || kind, 'x', true) $$"
    )

    def pay():
        world.db.session.execute(sa.text("select choose('tenant')"))
        add(world)
        add(world)
        return {}, 201

    view(pay)
    assert world.post().status_code == 201
    assert world.count() == 2


def test_a_local_time_out_for_idleness_ends_with_the_views_commit(world, view):
    def pay():
        world.db.session.execute(sa.text("set local idle_in_transaction_session_timeout = '150ms'"))
        add(world)
        time.sleep(0.4)  # what the view does elsewhere
        add(world)
        return {}, 201

    view(pay)
    assert world.post().status_code == 201
    assert world.count() == 2


def test_a_constraint_that_became_deferrable_later_is_noticed_after_its_first_violation(world, view):
    def pay():
        try:
            add(world, amount=7)
        except sa.exc.IntegrityError:
            world.db.session.rollback()
            return {}, 409
        return {}, 201

    view(pay)
    world.app.config["PROPAGATE_EXCEPTIONS"] = False
    assert world.post(key="before").status_code == 201
    world.sql("alter table payment add constraint one unique (amount) deferrable initially deferred")
    assert world.post(key="first").status_code == 500
    assert world.post(key="first").status_code == 409
    assert world.count() == 1


def test_a_function_that_only_reads_after_the_commit_is_no_lost_work(world, view, caplog):
    def pay():
        add(world)
        world.db.session.execute(sa.text("select pg_table_is_visible('payment'::regclass)"))
        return {}, 409

    view(pay)
    assert world.post().status_code == 409
    assert world.count() == 1
    assert "did not commit" not in caplog.text


def test_a_pool_with_one_connection_for_all_is_refused(postgres, store):
    app, db = Flask("shop"), SQLAlchemy(engine_options={"poolclass": sa.pool.StaticPool})
    app.config["SQLALCHEMY_DATABASE_URI"] = postgres.database("static_pool")
    db.init_app(app)
    with pytest.raises(ConfigurationError, match="StaticPool"):
        Idempotency().init_app(app, db, scope=None)


@pytest.mark.parametrize("status", [201, 503])
def test_a_trigger_of_sqlites_that_rolls_all_back_ends_the_operation(tmp_path, store, status):
    app, db = Flask("sqlite"), SQLAlchemy()
    app.config["SQLALCHEMY_DATABASE_URI"] = f"sqlite:///{tmp_path}/shop.db"
    app.config["IDEMPOTENCY_STORE"] = "sql"
    db.init_app(app)

    class Payment(db.Model):
        id = sa.Column(sa.Integer, primary_key=True)
        amount = sa.Column(sa.Integer)

    Idempotency(app, db, scope=None)
    with app.app_context():
        db.create_all()
        db.session.execute(
            sa.text(
                "create trigger no before insert on payment when new.amount = 99"
                " begin select raise(rollback, 'no'); end"
            )
        )
        db.session.commit()

    @app.post("/payments")
    @idempotent
    def pay():
        for amount in (3, 99, 4):
            try:
                db.session.add(Payment(amount=amount))
                db.session.commit()
            except sa.exc.SQLAlchemyError:
                db.session.rollback()
        return {}, status

    for _ in range(2):
        response = app.test_client().post("/payments", json={}, headers={"Idempotency-Key": "key-1"})
        assert response.status_code == 500
    with app.app_context():
        assert db.session.scalar(sa.select(sa.func.count(Payment.id))) == 0
        db.engine.dispose()
