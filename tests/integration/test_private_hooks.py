"""What is private in SQLAlchemy and used all the same: a version that changes it turns these red."""

from __future__ import annotations

import sqlalchemy as sa

from flask_idempotency.units import StandIn


def test_a_session_knows_its_connections_by_what_they_were_asked_for_with(world):
    with world.app.app_context():
        connection = world.db.session.connection()
        known = world.db.session().get_transaction()._connections
        assert known[world.db.engine][0] is known[connection][0] is connection


def test_what_is_under_a_connection_can_be_exchanged(world):
    with world.app.app_context():
        connection = world.db.session.connection()
        below, stand_in = connection.connection, StandIn(None)
        assert below is connection._dbapi_connection
        connection._dbapi_connection = stand_in
        assert connection.connection is stand_in
        assert world.db.session.connection() is connection
        connection._dbapi_connection = below
        assert world.db.session.scalar(sa.text("select 1")) == 1


def test_a_pool_can_be_asked_to_tell_its_listeners_of_a_check_out(world):
    heard = []
    with world.app.app_context(), world.db.engine.connect() as connection:
        sa.event.listen(world.db.engine.pool, "checkout", lambda *what: heard.append(what))
        fairy = connection.connection
        world.db.engine.pool.dispatch.checkout(fairy.driver_connection, fairy._connection_record, fairy)
        assert heard == [(fairy.driver_connection, fairy._connection_record, fairy)]
