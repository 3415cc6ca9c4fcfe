"""Fixtures of applications, as the page on testing has them: a transaction that is rolled back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from flask_sqlalchemy import SQLAlchemy

from tests.sessions import Plain

STORES = {"psycopg2": "hybrid", "psycopg": "postgres", "sqlite": "sql"}


@pytest.fixture
def store(request: pytest.FixtureRequest, driver: str) -> str:
    return getattr(request, "param", STORES.get(driver, "postgres"))


@contextmanager
def engine_replaced(world: Any, mode: str = "create_savepoint") -> Iterator[sa.Connection]:
    """Flask-SQLAlchemy's sessions ask ``db.engines``, whatever they are bound to."""
    with world.app.app_context():
        engines, engine = world.db.engines, world.db.engine
        with engine.connect() as connection:
            transaction = connection.begin()
            world.db.session.configure(join_transaction_mode=mode)
            engines[None] = connection
            try:
                yield connection
            finally:
                world.db.session.remove()
                engines[None] = engine
                transaction.rollback()


@contextmanager
def scoped_session_bound(world: Any) -> Iterator[sa.Connection]:
    with world.db.engine.connect() as connection:
        transaction = connection.begin()
        world.db.session.configure(bind=connection, join_transaction_mode="create_savepoint")
        try:
            yield connection
        finally:
            world.db.session.remove()
            world.db.session.configure(
                bind=world.db.engine, join_transaction_mode="conditional_savepoint"
            )
            transaction.rollback()


@contextmanager
def savepoint_of_the_session(world: Any) -> Iterator[sa.Connection]:
    """The older recipe: the session's own savepoint, begun again when it ends."""
    with engine_replaced(world, "conditional_savepoint") as connection:
        session = world.db.session()  # of the test's context, which its requests share

        def begin_again(session: Any, transaction: Any) -> None:
            if transaction.nested and not transaction._parent.nested:
                session.begin_nested()

        session.begin_nested()
        sa.event.listen(session, "after_transaction_end", begin_again)
        try:
            yield connection
        finally:
            sa.event.remove(session, "after_transaction_end", begin_again)


# Beside SQLite, on a driver each.
_ON = {
    engine_replaced: "psycopg",
    scoped_session_bound: "psycopg",
    savepoint_of_the_session: "psycopg2",
}
_ALL = {f"{recipe.__name__}-{on}": (recipe, on) for recipe in _ON for on in (_ON[recipe], "sqlite")}
EACH = pytest.mark.parametrize(("recipe", "driver"), _ALL.values(), ids=_ALL, indirect=["driver"])
"""For a test with each recipe, on PostgreSQL and on SQLite."""


@pytest.fixture
def world(
    make_world: Callable[..., Any], recipe: Callable[[Any], Any], store: str, tmp_path: Any
) -> Any:
    """The application under test; Flask-SQLAlchemy's sessions, or a plain ``scoped_session``."""
    url = {"SQLALCHEMY_DATABASE_URI": f"sqlite:///{tmp_path}/shop.db"} if store == "sql" else {}
    world = make_world(db=Plain() if recipe is scoped_session_bound else SQLAlchemy(), **url)
    world.app.testing = True
    return world


@pytest.fixture
def connection(world: Any, recipe: Callable[[Any], Any]) -> Iterator[sa.Connection]:
    """The fixture of the application. After it nothing of the test is in the database."""
    with recipe(world) as connection:
        yield connection
    for table in "payment", "idempotency_record":
        assert world.count(table) == 0
