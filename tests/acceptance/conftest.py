"""The example shop under gunicorn, with its own configuration file, on real servers."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
        *,
        who: DemoAccount | None = ALICE,
        key: str | None = None,
        body: Any = None,
    ) -> requests.Response:
        """One request on a connection of its own."""
        headers = {}
        if who is not None:
            headers["Authorization"] = f"Bearer {who.token}"
        if key is not None:
            headers["Idempotency-Key"] = key
        return requests.request(method, self.url + path, json=body, headers=headers, timeout=30)

    def pay(self, key: str, amount: int = 100, *, who: DemoAccount = ALICE) -> requests.Response:
        return self.call("POST", "/payments", who=who, key=key, body={"amount": amount})

    def balance(self, who: DemoAccount = ALICE) -> int:
        return self.sql(f"SELECT balance FROM account WHERE name = '{who.name}'")

    def sql(self, statement: str) -> Any:
        """The first value that a query gives."""
        connection = psycopg2.connect(servers.plain_dsn(self.database_url))
        try:
            with connection.cursor() as cursor:
                cursor.execute(statement)
                return cursor.fetchone()[0]
        finally:
            connection.close()

    def views_run(self) -> int:
        """How often a payment was begun; a sequence is not rolled back, so failures count too."""
        return self.sql("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM payment_id_seq")


@pytest.fixture(scope="module")
def open_shop(postgres: Any, redis_server: Any) -> Iterator[Callable[..., Shop]]:
    """A function that starts gunicorn on a fresh database; all end with the module."""
    with ExitStack() as stack:

        def start(application: str = "example:create_app()", *arguments: str, **more: str) -> Shop:
            database_url = postgres.database(f"acceptance_{next(_numbers)}")
            running.make_tables(database_url)
            environment = {"DATABASE_URL": database_url, "REDIS_URL": redis_server.url}
            environment |= {"SECRET_KEY": "secret", **more}
            url, _ = stack.enter_context(running.gunicorn(application, environment, *arguments))
            return Shop(url, database_url)

        yield start


@pytest.fixture(scope="module")
def shop(open_shop: Callable[..., Shop]) -> Shop:
    """The example, with an operator's page."""
    return open_shop(OPERATOR_PASSWORD="sesame")


@pytest.fixture
def key() -> str:
    """A new key."""
    return str(uuid.uuid4())
