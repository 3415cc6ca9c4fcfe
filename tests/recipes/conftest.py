"""A shop, the troubles that meet its customers, and a count of what they paid in the end."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg2
import pytest

import servers
from laboratory import running
from tests.client.conftest import server, stopped  # noqa: F401 -- fixtures
from tests.recipes.shop import LOCK
from tests.waiting import wait_until

_numbers = itertools.count(1)
TROUBLES = [
    "request is lost",
    "response is lost",
    "worker dies before the commit",
    "worker dies after the commit",
    "gateway gives up",
    "view fails",
    "nobody is signed in",
]


@dataclass
class Shop:
    """A running shop, from outside."""

    url: str
    dsn: str
    troubles: Path

    def meets(self, *troubles: Any) -> None:
        """What happens to the next POSTs, one each."""
        self.troubles.write_text(json.dumps(troubles), encoding="utf-8")

    def sql(self, statement: str) -> list[Any]:
        with closing(psycopg2.connect(self.dsn)) as connection, connection.cursor() as cursor:
            connection.autocommit = True
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def payments(self) -> list[Any]:
        return self.sql("SELECT amount FROM payment ORDER BY id")

    def runs(self) -> int:
        """The operations that are running now."""
        waiting = "datname = current_database() AND wait_event = 'advisory'"
        return self.sql(f"SELECT count(*) FROM pg_stat_activity WHERE {waiting}")[0][0]

    @contextmanager
    def slow(self) -> Iterator[None]:
        """Payments that are told so do not end before the block does."""
        with closing(psycopg2.connect(self.dsn)) as connection, connection.cursor() as cursor:
            cursor.execute(f"SELECT pg_advisory_lock({LOCK})")
            yield
        wait_until(lambda: not self.runs(), "the payment ends")

    def emptied(self) -> Shop:
        """Itself, without troubles, payments and records."""
        self.meets()
        self.sql("DELETE FROM payment; DELETE FROM idempotency_record")
        return self


@pytest.fixture(scope="module")
def start(postgres: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Shop]]:
    """A function that starts one of the shops; they end with the module."""
    with ExitStack() as stack:

        def start(name: str) -> Shop:
            url = postgres.database(f"recipes_{name}_{next(_numbers)}")
            troubles = tmp_path_factory.mktemp(name) / "troubles"
            troubles.write_text("[]", encoding="utf-8")
            environment = {"DATABASE_URL": url, "TROUBLES": str(troubles)}
            application = f"tests.recipes.shop:{name}()"
            arguments = application, environment, "--workers", "1"
            where, _ = stack.enter_context(running.gunicorn(*arguments))
            return Shop(where, servers.plain_dsn(url), troubles)

        yield start
