"""Connections and cursors in the wrapper of an agent for tracing, or of a class of its own.

The wrappers are made like those of the agents, which ``make agents`` tests themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import psycopg
import psycopg2.sql
import pytest
import sqlalchemy as sa
import wrapt
from psycopg2 import extensions
from psycopg2.extras import DictCursor

from flask_idempotency import current_operation, idempotent
from tests.drivers import PSYCOPG2, connect, ways
from tests.integration.views import protect


class TracedCursor(wrapt.ObjectProxy):
    heard: ClassVar[list] = []

    def execute(self, query, *args, **kwargs):
        self.heard.append((query, *args))
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
    def execute(self, query, vars=None):  # noqa: A002
        TracedCursor.heard.append((query, vars))
        return super().execute(query, vars)


class CursorOfTheManual(extensions.cursor):
    """As psycopg2's documentation writes one: it names the class above it."""

    def execute(self, query, vars=None):  # noqa: A002
        TracedCursor.heard.append((query, vars))
        extensions.cursor.execute(self, query, vars)


class CursorOfPsycopg(psycopg.Cursor):
    def execute(self, query, params=None, **how):
        TracedCursor.heard.append((query, params))
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
    {"wrapped": Way(1), "twice": Way(2)},
    psycopg2={
        "class": Way(0, CursorOfAnAgent),
        "manual": Way(0, CursorOfTheManual),
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
        register(kind, vars(scope)["_connection"] if isinstance(scope, Double) else scope)

    monkeypatch.setattr(extensions, "register_type", register_type)


class Double:
    """Stands for a connection, and has no attribute of psycopg2's own."""

    def __init__(self, connection):
        self._connection = connection

    def __getattr__(self, name):
        if name == "cursor_factory":
            raise AttributeError(name)
        return getattr(self._connection, name)


class OpaqueCursor:
    """Stands for a cursor, and does not say for which."""

    def __init__(self, cursor):
        self._cursor = cursor

    def __getattr__(self, name):
        return getattr(self._cursor, name)

    def __iter__(self):
        return iter(self._cursor)


class Opaque(Double):
    """Stands for a connection, has its attributes, and makes cursors of its own."""

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def __setattr__(self, name, value):
        target = self.__dict__ if name == "_connection" else None
        target.update({name: value}) if target is not None else setattr(self._connection, name, value)

    def cursor(self, *args, **kwargs):
        return OpaqueCursor(self._connection.cursor(*args, **kwargs))


@pytest.fixture
def world(way, driver, make_world, monkeypatch):
    monkeypatch.setattr(TracedCursor, "heard", [])
    made = make_world()
    url = made.app.config["SQLALCHEMY_DATABASE_URI"]
    with made.app.app_context():
        made.db.engine.dispose()
    options = {"creator": lambda: way(url, driver), "pool_size": 1, "max_overflow": 0}
    return make_world(SQLALCHEMY_DATABASE_URI=url, SQLALCHEMY_ENGINE_OPTIONS=options)


def heard(word):
    return [call for call in TracedCursor.heard if word in str(call[0])]


@WAYS
def test_a_view_runs_once_and_its_writes_commit_with_the_record(world, add_view, assert_replayed):
    runs = add_view(world)
    first = world.post()
    assert first.status_code == 201
    assert_replayed(first, world.post())
    assert world.post(json={"amount": 6}).status_code == 422
    assert (runs, world.count()) == ([1], 1)
    world.assert_clean()


@WAYS
def test_the_agent_hears_what_the_view_sent_and_nothing_of_ours(world, way):
    def pay():
        session = world.db.session
        session.add(world.Payment(amount=4711, note="first"))
        session.commit()
        session.add(world.Payment(amount=4712, note="second"))
        session.commit()
        return {}, 201

    protect(world, pay)
    TracedCursor.heard.clear()
    assert world.post(key="key-canary").status_code == 201
    assert world.count() == 2
    texts = [str(call[0]) for call in TracedCursor.heard]
    assert not [text for text in texts if "471" in text or "canary" in text or "idempotency" in text]
    assert len(heard("INSERT INTO payment")) == 2 * way.layers


@WAYS
def test_everything_a_view_does_with_cursors_works(world, driver):
    sql = {"psycopg2": psycopg2, "psycopg": psycopg}[driver].sql
    dicts = {
        "psycopg2": {"cursor_factory": DictCursor},
        "psycopg": {"row_factory": psycopg.rows.dict_row},
    }[driver]

    def pay():
        session, rows = world.db.session, []
        session.add_all([world.Payment(amount=n) for n in range(5)])
        session.commit()
        with session.begin_nested():
            session.add(world.Payment(amount=5))
        session.commit()
        session.add(world.Payment(amount=9))
        session.flush()
        session.rollback()
        streamed = sa.select(world.Payment.amount).execution_options(yield_per=2)
        rows.append(sorted(session.scalars(streamed)))
        session.commit()
        pooled = session.connection().connection
        for raw in pooled, pooled.driver_connection:
            with raw.cursor() as cursor:
                cursor.execute(
                    sql.SQL("select {} from payment where amount > %s order by 1").format(
                        sql.Identifier("amount")
                    ),
                    (3,),
                )
                rows.append([row[0] for row in cursor])
            with raw.cursor(**dicts) as cursor:
                cursor.execute("select 7 as amount")
                rows.append(cursor.fetchone()["amount"])
        pooled.cursor().execute("insert into payment (amount) values (6)")
        session.commit()
        current_operation.connection.execute(sa.insert(world.Payment).values(amount=7))
        return rows, 201

    protect(world, pay)
    assert world.post().json == [[0, 1, 2, 3, 4, 5], [4, 5], 7, [4, 5], 7]
    assert sorted(world.sql("select amount from payment")) == [(n,) for n in range(8)]


@WAYS
def test_an_unprotected_view_may_ask_for_its_connection(world):
    @world.app.post("/plain")
    def plain():
        with world.db.session.connection().connection.cursor() as cursor:
            cursor.execute("insert into payment (amount) values (%s) returning amount", (3,))
            amount = cursor.fetchone()[0]
        world.db.session.commit()
        return {"amount": amount}, 201

    assert world.post("/plain", key=None).json == {"amount": 3}
    assert heard("insert into payment")
    assert world.count() == 1


@WAYS
@pytest.mark.parametrize("atomic", [True, False])
def test_what_a_cursor_sets_before_the_view_reaches_it(world, atomic):
    tenant = sa.text("select current_setting('app.tenant', true)")

    @world.app.before_request
    def sign_in():
        with world.db.session.connection().connection.cursor() as cursor:
            cursor.execute("select set_config('app.tenant', %s, true)", ("alice",))

    protect(world, lambda: ({"tenant": world.db.session.scalar(tenant)}, 201), atomic=atomic)
    assert world.post().json == {"tenant": "alice"}
    assert not heard("alice"), "the value is bound, and stays so"


@WAYS
def test_a_listener_of_the_pool_is_given_what_the_pool_has(world):
    seen = []

    def listen(driver, _record, _pooled):
        with driver.cursor() as cursor:
            cursor.execute("set application_name = 'listened'")
        seen.append(type(driver))

    with world.app.app_context():
        engine = world.db.engine
    sa.event.listen(engine, "checkout", listen)
    show = sa.text("show application_name")
    protect(world, lambda: ({"name": world.db.session.scalar(show)}, 201))
    assert world.post().json == {"name": "listened"}
    assert len(set(seen)) == 1


@PSYCOPG2  # psycopg is asked for its types by its own connection only
@pytest.mark.parametrize("kind", [Double, Opaque])
def test_a_double_is_left_alone(make_world, kind, driver):
    world = make_world()
    url = world.app.config["SQLALCHEMY_DATABASE_URI"]
    world = make_world(
        SQLALCHEMY_DATABASE_URI=url,
        SQLALCHEMY_ENGINE_OPTIONS={"creator": lambda: kind(connect(url, driver))},
    )

    @world.app.post("/plain")
    def plain():
        world.db.session.connection().connection.cursor().execute("select 1")
        return {}, 201

    assert world.post("/plain", key=None).status_code == 201


@WAYS
def test_a_step_and_a_take_over_work(world):
    attempts = []

    @world.app.post("/payments")
    @idempotent(atomic=False, on_interrupted="retry")
    def pay():
        attempts.append(current_operation.attempt)
        current_operation.step(
            "save", lambda: world.db.session.add(world.Payment(amount=1)), atomic=True
        )
        return {}, 201

    assert [world.post().status_code for _ in range(2)] == [201, 201]
    assert (attempts, world.count()) == ([1], 1)
