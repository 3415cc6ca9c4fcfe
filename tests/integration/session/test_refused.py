"""What would leave the operation's transaction is refused, or warned about, before it commits."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
import sqlalchemy as sa
from flask_sqlalchemy import SQLAlchemy
from psycopg2 import extensions
from sqlalchemy.orm import sessionmaker

from flask_idempotency import ConfigurationError, NotAtomic, current_operation, idempotent
from tests.drivers import PSYCOPG2, own_cursor
from tests.integration.views import pay_once, protect
from tests.sessions import factory_of


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
        own_cursor(driver).execute("commit; begin")
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
        raw.cursor().executemany("insert into payment (amount) values (%s)", [(1,), (2,)])
        end(raw)
        world.db.session.rollback()
        world.db.session.add(world.Payment(amount=3))
        world.db.session.commit()
        return {}, 201

    view(pay)
    assert [world.post().status_code for _ in range(2)] == [201, 201]
    assert world.count() == rows
    world.assert_clean()


@PSYCOPG2
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
    with pytest.raises(NotAtomic, match="(driver's|its) connection"):
        world.post()
    assert world.count() == 0
    world.assert_clean()


@PSYCOPG2
def test_a_refused_level_is_named_in_words(world, view):
    view(lambda: world.db.session.connection().connection.driver_connection.set_isolation_level(0))
    with pytest.raises(NotAtomic, match=r"another isolation_level for its connection \(autocommit\)"):
        world.post()


def test_the_log_says_what_is_known_of_a_connection_that_the_view_closes(world, view, caplog):
    view(lambda: world.db.session.connection().connection.driver_connection.close() or ({}, 201))
    assert world.post().status_code == 503
    (line,) = [each.getMessage() for each in caplog.records if "unavailable" in each.getMessage()]
    assert "None" not in line


def test_what_a_driver_wrote_commits_with_the_session(world, view):
    def pay():
        raw = world.db.session.connection().connection
        raw.cursor().executemany("insert into payment (amount) values (%s)", [(1,), (2,)])
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


def test_a_raw_connection_is_warned_about_once(world, view, driver, caplog):
    def pay():
        with world.db.engine.begin() as connection:
            connection.execute(sa.insert(world.Payment).values(amount=1))
        return {}, 201

    view(pay, name=f"raw-{world.store}-{driver}")
    assert world.post().status_code == world.post(key="key-2").status_code == 201
    assert caplog.text.count("connection of its own") == 1


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


@pytest.mark.parametrize("has_served", [False, True])
def test_a_session_that_cannot_join_is_refused_before_a_view_runs(world, view, has_served):
    class Stubborn(factory_of(world.app, world.db).class_):
        def get_bind(self, *args, **kwargs):
            return world.db.engine

    ran = []
    view(lambda: ran.append(1) or {})
    if has_served:
        world.post(key="key-0")
        ran.clear()
    factory_of(world.app, world.db).class_ = Stubborn
    with pytest.raises(ConfigurationError, match="does not join"):
        world.post()
    assert ran == []


def test_a_session_class_replaced_later_is_refused_too(make_world):
    world = make_world(db=SQLAlchemy(), PROPAGATE_EXCEPTIONS=True)
    world.app.add_url_rule("/payments", "pay", idempotent(dict), methods=["POST"])
    assert world.post().status_code == 200
    world.db.session.session_factory = sessionmaker()
    with pytest.raises(ConfigurationError, match="replaced"):
        world.post(key="key-2")


def test_with_uncommitted_work_in_the_session_both_would_share_is_refused(world):
    @world.app.post("/inner")
    @idempotent
    def inner():
        return {}

    @world.app.post("/outer")
    @idempotent
    def outer():
        world.db.session.add(world.Payment(amount=1))
        world.db.session.flush()
        world.post("/inner")
        return {}

    world.app.testing = True
    with pytest.raises(NotAtomic, match="its own application"):
        world.post("/outer")
    assert world.count() == 0


def test_committing_the_operations_connection_after_a_named_cursor_commits_nothing(world):
    def pay():
        session = world.db.session
        list(session.execute(sa.select(world.Payment.id).execution_options(yield_per=5)))
        pay_once(world)
        session.execute(sa.text("select 1"))
        current_operation.connection.commit()
        return {}, 201

    protect(world, pay)
    assert world.post().status_code == 500
    assert world.count() == 0


@pytest.mark.parametrize("words", ["; COMMIT", "select 1; COMMIT", "executemany"])
def test_a_commit_in_disguise_commits_nothing(world, words):
    def pay():
        session = world.db.session
        session.add(world.Payment(amount=1))
        session.flush()
        if words == "executemany":
            session.connection().connection.cursor().executemany("COMMIT", [()])
        else:
            session.execute(sa.text(words))
        return {}, 201

    protect(world, pay)
    assert [world.post().status_code for _ in range(2)] == [500, 500]
    assert world.count() == 0


@pytest.mark.parametrize("note", ["*/ commit", "*//*" * 22])
def test_what_a_client_sends_is_not_taken_for_a_statement(world, note):
    def pay():
        started = time.monotonic()
        world.db.session.execute(
            sa.text("/* tag */ insert into payment (amount, note) values (1, :note)"), {"note": note}
        )
        world.db.session.commit()
        return {"quick": time.monotonic() - started < 0.3}, 201

    protect(world, pay)
    assert world.post().json == {"quick": True}


@pytest.mark.parametrize("where", ["alone", "in front of a statement that was parsed before"])
def test_a_unit_whose_savepoint_was_lost_undoes_no_other(world, view, where):
    """Whatever fails in front of it: a rollback never goes back to what was committed before."""

    def pay():
        read, payments = sa.text("select 1"), world.db.session
        payments.execute(read)
        payments.commit()
        payments.add(world.Payment(amount=1))
        payments.commit()
        units = payments.connection().connection.units
        units.waiting.insert(0, "select 1 / 0")  # as a setting that cannot be set again
        with suppress(sa.exc.DBAPIError):
            payments.execute(read if where != "alone" else sa.text("select 2"))
        payments.rollback()
        payments.add(world.Payment(amount=2))
        payments.commit()
        return {}, 201

    view(pay)
    with suppress(NotAtomic, sa.exc.DBAPIError):
        assert world.post().status_code == 500
    assert world.count() == 0
    assert [r.state for r in world.records()] == ["in_progress"]
