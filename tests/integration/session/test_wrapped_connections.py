"""Connections and cursors in the wrapper of an agent for tracing, or of a class of its own.

The wrappers are made like those of the agents, which ``make agents`` tests themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
import psycopg2.sql
import pytest
import sqlalchemy as sa
import wrapt
from psycopg2 import extensions
from psycopg2.extras import DictCursor

from flask_idempotency import current_operation, idempotent
from tests.drivers import connect, ways
from tests.integration.views import protect

heard: list = []


class TracedCursor(wrapt.ObjectProxy):
    def execute(self, query, *args, **kwargs):
        heard.append(str(query))
        return self.__wrapped__.execute(query, *args, **kwargs)

    def __enter__(self):
        self.__wrapped__.__enter__()
        return self

    def __iter__(self):
        return iter(self.__wrapped__)


class TracedConnection(wrapt.ObjectProxy):
    def cursor(self, *args, **kwargs):
        return TracedCursor(self.__wrapped__.cursor(*args, **kwargs))


class CursorOfAnAgent(extensions.cursor):
    """As psycopg2's documentation writes one: it names the class above it."""

    def execute(self, query, vars=None):  # noqa: A002
        heard.append(str(query))
        extensions.cursor.execute(self, query, vars)


class CursorOfPsycopg(psycopg.Cursor):
    def execute(self, query, params=None, **how):
        heard.append(str(query))
        return super().execute(query, params, **how)


@dataclass(frozen=True)
class Way:
    """So many wrappers around a connection, and a cursor class below them."""

    wrappers: int
    cursor: type | None = None

    @property
    def layers(self):
        """How often a statement is heard."""
        return self.wrappers + (self.cursor not in (None, DictCursor))

    def __call__(self, url, driver):
        connection = connect(url, driver, **({"cursor_factory": self.cursor} if self.cursor else {}))
        for _ in range(self.wrappers):
            connection = TracedConnection(connection)
        return connection


WAYS = ways(
    "way",
    {"twice": Way(2)},
    psycopg2={
        "class": Way(0, CursorOfAnAgent),
        "both": Way(1, CursorOfAnAgent),
        "dicts": Way(1, DictCursor),
    },
    psycopg={"class": Way(0, CursorOfPsycopg), "both": Way(1, CursorOfPsycopg)},
)


@pytest.fixture(autouse=True)
def unwrapping(monkeypatch):
    """The functions in C want psycopg2's own connection. Agents see to that, too."""
    register = extensions.register_type

    def register_type(kind, scope=None):
        while hasattr(scope, "__wrapped__"):
            scope = scope.__wrapped__
        register(kind, scope)

    monkeypatch.setattr(extensions, "register_type", register_type)


@pytest.fixture
def world(way, driver, make_world):
    made = make_world()
    url = made.app.config["SQLALCHEMY_DATABASE_URI"]
    with made.app.app_context():
        made.db.engine.dispose()
    options = {"creator": lambda: way(url, driver), "pool_size": 1, "max_overflow": 0}
    world = make_world(SQLALCHEMY_DATABASE_URI=url, SQLALCHEMY_ENGINE_OPTIONS=options)

    @world.app.before_request
    def sign_in():
        with world.db.session.connection().connection.cursor() as cursor:
            cursor.execute("select set_config('app.tenant', %s, true)", ("alice",))

    return world


@WAYS
def test_everything_a_view_does_with_cursors_works_and_the_agent_hears_nothing_of_ours(
    world, way, driver, assert_replayed
):
    sql = {"psycopg2": psycopg2, "psycopg": psycopg}[driver].sql
    dicts = {
        "psycopg2": {"cursor_factory": DictCursor},
        "psycopg": {"row_factory": psycopg.rows.dict_row},
    }[driver]

    def pay():
        session = world.db.session
        rows = [session.scalar(sa.text("select current_setting('app.tenant', true)"))]
        session.add(world.Payment(amount=471101))
        session.commit()
        with session.begin_nested():
            session.add(world.Payment(amount=471102))
        session.commit()
        session.add(world.Payment(amount=471109))
        session.flush()
        session.rollback()
        streamed = sa.select(world.Payment.amount).execution_options(yield_per=2)
        rows.append(sorted(session.scalars(streamed)))
        session.commit()
        pooled = session.connection().connection
        above = sql.SQL("select {} from payment where amount > %s").format(sql.Identifier("amount"))
        for raw in pooled, pooled.driver_connection:
            with raw.cursor() as cursor:
                cursor.execute(above, (471101,))
                rows.append([row[0] for row in cursor])
            with raw.cursor(**dicts) as cursor:
                cursor.execute("select 7 as amount")
                rows.append(cursor.fetchone()["amount"])
        pooled.cursor().execute("insert into payment (amount) values (%s)", (471103,))
        session.commit()
        current_operation.connection.execute(sa.insert(world.Payment).values(amount=471104))
        return rows, 201

    protect(world, pay)
    heard.clear()
    first = world.post(key="key-canary")
    assert first.json == ["alice", [471101, 471102], [471102], 7, [471102], 7]
    assert_replayed(first, world.post(key="key-canary"))
    assert world.post(key="key-canary", json={"amount": 6}).status_code == 422
    assert world.sql("select array_agg(amount order by amount) from payment") == [
        ([471101, 471102, 471103, 471104],)
    ]
    ours = ("4711", "canary", "idempotency", "alice")
    assert [text for text in heard if any(word in text for word in ours)] == []
    assert len([text for text in heard if "payment (amount, note)" in text]) == 3 * way.layers
    world.assert_clean()


@WAYS
def test_a_lease_a_step_and_an_unprotected_view_work(world):
    attempts = []

    @world.app.post("/payments")
    @idempotent(atomic=False, on_interrupted="retry")
    def pay():
        attempts.append(current_operation.attempt)
        payment = world.Payment(amount=1)
        current_operation.step("save", lambda: world.db.session.add(payment), atomic=True)
        return {}, 201

    @world.app.post("/plain")
    def plain():
        with world.db.session.connection().connection.cursor() as cursor:
            cursor.execute("insert into payment (amount) values (%s) returning amount", (3,))
            amount = cursor.fetchone()[0]
        world.db.session.commit()
        return {"amount": amount}, 201

    assert [world.post().status_code for _ in range(2)] == [201, 201]
    assert (attempts, world.count()) == ([1], 1)
    assert world.post("/plain", key=None).json == {"amount": 3}


@WAYS
def test_a_listener_of_the_pool_is_given_what_the_pool_has(world):
    seen = []

    def listen(driver, _record, _pooled):
        with driver.cursor() as cursor:
            cursor.execute("set application_name = 'listened'")
        seen.append(type(driver))

    with world.app.app_context():
        sa.event.listen(world.db.engine, "checkout", listen)
    protect(world, lambda: [world.db.session.scalar(sa.text("show application_name"))])
    assert world.post().json == ["listened"]
    assert len(set(seen)) == 1
