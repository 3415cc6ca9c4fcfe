"""Real servers for the whole session, and an application on a fresh database for each test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Flask, g, request
from flask.testing import FlaskClient
from flask_sqlalchemy import SQLAlchemy
from werkzeug.test import TestResponse

import servers
from flask_idempotency import Idempotency
from servers.postgresql import drop_database

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    with servers.postgres(fsync=False, settings={"max_connections": 200}) as server:
        yield server


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Any]:
    with servers.redis() as server:
        yield server


@pytest.fixture(params=["hybrid", "postgres"])
def store(request: pytest.FixtureRequest) -> str:
    """Every test that uses an application runs once for each store."""
    return request.param


@dataclass
class World:
    """An application with one model, its extension and a client."""

    app: Flask
    db: SQLAlchemy
    idempotency: Idempotency
    Payment: Any
    store: str

    @property
    def client(self) -> FlaskClient:
        return self.app.test_client()

    def post(
        self,
        path: str = "/payments",
        key: str | None = "key-1",
        *,
        user: str = "alice",
        **kwargs: Any,
    ) -> TestResponse:
        """One request; ``key=None`` sends no key. The body is ``{"amount": 5}`` unless given."""
        headers = [*kwargs.pop("headers", {}).items(), ("X-User", user)]
        if key is not None:
            headers.append(("Idempotency-Key", key))
        if not {"json", "data"} & kwargs.keys():
            kwargs["json"] = {"amount": 5}
        method = kwargs.pop("method", "POST")
        return self.client.open(path, method=method, headers=headers, **kwargs)

    def count(self, table: str = "payment") -> int:
        """Rows in the database, seen from outside."""
        return self.sql(f"select count(*) from {table}")[0][0]

    def sql(self, statement: str, **values: Any) -> list[Any]:
        """Run SQL on a connection of its own, committed."""
        with self.app.app_context(), self.db.engine.begin() as connection:
            result = connection.execute(sa.text(statement), values)
            return list(result) if result.returns_rows else []

    def records(self) -> list[Any]:
        """The records, oldest first."""
        return self.sql("select * from idempotency_record order by created_at")


@pytest.fixture
def make_world(postgres: Any, redis_server: Any, store: str) -> Iterator[Callable[..., World]]:
    """A function that builds a :class:`World` on a database of its own; settings by name."""
    worlds: list[World] = []
    first = next(_numbers)

    def make(
        *, init: dict[str, Any] | None = None, db: SQLAlchemy | None = None, **config: Any
    ) -> World:
        db = db or SQLAlchemy()

        class Payment(db.Model):  # type: ignore[name-defined, misc]
            id = sa.Column(sa.Integer, primary_key=True)
            amount = sa.Column(sa.Integer, nullable=False)
            note = sa.Column(sa.String, unique=True)

        app = Flask("shop")
        app.config["SQLALCHEMY_DATABASE_URI"] = postgres.database(f"test_{next(_numbers)}")
        if store == "hybrid":
            app.config["IDEMPOTENCY_REDIS_URL"] = redis_server.url
        app.config["IDEMPOTENCY_STORE"] = store
        app.config.update(config)
        db.init_app(app)

        @app.before_request
        def sign_in() -> None:
            g.account_id = request.headers.get("X-User")

        idempotency = Idempotency()
        options = {"scope": lambda: g.account_id, **(init or {})}
        idempotency.init_app(app, db, **options)
        with app.app_context():
            db.create_all()
        worlds.append(World(app, db, idempotency, Payment, store))
        return worlds[-1]

    yield make
    for world in worlds:
        with world.app.app_context():
            for engine in world.db.engines.values():
                assert engine.pool.checkedout() == 0, "a connection was not given back"
                engine.dispose()
    for number in range(first + 1, next(_numbers)):  # thousands of files each, on a slow disk
        drop_database(postgres.dsn, f"test_{number}")


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """The usual application, without views yet."""
    return make_world()
