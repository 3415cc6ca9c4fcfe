"""Real servers for the whole session, and an application on a fresh database for each test.

Also what tests of an application share: the usual view, a gate inside it, and what they look for.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from flask import Flask, g, request
from flask.testing import FlaskClient
from flask_sqlalchemy import SQLAlchemy
from werkzeug.test import TestResponse

import servers.urls
import tests.sessions
from flask_idempotency import Idempotency, current_operation, idempotent
from flask_idempotency.stores import own_pool
from flask_idempotency.stores.postgres import statements
from flask_idempotency.web import purging, signals
from tests.databases import Databases
from tests.drivers import with_driver
from tests.sessions import make_db, protect
from tests.stores import prefix_of
from tests.waiting import wait_until

PATIENCE_SECONDS = 10
"""How long a test waits for what ought to happen at once. Longer than any machine is slow."""

NOT_COMPARED = {"date", "idempotent-replayed"}

# pytest-flask's server is a function in a function, for a fork alone: no default since Python 3.14.
multiprocessing.set_start_method("fork", force=True)

# What a shell may have set for other programs: a proxy would be asked for servers on this machine, and
# without bytecode each of the hundreds of processes that tests start would compile every file anew.
_OTHERS = r"FLASK_|GUNICORN_|WEB_CONCURRENCY$|\w+_proxy$|PYTHONDONTWRITEBYTECODE$"
for _name in tuple(os.environ):
    if re.match(_OTHERS, _name, re.IGNORECASE):
        del os.environ[_name]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--driver", default="psycopg2", help="for tests that name none: psycopg")
    parser.addoption("--sessions", default=tests.sessions.usual, choices=tests.sessions.KINDS)


def pytest_configure(config: pytest.Config) -> None:
    servers.urls.driver = config.getoption("driver")
    tests.sessions.usual = config.getoption("sessions")


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> str:
    """SQLAlchemy's name of the driver of the applications: see ``tests.drivers``."""
    return getattr(request, "param", servers.urls.driver)


@pytest.fixture(scope="module")
def nobody_listens() -> None:
    """For tests that count: another test's application may still be there, and hear the signals."""
    for signal in signals._signals.values():
        signal._clear_state()


class _Failing(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise LookupError(record.name)


@pytest.fixture(params=["names", "filter", "handler"])
def failing_log(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An application whose logging fails with each of our lines, in one of three ways."""
    caplog.set_level(logging.DEBUG, "flask_idempotency")
    usual = logging.getLogRecordFactory()

    def make(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = usual(*args, **kwargs)
        names = "url", "method", "status", "id", "operation", "by", "seconds"
        vars(record).update(dict.fromkeys(names, "of the application"))
        return record

    if request.param == "names":  # logging refuses to overwrite an attribute
        monkeypatch.setattr(logging, "_logRecordFactory", make)
        return
    failing = _Failing()
    for name in "flask_idempotency", "flask_idempotency.client":
        logger = logging.getLogger(name)
        if request.param == "filter":
            monkeypatch.setattr(logger, "filters", [failing.emit])
        else:
            monkeypatch.setattr(logger, "handlers", [failing])


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    settings = {"max_connections": 200, "autovacuum_naptime": "5min"}  # a process for each database
    with servers.postgres(fsync=False, settings=settings) as server:
        yield server


@pytest.fixture(autouse=True, scope="session")
def _no_purge_by_chance() -> None:
    """Nothing is deleted after one response in fifty, unless a test says so."""
    purging.Purge.every = 10**9


@pytest.fixture(scope="session")
def databases(postgres: Any) -> Iterator[Databases]:
    """Empty databases for all tests of the session."""
    databases = Databases(postgres)
    yield databases
    databases.close()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Any]:
    with servers.redis() as server:
        yield server


@pytest.fixture
def store(request: pytest.FixtureRequest) -> str:
    """The store of the applications: the one that has all parts, unless the test names others."""
    return getattr(request, "param", "hybrid")


@pytest.fixture
def patient_observing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a statement may take longer than any request should wait for observing."""
    patient = statements.OBSERVING.replace("100ms", f"{PATIENCE_SECONDS}s")
    monkeypatch.setattr(statements, "OBSERVING", patient)
    monkeypatch.setattr(own_pool, "BRIEF_SECONDS", PATIENCE_SECONDS)


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

    def wait_until_blocked(self, count: int = 1) -> None:
        """Return when so many connections wait for others' locks, as Postgres sees it."""
        waiting = (
            "select count(*) from pg_stat_activity"
            " where datname = current_database() and wait_event_type = 'Lock'"
        )
        wait_until(lambda: self.sql(waiting)[0][0] >= count, f"{count} wait for a lock")

    def assert_clean(self) -> None:
        """Every connection is back in its pool, and the database has no transaction open."""
        with self.app.app_context():
            for engine in self.db.engines.values():
                assert engine.pool.checkedout() == 0, "a connection was not given back"
        still_open = (
            "select pid, state, query from pg_stat_activity where datname = current_database()"
            " and backend_type = 'client backend' and xact_start is not null"
            " and pid <> pg_backend_pid()"
        )
        wait_until(lambda: not self.sql(still_open), "no transaction is open")


@pytest.fixture
def probing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock in Redis is never young: a duplicate asks the records at once whether its owner lives."""
    monkeypatch.setattr("flask_idempotency.stores.lock.PROBE_AFTER_SECONDS", 0)


@pytest.fixture
def make_world(
    databases: Databases, redis_server: Any, store: str, driver: str
) -> Iterator[Callable[..., World]]:
    """A function that builds a :class:`World` on a database of its own; settings by name."""
    worlds: list[World] = []
    used: list[str] = []
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushdb()  # where it knows the names of databases, which come again

    def make(
        *, init: dict[str, Any] | None = None, db: SQLAlchemy | None = None, **config: Any
    ) -> World:
        db = db or make_db()

        class Payment(db.Model):  # type: ignore[name-defined, misc]
            id = sa.Column(sa.Integer, primary_key=True)
            amount = sa.Column(sa.Integer, nullable=False)
            note = sa.Column(sa.String, unique=True)

        app = Flask("shop")
        if "SQLALCHEMY_DATABASE_URI" not in config:
            used.append(databases.take(tables=True))
            app.config["SQLALCHEMY_DATABASE_URI"] = used[-1]
        if store == "hybrid":
            app.config["IDEMPOTENCY_REDIS_URL"] = redis_server.url
        app.config["IDEMPOTENCY_STORE"] = store
        app.config.update(config)
        url = app.config["SQLALCHEMY_DATABASE_URI"]
        named = prefix_of(url) if app.config["IDEMPOTENCY_STORE"] == "redis" else None
        app.config.setdefault("IDEMPOTENCY_REDIS_PREFIX", named)
        app.config["SQLALCHEMY_DATABASE_URI"] = with_driver(url, driver)
        binds = app.config.get("SQLALCHEMY_BINDS", {})
        app.config["SQLALCHEMY_BINDS"] = {bind: with_driver(at, driver) for bind, at in binds.items()}
        db.init_app(app)

        @app.before_request
        def sign_in() -> None:
            g.account_id = request.headers.get("X-User")

        options = {"scope": lambda: g.account_id, **(init or {})}
        idempotency = protect(app, db, **options)
        with app.app_context():
            if len(db.metadatas) > 1 or not databases.has(db.metadata.tables, at=url):
                db.create_all()
        if used:
            databases.note(used[-1])
        worlds.append(World(app, db, idempotency, Payment, store))
        return worlds[-1]

    yield make
    for world in worlds:
        with world.app.app_context():
            for engine in world.db.engines.values():
                assert getattr(engine.pool, "checkedout", int)() == 0, "a connection was not given back"
                engine.dispose()
    for url in used:
        databases.give_back(url)


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """The usual application, without views yet."""
    return make_world()


class Gate:
    """Holds a view back in the middle until the test opens it."""

    def __init__(self) -> None:
        self._reached, self._opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        """Called by the view: say that it is there, and wait."""
        self._reached.set()
        assert self._opened.wait(PATIENCE_SECONDS), "nobody opened the gate"

    def wait_until_reached(self) -> None:
        assert self._reached.wait(PATIENCE_SECONDS), "the view did not come to the gate"

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def background(make_world: Any) -> Iterator[Callable[..., Future[Any]]]:
    """Runs a function in a thread; the world is there until it has ended."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


@pytest.fixture
def gate(background: Any) -> Iterator[Gate]:
    """A gate that opens at the latest when the test is over."""
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def add_view() -> Callable[..., list[int]]:
    """Adds the usual view to a world: it writes one payment, commits, and answers 201.

    ``during`` is called after the commit. Gives the list to which each run adds its attempt.
    """

    def add(
        world: Any,
        path: str = "/payments",
        *,
        during: Callable[[], object] = lambda: None,
        methods: tuple[str, ...] = ("POST",),
        endpoint: str = "pay",
        **options: Any,
    ) -> list[int]:
        runs: list[int] = []

        @idempotent(**options)
        def pay(**values: Any) -> Any:
            payment = world.Payment(amount=5)
            world.db.session.add(payment)
            world.db.session.commit()
            runs.append(current_operation.attempt if current_operation else 0)
            during()
            return {"id": payment.id, "run": len(runs)}, 201

        world.app.add_url_rule(path, endpoint, pay, methods=list(methods))
        return runs

    return add


@pytest.fixture
def assert_problem() -> Callable[..., dict[str, Any]]:
    """Holds an answer against RFC 9457 and the wire table; gives its members.

    Tests write "canary" into keys and bodies: it may come back in no problem, nor may a digest.
    """

    def check(response: TestResponse, status: int, name: str, *, retry: bool = False) -> Any:
        assert response.status_code == status, response.text
        assert response.content_type == "application/problem+json"
        members = response.json
        assert members is not None
        assert members["type"] == f"urn:flask-idempotency:problem:{name}"
        assert members["status"] == status
        assert members["title"]
        assert members["detail"]
        assert response.headers["Cache-Control"] == "no-store"
        assert "Idempotent-Replayed" not in response.headers
        if retry:
            assert int(response.headers["Retry-After"]) >= 1
        else:
            assert "Retry-After" not in response.headers
        everything = f"{response.headers}{response.text}"
        assert "canary" not in everything
        assert not re.search("[0-9a-fA-F]{16}", everything)
        return members

    return check


@pytest.fixture
def assert_replayed() -> Callable[[TestResponse, TestResponse], None]:
    """Holds a replay against the first answer: status, every header line, every byte."""

    def lines(response: TestResponse, *added: tuple[str, str]) -> list[tuple[str, str]]:
        compared = (line for line in response.headers if line[0].lower() not in NOT_COMPARED)
        return sorted([*compared, *added])

    def check(first: TestResponse, replay: TestResponse) -> None:
        assert "Idempotent-Replayed" not in first.headers
        assert replay.headers.get("Idempotent-Replayed") == "true", replay.text
        assert replay.status == first.status
        added = [] if "Cache-Control" in first.headers else [("Cache-Control", "no-store")]
        assert lines(replay) == lines(first, *added)
        assert replay.data == first.data

    return check
