"""What is private in SQLAlchemy and Flask and used all the same: another version may turn these red."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from flask import after_this_request, g, request
from flask.globals import request_ctx

from flask_idempotency.web.operation import present_context, present_request


def test_a_session_knows_its_connections_by_what_they_were_asked_for_with(world):
    with world.app.app_context():
        connection = world.db.session.connection()
        known = world.db.session().get_transaction()._connections
        assert known[world.db.engine][0] is known[connection][0] is connection


def test_what_is_under_a_connection_can_be_taken_away_and_put_back(world):
    with world.app.app_context():
        connection = world.db.session.connection()
        below = connection.connection
        assert below is connection._dbapi_connection
        connection._dbapi_connection = None
        with pytest.raises(sa.exc.PendingRollbackError):
            world.db.session.scalar(sa.text("select 1"))
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


def test_the_present_request_and_its_context_are_those_of_flasks_proxies(world):
    assert present_request() is present_context() is None
    with world.app.app_context():
        assert present_request() is None
        assert present_context() is g._get_current_object()
        with world.app.test_request_context():
            assert present_request() is request._get_current_object()
            assert present_context() is g._get_current_object()


def test_a_request_keeps_what_was_registered_for_after_it_in_one_list_in_their_order(world):
    with world.app.test_request_context():
        functions = request_ctx._after_request_functions
        assert functions == []
        added = [lambda response: response, lambda response: response]
        for function in added:
            after_this_request(function)
        assert request_ctx._after_request_functions is functions
        assert functions == added
        functions.clear()
        assert world.app.process_response(world.app.response_class("as it was")).data == b"as it was"
