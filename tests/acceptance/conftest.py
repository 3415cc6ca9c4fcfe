"""The example shop under gunicorn, with its own configuration file, on real servers."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import psycopg2
import pytest
import requests

import servers
from example.seed import ALICE, DemoAccount
from laboratory import running

_numbers = itertools.count(1)


@dataclass
class Shop:
    """A running shop, from outside: its address, and its database for a look behind the scenes."""

    url: str
    database_url: str

    def call(
        self,
        method: str,
        path: str,
        who: DemoAccount | None = ALICE,
        key: str | None = None,
        body: Any = None,
        **headers: str,
    ) -> requests.Response:
        """One request on a connection of its own."""
        if who is not None:
            headers["Authorization"] = f"Bearer {who.token}"
        if key is not None:
            headers["Idempotency-Key"] = key
        return requests.request(method, self.url + path, json=body, headers=headers, timeout=30)

    def pay(self, key: str, amount: int, **headers: str) -> requests.Response:
        return self.call("POST", "/payments", key=key, body={"amount": amount}, **headers)

    def balance(self) -> int:
        return self.sql(f"SELECT balance FROM account WHERE name = '{ALICE.name}'")

    def sql(self, statement: str) -> Any:
        """The first value that a query gives."""
        with closing(psycopg2.connect(servers.plain_dsn(self.database_url))) as connection:
            cursor = connection.cursor()
            cursor.execute(statement)
            return cursor.fetchone()[0]

    def views_run(self) -> int:
        """How often a payment was begun; a sequence is not rolled back, so failures count too."""
        return self.sql("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM payment_id_seq")


@pytest.fixture(scope="module")
def open_shop(postgres: Any, redis_server: Any) -> Iterator[Callable[..., Shop]]:
    """A function that starts gunicorn on a fresh database; all end with the module."""
    with ExitStack() as stack:

        def start(**more: str) -> Shop:
            database_url = postgres.database(f"acceptance_{next(_numbers)}")
            running.make_tables(database_url)
            environment = {"DATABASE_URL": database_url, "REDIS_URL": redis_server.url}
            environment |= {"SECRET_KEY": "secret", **more}
            url, _ = stack.enter_context(running.gunicorn("example:create_app()", environment))
            return Shop(url, database_url)

        yield start


@pytest.fixture(scope="module")
def shop(open_shop: Callable[..., Shop]) -> Shop:
    return open_shop(OPERATOR_PASSWORD="sesame")


@pytest.fixture
def key() -> str:
    """A new key."""
    return str(uuid.uuid4())
