"""The provider, and the shop under gunicorn on real servers."""

from __future__ import annotations

import http.client
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import psutil
import psycopg2
import pytest
from flask import Flask

import servers
from flask_idempotency.cli import cli
from laboratory import running
from tests.external import shop as shop_program
from tests.external.provider import Provider
from tests.integration.apps import gunicorn_conf
from tests.waiting import wait_until

ONCE = (1, 1, 1)
"""Charges, rows and mails of an order that is done."""


@dataclass
class Reply:
    """What a client was told; status 0: the connection broke."""

    status: int
    body: str = ""
    retry_after: int | None = None
    replayed: bool = False

    @property
    def told(self) -> str:
        """The status and, of a problem, its name."""
        problem = json.loads(self.body).get("type", "") if self.body else ""
        return f"{self.status} {problem.rpartition(':')[2]}".strip()


@dataclass
class Shop:
    """A running shop, from outside."""

    url: str
    pid: int
    environment: dict[str, str]
    provider: Provider
    app: Flask
    """The same application in this process, for commands."""

    def buy(self, order: str, policy: str = "retry", **headers: str) -> Reply:
        """One request on a connection of its own; ``order`` is its key. ``x_kill`` is X-Kill."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        sent |= {"Idempotency-Key": order, "Authorization": "Bearer alice"}
        try:
            answer = running.send(self.url, "POST", f"/{policy}", sent, "")
        except (OSError, http.client.HTTPException):
            return Reply(0)
        after = answer.headers["Retry-After"]
        replayed = "Idempotent-Replayed" in answer.headers
        return Reply(answer.status, answer.body, after and int(after), replayed)

    def sql(self, statement: str, *values: Any) -> list[Any]:
        dsn = servers.plain_dsn(self.environment["DATABASE_URL"])
        with closing(psycopg2.connect(dsn)) as connection, connection.cursor() as cursor:
            cursor.execute(statement, values)
            return cursor.fetchall()

    def wait_for_leases_to_end(self) -> None:
        running = "SELECT FROM idempotency_record WHERE lease_expires_at > clock_timestamp()"
        wait_until(lambda: not self.sql(running), "all leases are over")

    def counts(self, order: str) -> tuple[int, int, int]:
        """Charges, rows and mails of an order."""
        charges, mails = self.provider.ledger(order)
        ((rows,),) = self.sql('SELECT count(*) FROM "order" WHERE number = %s', order)
        return charges, rows, mails

    def stopped(self) -> list[psutil.Process]:
        workers = psutil.Process(self.pid).children()
        return [worker for worker in workers if worker.status() == psutil.STATUS_STOPPED]

    @contextmanager
    def worker_stopped(self) -> Iterator[None]:
        """From when a worker has stopped itself, and its lease is over, until it goes on."""
        (worker,) = wait_until(self.stopped, "a worker is stopped")
        try:
            self.wait_for_leases_to_end()
            yield
        finally:
            worker.resume()

    def run(self, *arguments: str) -> str:
        """What a command wrote, apart from its log. It must succeed."""
        with patch.dict(os.environ, self.environment):
            result = self.app.test_cli_runner().invoke(cli, arguments)
        assert result.exit_code == 0, result.output
        return result.stdout


@pytest.fixture(scope="session")
def open_shop(postgres: Any) -> Iterator[Callable[[str], Shop]]:
    """Starts four workers, with the Redis of a URL or none: three may be held up, and one serves."""
    with ExitStack() as stack:
        provider = stack.enter_context(Provider())
        stack.callback(provider.shutdown)
        threading.Thread(target=provider.serve_forever, daemon=True).start()

        def start(redis_url: str) -> Shop:
            environment = {
                "DATABASE_URL": postgres.database("external" if redis_url else "external_alone"),
                "REDIS_URL": redis_url,
                "PROVIDER_PORT": str(provider.server_port),
            }
            with patch.dict(os.environ, environment):
                app = shop_program.create_app()
            with app.app_context():
                shop_program.db.create_all()
                stack.callback(shop_program.db.engine.dispose)
            how = ("--log-level", "critical", "--workers", "4", "--config", gunicorn_conf.__file__)
            gunicorn = running.gunicorn("tests.external.shop:create_app()", environment, *how)
            url, process = stack.enter_context(gunicorn)
            return Shop(url, process.pid, environment, provider, app)

        yield start


@pytest.fixture(scope="session")
def shop(open_shop: Callable[[str], Shop], redis_server: Any) -> Shop:
    return open_shop(redis_server.url)


@pytest.fixture(scope="session")
def shop_without_redis(open_shop: Callable[[str], Shop]) -> Shop:
    return open_shop("")


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


@pytest.fixture
def order() -> str:
    """A new order's number, which is its key."""
    return str(uuid.uuid4())
