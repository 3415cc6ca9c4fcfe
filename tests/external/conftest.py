"""The provider, and the shop under gunicorn on real servers."""

from __future__ import annotations

import http.client
import json
import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from unittest.mock import patch

import psutil
import psycopg2
import pytest

import servers
from laboratory import running
from tests.external import shop as shop_program
from tests.external.provider import Provider
from tests.integration.apps import gunicorn_conf
from tests.served import served
from tests.waiting import wait_until

ONCE = (1, 1, 1)
"""Charges, rows and mails of an order that is done."""


class Reply(NamedTuple):
    """What a client was told: the status, and the name of a problem. "": the connection broke."""

    told: str = ""
    body: str = ""
    retry_after: str | None = None
    replayed: bool = False


@dataclass
class Shop:
    """A running shop, from outside."""

    url: str
    pid: int
    dsn: str
    provider: Provider

    def buy(self, order, policy="retry", **headers):
        """One request on a connection of its own; ``order`` is its key. ``x_kill`` is X-Kill."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        sent |= {"Idempotency-Key": order, "Authorization": "Bearer alice"}
        try:
            answer = running.send(self.url, "POST", f"/{policy}", sent, "")
        except (OSError, http.client.HTTPException):
            return Reply()
        told = f"{answer.status} {json.loads(answer.body).get('type', '').rpartition(':')[2]}".strip()
        is_replayed = "Idempotent-Replayed" in answer.headers
        return Reply(told, answer.body, answer.headers["Retry-After"], is_replayed)

    def sql(self, statement, *values):
        with closing(psycopg2.connect(self.dsn)) as connection, connection.cursor() as cursor:
            cursor.execute(statement, values)
            return cursor.fetchall()

    def wait_for_leases_to_end(self):
        running = "SELECT FROM idempotency_record WHERE lease_expires_at > clock_timestamp()"
        wait_until(lambda: not self.sql(running), "all leases are over")

    def counts(self, order):
        """Charges, rows and mails of an order."""
        charges, mails = self.provider.ledger(order)
        ((rows,),) = self.sql('SELECT count(*) FROM "order" WHERE number = %s', order)
        return charges, rows, mails

    def stopped(self):
        workers = psutil.Process(self.pid).children()
        return [worker for worker in workers if worker.status() == psutil.STATUS_STOPPED]

    @contextmanager
    def worker_stopped(self):
        """From when a worker has stopped itself, and its lease is over, until it goes on."""
        (worker,) = wait_until(self.stopped, "a worker is stopped")
        try:
            self.wait_for_leases_to_end()
            yield
        finally:
            worker.resume()


@pytest.fixture(scope="session")
def provider():
    provider = Provider()
    with served(provider.app) as url:
        yield provider, url


@contextmanager
def open_shop(provider, database_url, redis_url):
    """Starts four workers: three may be held up, and one serves."""
    environment = {"DATABASE_URL": database_url, "REDIS_URL": redis_url, "PROVIDER_URL": provider[1]}
    with patch.dict(os.environ, environment), shop_program.create_app().app_context():
        shop_program.db.create_all()
        shop_program.db.engine.dispose()
    how = ("--log-level", "critical", "--workers", "4", "--config", gunicorn_conf.__file__)
    with running.gunicorn("tests.external.shop:create_app()", environment, *how) as (url, process):
        yield Shop(url, process.pid, servers.plain_dsn(database_url), provider[0])


@pytest.fixture(scope="session")
def shop(provider, postgres, redis_server):
    with open_shop(provider, postgres.database("external"), redis_server.url) as opened:
        yield opened


@pytest.fixture(scope="session")
def shop_without_redis(provider, postgres):
    with open_shop(provider, postgres.database("external_alone"), "") as opened:
        yield opened


@pytest.fixture
def clients():
    with ThreadPoolExecutor(3) as pool:
        yield pool


@pytest.fixture
def order():
    """A new order's number, which is its key."""
    return str(uuid.uuid4())
