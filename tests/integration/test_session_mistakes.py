"""What would leave the operation's transaction is refused, or warned about, before it commits."""

from __future__ import annotations

from contextlib import suppress

import pytest
import sqlalchemy as sa
from flask import current_app, request
from flask_sqlalchemy import SQLAlchemy
from flask_sqlalchemy.session import Session as FlaskSession
from psycopg2 import extensions
from psycopg2.extras import execute_values
from sqlalchemy.orm import sessionmaker
from sqlalchemy.sql.dml import UpdateBase

from flask_idempotency import ConfigurationError, NotAtomic, current_operation, idempotent


@pytest.mark.parametrize("flushed", [False, True])
def test_a_success_with_work_that_nobody_committed_is_refused(world, view, flushed):
    def pay():
        world.db.session.add(world.Payment(amount=1))
        if flushed:
            world.db.session.flush()
        return {}, 201

    view(pay)
    with pytest.raises(NotAtomic, match="nobody committed"):
        world.post()
    assert world.count() == 0
    assert [r.state for r in world.records()] == ["in_progress"]


def test_beside_a_rejection_work_that_nobody_committed_is_undone_as_without_us(world, view, caplog):
    def pay():
        world.db.session.add(world.Payment(amount=1))
        world.db.session.flush()
        return {}, 409

    view(pay)
    assert [world.post().status_code for _ in range(2)] == [409, 409]
    assert world.count() == 0
    assert "did not commit" in caplog.text


def test_a_database_error_that_is_swallowed_without_rollback_is_not_atomic(world, view):
    def pay():
        with pytest.raises(sa.exc.DBAPIError):
            current_operation.connection.execute(sa.text("select 1/0"))
        return {}, 201

    view(pay)
    with pytest.raises(NotAtomic, match="rollback"):
        world.post()
    assert [r.state for r in world.records()] == ["in_progress"]


def test_writes_flushed_before_the_view_are_not_atomic(world, view):
    @world.app.before_request
    def write_early():
        world.db.session.add(world.Payment(amount=1))
        world.db.session.flush()

    view(lambda: ({}, 201))
    with pytest.raises(NotAtomic, match="before"):
        world.post()
    assert world.records() == []


@pytest.mark.parametrize("words", ["COMMIT", "rollback", "  BEGIN", "-- x\nEND", "/* c */ COMMIT"])
def test_a_transaction_statement_sent_as_text_is_refused(world, view, words):
    def pay():
        world.db.session.add(world.Payment(amount=1))
        world.db.session.flush()
        try:
            world.db.session.execute(sa.text(words))
        except NotAtomic:
            world.db.session.rollback()
        return {}, 201

    view(pay)
    with pytest.raises(NotAtomic, match="begins or ends"):
        world.post()
    assert world.count() == 0


def test_a_commit_past_every_guard_fails_the_finish(world, view):
    def pay():
        driver = current_operation.connection.connection.units.driver  # no way that a view knows
        extensions.cursor(driver).execute("commit; begin")
        return {}, 201

    view(pay)
    with pytest.raises(NotAtomic, match="began another"):
        world.post()
    assert [r.state for r in world.records()] == ["in_progress"]


def test_committing_the_operations_connection_is_refused(world, view):
    def pay():
        current_operation.connection.commit()
        return {}, 201

    view(pay)
    with pytest.raises(NotAtomic, match="ended the operation's transaction"):
        world.post()


def commit_in_a_with(raw):
    with raw.driver_connection:
        pass


def commit_after_a_named_cursor(raw):
    cursor = raw.cursor("named")
    cursor.execute("select 1")
    cursor.close()
    raw.driver_connection.commit()


ENDS = {
    "the pool's": (lambda raw: raw.commit(), 3),
    "the driver's": (lambda raw: raw.driver_connection.commit(), 3),
    "a with block's": (commit_in_a_with, 3),
    "after a named cursor": (commit_after_a_named_cursor, 3),
    "a cursor's": (lambda raw: raw.cursor().connection.commit(), 3),
    "rollback of the pool's": (lambda raw: raw.rollback(), 1),
    "rollback of the driver's": (lambda raw: raw.driver_connection.rollback(), 1),
    "rollback of a cursor's": (lambda raw: raw.cursor().connection.rollback(), 1),
}


@pytest.mark.parametrize(("end", "rows"), ENDS.values(), ids=ENDS)
def test_the_drivers_own_commit_and_rollback_are_the_sessions(world, view, end, rows):
    def pay():
        raw = world.db.session.connection().connection
        execute_values(raw.cursor(), "insert into payment (amount) values %s", [(1,), (2,)])
        end(raw)
        world.db.session.rollback()
        world.db.session.add(world.Payment(amount=3))
        world.db.session.commit()
        return {}, 201

    view(pay)
    assert [world.post().status_code for _ in range(2)] == [201, 201]
    assert world.count() == rows
    world.assert_clean()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda driver: driver.set_isolation_level(extensions.ISOLATION_LEVEL_AUTOCOMMIT),
        lambda driver: driver.reset(),
        lambda driver: driver.set_session(autocommit=True),
        lambda driver: setattr(driver, "autocommit", True),
        lambda driver: setattr(driver, "isolation_level", extensions.ISOLATION_LEVEL_SERIALIZABLE),
        lambda driver: driver.tpc_begin(driver.xid(1, "a", "b")),
    ],
)
def test_what_would_end_the_transaction_in_the_driver_is_refused(world, view, spoil):
    def pay():
        world.db.session.add(world.Payment(amount=1))
        world.db.session.commit()
        with suppress(NotAtomic):
            spoil(world.db.session.connection().connection.driver_connection)
        world.db.session.rollback()
        world.db.session.add(world.Payment(amount=2))
        world.db.session.commit()
        return {}, 201

    view(pay)
    with pytest.raises(NotAtomic, match="driver's connection"):
        world.post()
    assert world.count() == 0
    world.assert_clean()


def test_what_a_driver_wrote_commits_with_the_session(world, view):
    def pay():
        raw = world.db.session.connection().connection
        execute_values(raw.cursor(), "insert into payment (amount) values %s", [(1,), (2,)])
        world.db.session.commit()
        return {}, 201

    view(pay)
    assert world.post().status_code == 201
    assert world.count() == 2
    world.assert_clean()


@pytest.mark.parametrize("reach", ["connection", "info"])
def test_who_looks_at_a_failed_transaction_does_not_hide_its_error(world, view, reach):
    def pay():
        session = world.db.session
        session.add_all([world.Payment(amount=1, note="a"), world.Payment(amount=2, note="a")])
        with pytest.raises(sa.exc.IntegrityError):
            session.commit()
        session.rollback()
        session.add(world.Payment(amount=3))
        session.commit()
        return {}, 201

    reached = []

    def look(context):
        reached.append(getattr(context.connection, reach))

    with world.app.app_context():
        engine = world.db.engine
    sa.event.listen(engine, "handle_error", look)
    view(pay)
    assert world.post().status_code == 201
    assert len(reached) == 1
    assert world.sql("select amount from payment") == [(3,)]
    world.assert_clean()


def test_a_session_with_a_bind_of_its_own_is_refused(world, view):
    def pay():
        with world.db.engine.connect() as connection:
            session = world.db.session.session_factory()
            session.execute(sa.select(world.Payment), bind_arguments={"bind": connection})
        return {}, 201

    view(pay)
    with pytest.raises(NotAtomic, match="connection of its own"):
        world.post()


def test_a_raw_connection_is_warned_about_once(world, view, caplog):
    def pay():
        with world.db.engine.begin() as connection:
            connection.execute(sa.insert(world.Payment).values(amount=1))
        return {}, 201

    view(pay, name=f"raw-{world.store}")
    assert world.post().status_code == world.post(key="key-2").status_code == 201
    assert caplog.text.count("connection of its own") == 1


def test_a_session_that_another_requests_context_shares_is_the_views(world, view):
    def pay():
        with world.app.test_request_context():
            world.db.session.add(world.Payment(amount=1))
            world.db.session.commit()
        return {}, 201 if request.json["amount"] else 500

    view(pay)
    assert world.post(json={"amount": 0}).status_code == 500
    assert world.count() == 0
    assert [world.post(key="key-2").status_code for _ in range(2)] == [201, 201]
    assert world.count() == 1


@pytest.mark.parametrize("how", ["close", "with"])
def test_closing_a_sessions_connection_ends_what_it_has_not_committed(world, view, how):
    def pay():
        world.db.session.add(world.Payment(amount=1))
        world.db.session.commit()
        connection = world.db.session.connection()
        if how == "close":
            connection.close()
        else:
            with connection:
                pass
        return {}, 201

    view(pay)
    assert [world.post().status_code for _ in range(2)] == [201, 201]
    assert world.count() == 1
    world.assert_clean()


@pytest.mark.parametrize("allowed", [False, True])
def test_a_write_to_another_bind_needs_permission(make_world, postgres, allowed):
    other = postgres.database("other_bind")
    world = make_world(SQLALCHEMY_BINDS={"logs": other})

    class Line(world.db.Model):
        __bind_key__ = "logs"
        id = sa.Column(sa.Integer, primary_key=True)

    with world.app.app_context():
        world.db.create_all("logs")

    @world.app.post("/payments")
    @idempotent(other_binds=["logs"] if allowed else [])
    def pay():
        world.db.session.scalar(sa.select(sa.func.count(Line.id)))  # reading is free
        world.db.session.add_all([world.Payment(amount=1), Line()])
        world.db.session.commit()
        return {}, 201

    world.app.testing = True
    if allowed:
        assert world.post().status_code == 201
        assert world.count() == 1
    else:
        with pytest.raises(NotAtomic, match="another bind"):
            world.post()
        assert world.count() == 0
        assert [r.state for r in world.records()] == ["in_progress"]


def test_an_autocommit_engine_is_refused(make_world):
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS={"isolation_level": "AUTOCOMMIT"})
    world.app.post("/payments", endpoint="pay")(idempotent(dict))
    world.app.testing = True
    with pytest.raises(NotAtomic, match="AUTOCOMMIT"):
        world.post()


def test_a_session_that_cannot_join_is_refused_before_the_first_view_runs(world, view):
    class Stubborn(world.db.session.session_factory.class_):
        def get_bind(self, *args, **kwargs):
            return world.db.engine

    world.db.session.session_factory.class_ = Stubborn
    ran = []
    view(lambda: ran.append(1) or {})
    with pytest.raises(ConfigurationError, match="does not join"):
        world.post()
    assert ran == []


@pytest.mark.parametrize("cured", [False, True])
def test_a_session_that_reads_from_a_replica_is_refused_with_the_cure(make_world, postgres, cured):
    class Routing(FlaskSession):
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


def test_a_session_class_replaced_later_is_refused_too(world, view):
    view(dict)
    assert world.post().status_code == 200
    world.db.session.session_factory = sessionmaker()
    with pytest.raises(ConfigurationError, match="replaced"):
        world.post(key="key-2")
