"""What is private in SQLAlchemy, in its extensions for Flask and in the drivers: one file each uses it.

Here is also whether SQLAlchemy's and its extensions' is as expected; psycopg's needs a server:
``tests/integration/test_private_psycopg.py``. For Flask: ``tests/unit/test_private_flask.py``.

``make lowest`` asks SQLAlchemy 2.0.26, and ``make test`` and ``make newest`` the newest.
"""

import ast
import importlib
import re
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import sqlalchemy as sa
from flask import Flask, g
from flask_sqlalchemy import SQLAlchemy
from flask_sqlalchemy_lite import SQLAlchemy as Lite
from sqlalchemy.orm import Session

import flask_idempotency
from flask_idempotency.drivers import sqlalchemy_private
from flask_idempotency.drivers.sqlalchemy_private import (
    StandsUnder,
    connection_to,
    connections,
    has_options,
    hear_disposed,
    pool_beside,
    put_under,
    tell_of_check_out,
)
from flask_idempotency.session.databases import most_connections
from flask_idempotency.session.sources import _LITE_SESSIONS, _options
from flask_idempotency.stores.own_pool import apart

ROOT = Path(flask_idempotency.__file__).parent
USED = {
    "sqlalchemy": {
        "drivers/sqlalchemy_private.py": {
            *("_close_special", "_connection_record", "_connections", "_creator", "_dbapi_connection"),
            *("_execution_options", "_has_events", "_max_overflow", "_pre_ping", "_recycle"),
        }
    },
    "psycopg": {"drivers/psycopg.py": {"_fetch_gen", "_names", "_prepared", "_prepared_idx"}},
    "psycopg2": {},
    "flask_sqlalchemy": {"session/sources.py": {"_engine_options"}},
    "flask_sqlalchemy_lite": {"session/sources.py": {"_engine_options", "_sqlalchemy_sessions"}},
}
"""What is private in each package, by the file that uses it."""

OF_OTHERS = {
    "integrations/wtf.py": {"_value"},  # WTForms'
    "session/flask_context.py": {"_get_current_object"},  # Flask's
}
"""What other packages call the same."""


@cache
def private_names(package):
    """Every private name in the sources of a package, that are not tests."""
    sources = Path(importlib.import_module(package).__file__).parent.rglob("*.py")
    texts = (path.read_text("utf-8") for path in sources if "testing" not in path.parts)
    return {name for text in texts for name in re.findall(r"\b_[a-z]\w*", text)} - set(dir(sys))


def names_in(path):
    """The names in a file: of its own objects, of others', and of its methods.

    Others' are what it imports, reads from them, or gives to them as keyword or text.
    """
    own, others, methods = set(), set(), set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                own.add(name)
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                others.add(name)
            case ast.ImportFrom(module=str(module), names=names):
                others.update(module.split("."), (alias.name for alias in names))
            case ast.Import(names=names):
                others.update(part for alias in names for part in alias.name.split("."))
            case ast.ClassDef(body=body):
                methods.update(each.name for each in body if isinstance(each, ast.FunctionDef))
    return own, others, methods


@cache
def used_names():
    """By file, the names that are others', and those of methods that nobody here calls: others do."""
    found = {path.relative_to(ROOT).as_posix(): names_in(path) for path in ROOT.rglob("*.py")}
    called = set().union(*(own for own, _, _ in found.values()))
    return {
        name: ((others - own) | (methods - called)) - OF_OTHERS.get(name, set())
        for name, (own, others, methods) in found.items()
    }


@pytest.mark.parametrize("package", USED)
def test_only_one_file_uses_what_is_private_in_a_package(package):
    used = {name: names & private_names(package) for name, names in used_names().items()}
    assert {name: names for name, names in used.items() if names} == USED[package]


def test_the_files_docstring_explains_each_name():
    explained = set(re.findall(r"``(_\w+)``", sqlalchemy_private.__doc__))
    assert {"drivers/sqlalchemy_private.py": explained} == USED["sqlalchemy"]


@pytest.fixture
def engine():
    engine = sa.create_engine("sqlite://", poolclass=sa.QueuePool)
    yield engine
    engine.dispose()


def test_a_session_knows_its_connections_by_what_they_were_asked_for_with(engine):
    with Session(engine) as session:
        assert connections(session) == {}
        assert connection_to(session, engine) is None
        session.begin()
        assert connections(session) == {}
        connection = session.connection()
        assert connections(session) == {engine: connection, connection: connection}
        assert connection_to(session, engine) is connection_to(session, connection) is connection
        assert connection_to(session, sa.create_engine("sqlite://")) is None
        with session.begin_nested():
            assert connection_to(session, engine) is connection
        session.commit()
        assert connections(session) == {}


def test_a_newer_sessions_public_connections_are_the_same(engine):
    """When 2.1.7 is the lowest release, they may take the place of ours."""
    with Session(engine) as session:
        connection = session.connection()
        known = getattr(session.get_transaction(), "connections", {connection})
        assert known == set(connections(session).values())


def test_options_of_a_connection_are_its_engines_until_it_has_some_of_its_own(engine):
    with Session(engine.execution_options(logging_token="theirs")) as session:
        connection = session.connection()
        assert connection.get_execution_options() == {"logging_token": "theirs"}
        assert not has_options(session)
        connection.execution_options(schema_translate_map={None: "elsewhere"})
        assert has_options(session)
    with Session(engine) as session:
        session.connection(execution_options={"logging_token": "ours"})
        assert has_options(session)


def test_what_is_under_a_connection_can_be_taken_away_and_put_back(engine):
    with Session(engine) as session:
        connection = session.connection()
        below = connection.connection
        put_under(connection, None)
        assert connection.invalidated
        with pytest.raises(sa.exc.PendingRollbackError):
            session.scalar(sa.text("select 1"))
        assert session.connection() is connection
        put_under(connection, below)
        assert connection.connection is below
        assert session.scalar(sa.text("select 1")) == 1


@pytest.mark.parametrize("in_transaction", [True, False])
def test_what_stands_under_a_connection_is_closed_with_it_once(engine, in_transaction):
    done = []

    class Below(StandsUnder):
        is_valid = True

        def rollback(self):
            done.append("rollback")

        def close(self):
            done.append("close")

    connection = engine.connect()
    if in_transaction:
        connection.begin()
    connection.connection.close()
    put_under(connection, Below())
    connection.close()
    assert done == ["rollback"] * in_transaction + ["close"]
    assert connection.closed


def test_a_connections_end_in_a_transaction_is_told_what_stands_under_it_under_another_name(engine):
    """SQLAlchemy need not know our class: it asks for the name."""
    asked = []

    class Below:
        def __getattr__(self, name):
            asked.append(name)
            return lambda *how, **more: None

    connection = engine.connect()
    connection.begin()
    connection.connection.close()
    put_under(connection, Below())
    connection.close()
    assert asked[-1] == "_close_special"


def test_a_pool_tells_its_listeners_of_a_check_out_once_more(engine):
    heard = []
    sa.event.listen(engine, "checkout", lambda *what: heard.append(what))
    with engine.connect() as connection:
        tell_of_check_out(engine.pool, connection.connection)
        first, again = heard
        assert again == first
        assert again[0] is connection.connection.dbapi_connection
        assert again[2] is connection.connection


@pytest.mark.parametrize(
    ("size", "overflow", "most"), [(3, 2, 5), (3, 0, 3), (3, -1, None), (0, 2, None)]
)
def test_a_pool_knows_how_many_connections_it_may_open(size, overflow, most):
    options = {"poolclass": sa.QueuePool, "pool_size": size, "max_overflow": overflow}
    assert most_connections(sa.create_engine("sqlite://", **options)) == most


def test_a_pool_of_another_kind_tells_no_limit():
    assert most_connections(sa.create_engine("sqlite://", poolclass=sa.NullPool)) is None


class Connections:
    """Opens connections for an engine, and notes which its dialect has pinged."""

    def __init__(self, monkeypatch, **options):
        self.opened, self.pinged = [], []
        self.engine = sa.create_engine("sqlite://", creator=self.open, **options)
        do_ping = self.engine.dialect.do_ping
        monkeypatch.setattr(
            self.engine.dialect, "do_ping", lambda one: [self.pinged.append(one), do_ping(one)]
        )

    def open(self):
        self.opened.append(self.engine.dialect.loaded_dbapi.connect(":memory:"))
        return self.opened[-1]


@pytest.fixture
def beside(monkeypatch):
    """A function that makes connections with options, and a pool of one of them beside."""
    made = []

    def make(**options):
        theirs = Connections(monkeypatch, poolclass=sa.QueuePool, **options)
        pool = pool_beside(theirs.engine, 1, 0)
        made.extend((theirs.engine, pool))
        return theirs, pool

    yield make
    for each in made:
        each.dispose()


def use(pool):
    """The driver's connection that the pool gives, which is returned to it."""
    pooled = pool.connect()
    driver = pooled.dbapi_connection
    pooled.close()
    return driver


def test_a_pool_beside_another_opens_connections_as_that_does(beside):
    theirs, pool = beside()
    pooled = pool.connect()
    assert theirs.opened == [pooled.dbapi_connection]
    with pytest.raises(sa.exc.TimeoutError):
        pool.connect()
    pooled.close()
    assert use(pool) is theirs.opened[0]
    assert theirs.engine.pool.checkedin() == 0


@pytest.mark.parametrize("pings", [True, False])
def test_a_pool_beside_another_pings_as_that_does(beside, pings):
    theirs, pool = beside(pool_pre_ping=pings)
    first = use(pool)
    assert use(pool) is first
    assert theirs.pinged == [first] * pings


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_pool_beside_another_recycles_as_that_does(beside, seconds):
    _, pool = beside(pool_recycle=seconds)
    first, begun = use(pool), time.time()
    while time.time() <= begun:
        pass  # it must be older than 0 seconds
    assert (use(pool) is not first) == (seconds == 0)


def test_hearing_of_the_end_of_an_engine_costs_its_connections_nothing(engine):
    """Without our hook SQLAlchemy would ask, at each of their steps, whether anybody hears them."""
    heard = []
    hear_disposed(engine, heard.append)
    assert not engine._has_events
    with engine.connect() as connection:
        assert not connection._has_events
    engine.dispose()
    assert heard == [engine]
    sa.event.listen(engine, "engine_disposed", heard.append)
    assert engine._has_events


def test_an_engine_beside_another_ends_with_it_and_costs_it_nothing_either(engine):
    beside = apart(engine)
    beside.connect().close()
    assert beside.pool.checkedin() == 1
    engine.dispose()
    assert beside.pool.checkedin() == 0
    assert not engine._has_events


def test_whoever_hears_an_engines_statements_goes_on_to_hear_them(engine):
    heard = []
    sa.event.listen(engine, "commit", heard.append)
    hear_disposed(engine, lambda _engine: None)
    with engine.begin() as connection:
        connection.scalar(sa.text("select 1"))
    assert heard == [connection]


def test_flask_sqlalchemy_keeps_the_options_of_all_engines():
    given = {"connect_args": {"timeout": 1}, "pool_size": 2}
    for db in (SQLAlchemy(engine_options=given), Lite(engine_options=given)):
        assert _options(db, {"pool_size": 3}) == given | {"pool_size": 3}
        assert _options(db, "sqlite://") == given  # an engine that is given by its URL alone
    for db in (SQLAlchemy(), Lite()):
        assert _options(db, None) == {}


def test_flask_sqlalchemy_lite_keeps_the_sessions_of_a_context_by_name():
    app = Flask(__name__)
    app.config["SQLALCHEMY_ENGINES"] = {"default": "sqlite://"}
    db = Lite(app)
    with app.app_context():
        assert _LITE_SESSIONS not in g
        usual, other = db.session, db.get_session("other")
        assert g.get(_LITE_SESSIONS) == {"default": usual, "other": other}
        g.pop(_LITE_SESSIONS)
        assert db.session is not usual
