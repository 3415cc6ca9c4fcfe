"""What a view writes outside the operation's transaction is named, on SQLite as on PostgreSQL."""

from __future__ import annotations

import threading
import time
import uuid
from contextlib import suppress

import pytest
import sqlalchemy as sa
from flask import request
from sqlalchemy.orm import Session

from flask_idempotency import current_operation, idempotent
from flask_idempotency.testing import assert_idempotent, every_crash
from flask_idempotency.testing.threads import NAME
from tests.testing_kit.conftest import Shop
from tests.testing_kit.test_wrong_endpoints import message


def by_the_engine(shop):
    with shop.db.engine.begin() as connection:
        connection.execute(sa.insert(shop.Payment))


def in_a_session_of_its_own(shop, engine=None):
    with Session(engine or shop.db.engine) as session:
        session.add(shop.Payment())
        session.commit()


def by_an_engine_of_its_own(shop):
    engine = sa.create_engine(shop.app.config["SQLALCHEMY_DATABASE_URI"])
    in_a_session_of_its_own(shop, engine)
    engine.dispose()


def in_a_thread(shop):
    def work():
        with shop.app.app_context(), suppress(sa.exc.OperationalError):
            shop.pay()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def and_swallows_the_error(shop):
    with suppress(sa.exc.OperationalError):
        by_the_engine(shop)


NEXT = {"Idempotency-Key": "next"}

WAYS = [
    by_the_engine,
    in_a_session_of_its_own,
    by_an_engine_of_its_own,
    in_a_thread,
    and_swallows_the_error,
]


def crash_everywhere(shop, effects=None):
    for crash in every_crash():
        with crash:
            assert_idempotent(shop.client, "POST", "/payments", json={}, effects=effects)


@pytest.mark.parametrize("testing", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_write_past_the_session_is_named(shop, way, testing):
    shop.app.testing = testing

    def view():
        shop.pay()
        way(shop)
        return {}, 201

    shop.view(view)
    began = time.monotonic()
    with pytest.raises(AssertionError) as error:
        crash_everywhere(shop)
    said = str(error.value)
    if shop.store == "hybrid":
        assert "rows of payment rose by 3, not by 2" in said
        assert "The retry repeated what the dead attempt had done" in said
    else:
        assert "POST /payments: a second connection wanted to write, in vain. It was here:\n" in said
        assert "tests/testing_kit/" in said.splitlines()[1]
        assert time.monotonic() - began < 30, "SQLite would let it wait for a minute"
    assert "Write through db.session" in said


@pytest.mark.parametrize("store", ["sql", "hybrid"], indirect=True)
def test_state_of_the_process_is_named(shop):
    def view():
        shop.charges.append(1)
        return shop.pay()

    shop.view(view)
    with pytest.raises(AssertionError, match="charges rose by 2, not by 1") as error:
        crash_everywhere(shop, shop.effects)
    assert "a list or a cache in the process" in str(error.value)


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_a_test_that_has_written_and_not_committed_is_told_before_a_request_waits_for_it(shop):
    shop.view(shop.pay)
    with shop.app.app_context():
        shop.pay()
        shop.db.session.add(shop.Payment())
        shop.db.session.flush()
        began = time.monotonic()
        said = message(shop, timeout=1)
        assert time.monotonic() - began < 30, "SQLite would let it wait for a minute"
        assert said.startswith("POST /payments: before the first request, somebody else writes in")
        assert "The test or a fixture has a transaction open" in said
        shop.db.session.commit()
        assert_idempotent(shop.client, "POST", "/payments", effects=shop.payments)


def test_who_writes_before_the_view_is_told_to_commit(tmp_path):
    options = {"connect_args": {"timeout": 0.05}}
    shop = Shop("sql", f"sqlite:///{tmp_path}/db", SQLALCHEMY_ENGINE_OPTIONS=options)
    shop.view(shop.pay)
    connections = []

    @shop.app.before_request
    def begin():
        connections.append(shop.db.engine.connect())
        connections[-1].execute(sa.insert(shop.Payment))

    said = message(shop, duplicates=0)
    assert "the response is 503" in said
    assert "with SQLite, somebody else writes in it: the test" in said
    for connection in connections:
        connection.close()
    shop.close()


@pytest.mark.parametrize("store", ["sql"], indirect=True)
class TestOnSqlite:
    def test_connections_are_as_before(self, shop):
        def timeouts():
            with shop.db.engine.connect() as one, shop.db.engine.connect() as two:
                return [each.exec_driver_sql("PRAGMA busy_timeout").scalar() for each in (one, two)]

        def view():
            timeouts()
            return shop.pay()

        shop.view(view)
        with shop.app.app_context():
            before = timeouts()
            assert_idempotent(shop.client, "POST", "/payments")
            assert timeouts() == before

    def test_duplicates_may_wait_for_the_first_to_commit(self, shop):
        @shop.app.before_request
        def log():
            with shop.db.engine.begin() as connection:
                connection.execute(sa.insert(shop.Payment))

        shop.view(lambda: ({}, 201))
        assert_idempotent(shop.client, "POST", "/payments", effects=dict, duplicates=1)

    def test_another_operation_may_follow_the_view(self, shop):
        @shop.app.after_request
        def follow(response):
            if request.path == "/payments":
                response.headers["X-Next"] = str(shop.client.post("/next", headers=NEXT).status_code)
            return response

        shop.app.add_url_rule("/next", "next", idempotent(shop.pay), methods=["POST"])
        shop.view(shop.pay)
        first = assert_idempotent(shop.client, "POST", "/payments", effects=dict, duplicates=0)
        assert first.headers["X-Next"] == "201"

    def test_a_view_may_read_on_a_second_connection(self, shop):
        def view():
            with shop.db.engine.connect() as connection:
                connection.execute(sa.select(shop.Payment)).all()
            return shop.pay()

        shop.view(view)
        crash_everywhere(shop)

    def test_a_step_that_is_not_atomic_may_write_where_it_likes(self, shop):
        def view():
            current_operation.step("a", lambda: in_a_session_of_its_own(shop))
            return {}, 201

        shop.view(view, atomic=False, on_interrupted="retry")
        assert_idempotent(shop.client, "POST", "/payments")


@pytest.mark.parametrize("store", ["hybrid"], indirect=True)
@pytest.mark.parametrize("duplicates", [0, 3])
class TestAViewThatHangsInPostgres:
    def test_is_shown_where_it_waits_for_its_own_lock(self, shop, duplicates):
        def view():
            payment = shop.pay()[0]["id"]
            with shop.db.engine.begin() as connection:
                connection.execute(sa.insert(shop.Payment).values(id=payment))
            return {}, 201

        shop.view(view)
        said = self.message(shop, duplicates)
        assert "connection.execute(sa.insert(shop.Payment).values(id=payment))" in said
        assert "a second connection of the view wants what the operation's own" in said

    def test_is_shown_where_it_waits_for_a_lock_of_the_test(self, shop, duplicates):
        order = str(uuid.uuid4())
        shop.view(lambda: shop.pay(order))
        with shop.app.app_context(), shop.db.engine.connect() as connection:
            connection.execute(sa.insert(shop.Payment).values(order=order))
            said = self.message(shop, duplicates)
        assert "self.db.session.commit()" in said
        assert "or the test has a transaction open" in said

    def test_leaves_no_lock_for_whoever_empties_the_tables(self, shop, duplicates):
        comes = threading.Event()
        shop.view(lambda: (shop.pay(), comes.wait())[0])
        self.message(shop, duplicates)
        with shop.app.app_context(), shop.db.engine.begin() as connection:
            connection.execute(sa.text("SET LOCAL lock_timeout = 5000"))
            connection.execute(sa.text("LOCK TABLE payment"))
        comes.set()

    def message(self, shop, duplicates):
        said = message(shop, duplicates=duplicates, timeout=1, effects=None)
        assert "a request has not returned within 1 s. It is here:" in said
        return said

    @pytest.fixture(autouse=True)
    def ended(self, shop):
        yield
        for thread in threading.enumerate():
            if thread.name == NAME:
                thread.join()
