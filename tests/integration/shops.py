"""A shop under gunicorn, over real HTTP, as its clients and its database see it."""

from __future__ import annotations

import http.client
import time
import uuid
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psycopg2

import servers
from laboratory import running
from tests.waiting import PATIENCE_SECONDS, wait_until

HELD = "/held-payments"
"""The view whose first attempt tells the test that it is there, and waits to be told to go on."""


@dataclass
class Shop:
    """A running shop, from outside. Its database is reached directly, not by way of the proxy."""

    url: str
    database_url: str
    pid: int
    arrived: Path
    go_on: Path

    def pay(self, key, path="/payments"):
        """One request on a connection of its own."""
        return running.send(self.url, "POST", path, {"Idempotency-Key": key, "X-User": "alice"})

    def pay_for_sure(self, key, path="/payments", *, may_break=False):
        """A client that retries until it has its answer: all that it was told, that one last."""
        told = []
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not told or told[-1].status == 409:
            assert time.monotonic() < deadline, "only 409"
            try:
                told.append(self.pay(key, path))
            except (OSError, http.client.HTTPException):
                if not may_break:
                    raise
            if not told or told[-1].status == 409:
                time.sleep(0.01)  # sooner than Retry-After asks for
        return told

    def sql(self, statement):
        connection = psycopg2.connect(servers.plain_dsn(self.database_url))
        with closing(connection), connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall()

    def nothing_is_left_open(self):
        """No transaction that nobody works on."""
        return self.sql(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND state LIKE 'idle in transaction%'"
        ) == [(0,)]


def promises_hold(shop, told):
    """Each key has one row, one record and one answer; nobody was told anything but that and 409."""
    for key, answers in told.items():
        assert {answer.status for answer in answers} <= {201, 409}
        (body,) = {answer.body for answer in answers if answer.status == 201}
        assert f'"key":"{key}"' in body, "somebody else's answer"
        first = [a for a in answers if a.status == 201 and "Idempotent-Replayed" not in a.headers]
        assert len(first) <= 1
    rows = shop.sql("SELECT key, count(*) FROM payment GROUP BY key")
    assert dict(rows) == dict.fromkeys(told, 1)
    records = shop.sql("SELECT state, count(*), count(DISTINCT key) FROM idempotency_record GROUP BY 1")
    assert records == [("completed", len(told), len(told))]
    # A request whose client has gone may still run.
    wait_until(shop.nothing_is_left_open, "no transaction is open")


def new_keys(count):
    return [str(uuid.uuid4()) for _ in range(count)]
