"""What is private in other packages, or differs between releases of Flask: one file each uses it.

Here is also whether it is as expected. ``make lowest`` asks Flask 3.0 and SQLAlchemy 2.0.26, ``make
test`` the newest releases, and ``make newest`` the branch that becomes Flask 3.2.
"""

import ast
import gc
import importlib
import re
import sys
from functools import cache
from pathlib import Path
from weakref import ref

import pytest
import sqlalchemy as sa
from flask import Flask, after_this_request, g, request
from sqlalchemy.orm import Session

import flask_idempotency
from flask_idempotency.private import (
    connections,
    continue_nested,
    functions_after_request,
    is_block,
    needed_request,
    present_context,
    present_request,
    savepoint_of,
)
from flask_idempotency.stores.own_pool import apart

ROOT = Path(flask_idempotency.__file__).parent

DIFFERS = {"app_ctx", "request_ctx", "AppContext", "RequestContext"}
"""Public, but one thing in Flask 3.2 and two before, or deprecated there."""

DIFFERS |= {f"do_teardown_{of}" for of in ("appcontext", "request")}
DIFFERS |= {"handle_exception", "handle_http_exception", "handle_user_exception", "log_exception"}
DIFFERS |= {"dispatch_request", "full_dispatch_request", "preprocess_request", "process_response"}
DIFFERS |= {"finalize_request", "make_default_options_response"}
"""The methods of an application whose first argument is the context from Flask 3.2 on."""

USED = {
    "flask": {
        "private.py": {"_cv_app", "_cv_request", "_after_request_functions", "process_response"},
        "testing/operations.py": {"_context_stack", "_new_contexts"},  # of its test client
    },
    "werkzeug": {"web/request.py": {"_cached_data"}},
    "sqlalchemy": {"private.py": {"_connections", "_savepoint", "_trans_context_manager"}},
    "psycopg": {},
    "psycopg2": {},
    "flask_sqlalchemy": {},
    "flask_sqlalchemy_lite": {},
}
"""What is private in each package, by the file that uses it."""

OF_OTHERS = {
    "integrations/wtf.py": {"_value"},  # WTForms'
    "private.py": {"_get_current_object"},  # public in werkzeug.local
    "stores/postgres/store.py": {"_asdict"},  # of named tuples
    "web/routes.py": {"dispatch_request"},  # of a class of views
}
"""What others call the same."""


@cache
def private_names(package):
    """Every private name in the sources of a package, that are not tests."""
    sources = Path(importlib.import_module(package).__file__).parent.rglob("*.py")
    texts = (path.read_text("utf-8") for path in sources if "testing" not in path.parts)
    found = {name for text in texts for name in re.findall(r"\b_[a-z]\w*", text)} - set(dir(sys))
    return found | (DIFFERS if package == "flask" else set())


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


@pytest.fixture
def plain():
    """Not called ``app``: pytest-flask pushes a context for that."""
    return Flask(__name__)


def test_the_present_request_and_its_context_are_those_of_flasks_proxies(plain):
    assert present_request() is present_context() is None
    with plain.app_context():
        assert present_request() is None
        assert present_context() is g._get_current_object()
        with plain.test_request_context():
            here = present_request()
            assert here is needed_request() is request._get_current_object()
            assert present_context() is g._get_current_object()
            with plain.app_context(), plain.app_context():
                assert present_request() is here
                assert present_context() is g._get_current_object()
        with pytest.raises(RuntimeError, match="request"):
            needed_request()


def test_a_request_keeps_what_was_registered_for_after_it_in_one_list_in_their_order(plain):
    with plain.test_client() as client:

        @plain.get("/")
        def view():
            functions = functions_after_request()
            assert functions == []
            added = [lambda response: response, lambda _response: pytest.fail("it was taken away")]
            for function in added:
                after_this_request(function)
            assert functions_after_request() is functions
            assert functions == added
            functions.clear()
            return "as it was"

        assert client.get("/").text == "as it was"


@pytest.fixture
def engine():
    engine = sa.create_engine("sqlite://", poolclass=sa.QueuePool)
    yield engine
    engine.dispose()


def test_a_session_knows_the_connections_of_its_transaction(engine):
    with Session(engine) as session:
        assert connections(session) == set()
        session.begin()
        assert connections(session) == set()
        connection = session.connection()
        assert connections(session) == {connection}
        session.commit()
        assert connections(session) == set()


@pytest.mark.parametrize("how", ["commit", "rollback", "close"])
def test_a_session_goes_on_in_a_savepoint_of_a_transaction_that_outlives_its_own(engine, how):
    with Session(engine) as session:
        connection = session.connection()
        outer, above = connection.get_transaction(), session.get_transaction()
        continue_nested(session, connection)
        assert session.connection() is connection
        nested = connection.get_nested_transaction()
        with session.begin_nested():  # SQLAlchemy takes it for one that it has begun
            assert session.scalar(sa.text("select 1")) == 1
        assert session.get_transaction() is above
        getattr(session, how)()
        assert not nested.is_active
        assert outer.is_active
        assert connection.get_nested_transaction() is None
        outer.rollback()


def test_a_nested_transaction_knows_the_name_of_its_savepoint(engine):
    names = []
    engine.dialect.do_savepoint = lambda _connection, name: names.append(name)
    engine.dialect.do_rollback_to_savepoint = engine.dialect.do_release_savepoint = lambda *_: None
    with engine.connect() as connection, connection.begin():
        assert savepoint_of(connection.begin_nested()) == names[-1]
        assert savepoint_of(connection.begin_nested()) == names[-1]
        assert len(names) == 2


def test_a_nested_transaction_knows_the_block_that_ends_it(engine):
    with engine.connect() as connection, connection.begin():
        assert not is_block(connection.begin_nested())
        with connection.begin_nested() as nested:
            assert is_block(nested)
            with connection.begin_nested():
                assert not is_block(nested)
            assert is_block(nested)


def test_an_engine_beside_another_opens_connections_as_that_does_and_ends_with_it():
    opened, pinged = [], []

    def open_one():
        opened.append(engine.dialect.loaded_dbapi.connect(":memory:", check_same_thread=False))
        return opened[-1]

    engine = sa.create_engine(
        "sqlite://", creator=open_one, poolclass=sa.QueuePool, pool_size=1, max_overflow=0
    )
    sa.event.listen(engine, "checkout", lambda driver, *_more: pinged.append(driver))
    beside = apart(engine)
    assert opened == []
    with beside.connect() as connection:
        assert opened == pinged == [connection.connection.dbapi_connection]
    assert beside.pool.size() == 1
    assert (beside.pool.checkedin(), engine.pool.checkedin()) == (1, 0)
    for _ in range(2):  # also with the pool that the first has left
        engine.dispose()
        assert beside.pool.checkedin() == 0
        beside.connect().close()
    beside.dispose()
    assert not engine._has_events  # which would cost each statement something


def test_an_engine_beside_another_keeps_it_no_longer_than_whoever_uses_both():
    engine = sa.create_engine("sqlite://", poolclass=sa.QueuePool)
    beside = apart(engine)
    beside.connect().close()
    gone = ref(engine), ref(beside)
    del engine, beside
    gc.collect()
    assert [each() for each in gone] == [None, None]
