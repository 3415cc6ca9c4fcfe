"""What a view writes outside the operation's transaction is named."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from flask_idempotency.testing import assert_idempotent, every_crash
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


@pytest.mark.parametrize("store", ["hybrid"], indirect=True)
@pytest.mark.parametrize("way", WAYS)
def test_a_write_past_the_session_is_named(shop, way):
    def view():
        shop.pay()
        way(shop)
        return {}, 201

    shop.view(view)
    with pytest.raises(AssertionError, match="rows of payment rose by 3, not by 2") as error:
        crash_everywhere(shop)
    assert "The retry repeated what the dead attempt had done" in str(error.value)
    assert "Write through db.session" in str(error.value)


def test_sqlite_lets_nobody_write_past_the_session(tmp_path):
    shop = Shop("sql", f"sqlite:///{tmp_path}/shop.db?timeout=0.1")
    shop.view(lambda: (shop.pay(), by_the_engine(shop))[0])
    with pytest.raises(sa.exc.OperationalError, match="database is locked"):
        assert_idempotent(shop.client, "POST", "/payments", json={})
    shop.close()


@pytest.mark.parametrize("store", ["sql", "hybrid"], indirect=True)
def test_state_of_the_process_is_named(shop):
    def view():
        shop.charges.append(1)
        return shop.pay()

    shop.view(view)
    with pytest.raises(AssertionError, match="charges rose by 2, not by 1") as error:
        crash_everywhere(shop, shop.effects)
    assert "a list or a cache in the process" in str(error.value)


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
    def test_duplicates_may_wait_for_the_first_to_commit(self, shop):
        @shop.app.before_request
        def log():
            with shop.db.engine.begin() as connection:
                connection.execute(sa.insert(shop.Payment))

        shop.view(lambda: ({}, 201))
        assert_idempotent(shop.client, "POST", "/payments", effects=dict, duplicates=1)

    def test_a_view_may_read_on_a_second_connection(self, shop):
        def view():
            with shop.db.engine.connect() as connection:
                connection.execute(sa.select(shop.Payment)).all()
            return shop.pay()

        shop.view(view)
        crash_everywhere(shop)
