"""What would leave the operation's transaction is refused, or warned about, before it commits.

What also the plain application does, and what the refusals of it keep: ``tests/differential``.
"""

from __future__ import annotations

import psycopg2
import pytest
import sqlalchemy as sa
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import sessionmaker

from flask_idempotency import ConfigurationError, NotAtomic, current_operation, idempotent
from tests.drivers import PSYCOPG2, own_cursor
from tests.integration.views import pay_once
from tests.sessions import factory_of


def test_beside_a_rejection_work_that_nobody_committed_is_undone_as_without_us(world, view):
    def pay():
        world.db.session.add(world.Payment(amount=1))
        world.db.session.flush()
        return {}, 409

    view(pay)
    assert [world.post().status_code for _ in range(2)] == [409, 409]
    assert world.count() == 0


def test_a_database_error_that_is_swallowed_without_rollback_is_not_atomic(world, view):
    def pay():
        with pytest.raises(sa.exc.DBAPIError):
            current_operation.connection.execute(sa.text("select 1/0"))
        return {}, 201

    view(pay)
    with pytest.raises(NotAtomic, match="rollback"):
        world.post()
    assert [r.state for r in world.records()] == ["in_progress"]


@pytest.mark.parametrize("sent", ["commit", "commit; begin", "rollback; begin"])
def test_a_commit_past_every_guard_fails_the_finish(world, view, sent):
    def pay():
        pay_once(world)
        taken = world.db.session.execute(sa.text("select 1")).cursor.connection
        own_cursor(taken).execute(sent)
        return {}, 201

    view(pay)
    with pytest.raises((NotAtomic, sa.exc.SQLAlchemyError)):
        world.post()
    assert [r.state for r in world.records()] == ["in_progress"]


@pytest.mark.parametrize("is_read_first", [False, True])
def test_committing_the_operations_connection_is_refused(world, view, is_read_first):
    def pay():
        if is_read_first:  # by a cursor with a name
            list(world.db.session.execute(sa.select(world.Payment.id).execution_options(yield_per=5)))
            pay_once(world)
            world.db.session.execute(sa.text("select 1"))
        current_operation.connection.commit()
        return {}, 201

    view(pay)
    with pytest.raises(NotAtomic, match="ended the operation's transaction"):
        world.post()
    assert world.count() == 0


@PSYCOPG2
def test_a_level_chosen_on_the_drivers_connection_harms_no_later_request(world, view):
    def pay():
        pay_once(world)
        world.db.session.connection().connection.driver_connection.set_isolation_level(0)
        return {}, 201

    view(pay)
    with pytest.raises((NotAtomic, sa.exc.SQLAlchemyError, psycopg2.Error)):
        world.post()
    assert world.count() == 0
    world.sql("insert into payment (amount) values (2)")
    assert world.count() == 1


def test_the_log_says_what_is_known_of_a_connection_that_the_view_closes(world, view, caplog):
    view(lambda: world.db.session.connection().connection.driver_connection.close() or ({}, 201))
    assert world.post().status_code == 503
    (line,) = [each.getMessage() for each in caplog.records if "unavailable" in each.getMessage()]
    assert "None" not in line


def test_a_raw_connection_is_warned_about_once(world, view, driver, caplog):
    def pay():
        with world.db.engine.begin() as connection:
            connection.execute(sa.insert(world.Payment).values(amount=1))
        return {}, 201

    view(pay, name=f"raw-{world.store}-{driver}")
    assert world.post().status_code == world.post(key="key-2").status_code == 201
    assert caplog.text.count("connection of its own") == 1


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


@pytest.mark.parametrize("has_served", [False, True])
@pytest.mark.parametrize("status", [201, 503])
def test_what_makes_the_sessions_may_be_replaced_later(make_world, has_served, status):
    world = make_world(db=SQLAlchemy())

    @world.app.post("/payments")
    @idempotent
    def pay():
        world.db.session.remove()  # so the next one is made in the view
        world.db.session.add(world.Payment(amount=1))
        world.db.session.commit()
        return {}, status

    if has_served:
        world.post(key="key-0")
    before = world.count()
    with world.app.app_context():
        world.db.session.session_factory = sessionmaker(world.db.engine)
    for _ in range(2):
        assert world.post().status_code == status
    assert world.count() == before + (status == 201)
    world.assert_clean()


def test_a_double_of_a_session_is_refused(make_world):
    world = make_world(db=SQLAlchemy(), PROPAGATE_EXCEPTIONS=True)
    world.app.add_url_rule("/payments", "pay", idempotent(dict), methods=["POST"])
    world.db.session.session_factory = object
    with pytest.raises(ConfigurationError, match="not a scoped_session over a sessionmaker"):
        world.post()
