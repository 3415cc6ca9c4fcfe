"""Fixtures of applications: their session works in a transaction that the test rolls back."""

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
def outer_transaction(world: Any) -> Iterator[sa.Connection]:
    """A connection with a transaction that is rolled back at the end."""
    with world.app.app_context():
        engine = world.db.engine
    with engine.connect() as connection:
        transaction = connection.begin()
        try:
            yield connection
        finally:
            world.db.session.remove()
            transaction.rollback()


@contextmanager
def in_place_of_its_engine(world: Any) -> Iterator[sa.Connection]:
    """Flask-SQLAlchemy's sessions ask ``db.engines``, whatever they are bound to."""
    with world.app.app_context(), outer_transaction(world) as connection:
        engines = world.db.engines
        engine, engines[None] = engines[None], connection
        try:
            yield connection
        finally:
            world.db.session.remove()
            engines[None] = engine


@contextmanager
def engine_replaced(world: Any) -> Iterator[sa.Connection]:
    """What a maintainer of Flask-SQLAlchemy advises."""
    with in_place_of_its_engine(world) as connection:
        yield connection


@contextmanager
def engine_and_session_replaced(world: Any) -> Iterator[sa.Connection]:
    with in_place_of_its_engine(world) as connection:
        options = {"bind": connection, "join_transaction_mode": "create_savepoint"}
        usual, world.db.session = world.db.session, world.db._make_scoped_session(options)
        try:
            yield connection
        finally:
            world.db.session.remove()
            world.db.session = usual


@contextmanager
def scoped_session_bound(world: Any) -> Iterator[sa.Connection]:
    with outer_transaction(world) as connection:
        world.db.session.configure(bind=connection, join_transaction_mode="create_savepoint")
        try:
            yield connection
        finally:
            world.db.session.remove()
            world.db.session.configure(
                bind=world.db.engine, join_transaction_mode="conditional_savepoint"
            )


@contextmanager
def savepoint_of_the_session(world: Any) -> Iterator[sa.Connection]:
    """From before SQLAlchemy 1.4: the session's own savepoint, begun again when it ends."""
    with in_place_of_its_engine(world) as connection:
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


@contextmanager
def savepoint_of_the_connection(world: Any) -> Iterator[sa.Connection]:
    """From SQLAlchemy 1.4: a savepoint of the connection, begun again when it has ended."""
    with in_place_of_its_engine(world) as connection:
        session, savepoints = world.db.session(), [connection.begin_nested()]

        def begin_again(*_: Any) -> None:
            if not savepoints[-1].is_active:
                savepoints.append(connection.begin_nested())

        sa.event.listen(session, "after_transaction_end", begin_again)
        try:
            yield connection
        finally:
            sa.event.remove(session, "after_transaction_end", begin_again)


RECIPES = {
    engine_replaced: "psycopg",
    engine_and_session_replaced: "psycopg2",
    scoped_session_bound: "psycopg",
    savepoint_of_the_session: "psycopg2",
    savepoint_of_the_connection: "psycopg",
}
"""With the driver that each is tested on, beside SQLite's."""


def with_recipes(*recipes: Callable[[Any], Any]) -> pytest.MarkDecorator:
    """For a test with these recipes, on PostgreSQL and on SQLite."""
    found = {
        f"{recipe.__name__}-{driver}": (recipe, driver)
        for recipe in recipes
        for driver in (RECIPES[recipe], "sqlite")
    }
    return pytest.mark.parametrize(("recipe", "driver"), found.values(), ids=found, indirect=["driver"])


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
