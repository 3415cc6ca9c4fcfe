"""Connections and cursors in the wrapper of an agent for tracing, or of a class of its own.

The wrappers are made like those of the agents, which ``make agents`` tests themselves.
"""

import psycopg
import pytest
import sqlalchemy as sa
import wrapt
from psycopg2 import extensions
from psycopg2.extras import DictCursor

from flask_idempotency import current_operation
from tests.drivers import connect, ways
from tests.integration.views import protect

heard = []
DICTS = {
    "psycopg2": {"cursor_factory": DictCursor},
    "psycopg": {"row_factory": psycopg.rows.dict_row},
}


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

    def execute(self, query, params=None):
        heard.append(str(query))
        extensions.cursor.execute(self, query, params)


class CursorOfPsycopg(psycopg.Cursor):
    def execute(self, query, params=None, **how):
        heard.append(str(query))
        return super().execute(query, params, **how)


WAYS = ways(  # so many wrappers around a connection, and a cursor class below them
    "way",
    {"twice": (2, None)},
    psycopg2={"class": (0, CursorOfAnAgent), "dicts": (1, DictCursor)},
    psycopg={"class": (1, CursorOfPsycopg)},
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
    wrappers, cursor = way

    def create():
        connection = connect(url, driver, **({"cursor_factory": cursor} if cursor else {}))
        for _ in range(wrappers):
            connection = TracedConnection(connection)
        return connection

    options = {"creator": create, "pool_size": 1, "max_overflow": 0}
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
        for raw in pooled, pooled.driver_connection:
            with raw.cursor() as cursor:
                cursor.execute("select amount from payment where amount > %s", (471101,))
                rows.append([row[0] for row in cursor])
        with pooled.cursor(**DICTS[driver]) as cursor:
            cursor.execute("select 7 as amount")
            rows.append(cursor.fetchone()["amount"])
        pooled.cursor().execute("insert into payment (amount) values (%s)", (471103,))
        session.commit()
        current_operation.connection.execute(sa.insert(world.Payment).values(amount=471104))
        return rows, 201

    protect(world, pay)
    heard.clear()
    first = world.post(key="key-canary")
    assert first.json == ["alice", [471101, 471102], [471102], [471102], 7]
    assert_replayed(first, world.post(key="key-canary"))
    assert world.post(key="key-canary", json={"amount": 6}).status_code == 422
    assert world.sql("select array_agg(amount order by amount) from payment") == [
        ([471101, 471102, 471103, 471104],)
    ]
    ours = ("4711", "canary", "idempotency", "alice")
    assert [text for text in heard if any(word in text for word in ours)] == []
    times = way[0] + (way[1] not in (None, DictCursor))
    assert len([text for text in heard if "payment (amount, note)" in text]) == 3 * times
    world.assert_clean()
