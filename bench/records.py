"""A table with many records, made inside PostgreSQL as copies of one that a request has left there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice, repeat
from typing import Any

import psycopg2
from sqlalchemy import DateTime, MetaData

import servers
from flask_idempotency.core.keys import KEY_BYTES
from flask_idempotency.stores.table import define_table

from .app import make_client
from .paths import Send, new_keys, sending

NAME = "idempotency_record"
COLUMNS = {column.name: column.type for column in define_table(MetaData(), NAME).columns}

KNOWN = 1000
"""Copies whose key a client knows: so many that they lie on as many pages."""

BATCH = 1000
"""What ``flask idempotency purge`` deletes in one transaction if it is not told otherwise."""

_TEMPLATE = f"""CREATE TABLE completed AS TABLE {NAME} LIMIT 1;
CREATE TABLE known AS SELECT row_number() OVER () AS place, key FROM {NAME}"""

_HOURS = "(%(low)s + (%(high)s - %(low)s) * (n - %(made)s) / %(records)s)"
_COPY = f"""INSERT INTO {NAME} ({", ".join(COLUMNS)}) SELECT {{values}}
  FROM generate_series(%(made)s + 1, %(made)s + %(records)s) AS n
  JOIN completed ON true
  JOIN LATERAL (SELECT now() + {_HOURS} * interval '1 h' - completed.expires_at AS later) _ ON true
  LEFT JOIN known ON place * %(step)s = n"""


class Database:
    """An application on a database of its own, and a connection beside it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = make_client(url)
        self._app = self.client.application
        self._connection = psycopg2.connect(servers.plain_dsn(url))
        self._connection.autocommit = True

    def ask(self, statement: str, values: dict[str, Any] | None = None) -> Any:
        """The one value of a statement, if it has rows."""
        with self._connection.cursor() as cursor:
            cursor.execute(statement, values)
            return cursor.fetchall()[0][0] if cursor.description else None

    def backend(self) -> int:
        """The server's process that works for the application, which sends one request at a time."""
        with self._app.app_context(), self._app.extensions["sqlalchemy"].engine.connect() as connection:
            pid: int = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
            return pid

    def purge(self) -> int:
        """Purge as the command does; returns how many records it deleted."""
        with self._app.app_context():
            return sum(self._app.extensions["idempotency"].records.admin().purge(BATCH))

    def close(self) -> None:
        """Close the connections."""
        self._connection.close()
        with self._app.app_context():
            self._app.extensions["sqlalchemy"].engine.dispose()


class Table(Database):
    """A table with so many records that have not expired, as autovacuum leaves it.

    They came one after the other, and expire one after the other in 2 to 24 hours.
    """

    def __init__(self, url: str, records: int) -> None:
        super().__init__(url)
        self.records = records
        self._keys = list(islice(new_keys(), KNOWN))
        for key in self._keys:
            sending(self.client, "/text", repeat(key))()
        self.ask(_TEMPLATE)
        # With wal_level=minimal, what goes into a table that was truncated just now is not logged.
        self.ask(f"BEGIN; TRUNCATE {NAME}")
        self._made = 0
        self._copy(records, 2, 24, step=max(records // KNOWN, 1))
        self.ask("COMMIT")
        self._settle()

    def add_expired(self, records: int) -> None:
        """Add copies that have expired one or two hours ago."""
        self._copy(records, -2, -1, step=0)
        self._settle()

    def first(self) -> Send:
        """A function that sends a first request."""
        return sending(self.client, "/payments", new_keys())

    def replay(self) -> Send:
        """A function that sends a request again, another one each time."""
        return sending(self.client, "/text", _shuffled(self._keys), replay=True)

    def _copy(self, records: int, low: float, high: float, step: int) -> None:
        """Add copies that expire in ``low`` to ``high`` hours; each ``step``th gets a known key."""
        later = "completed.{0} + later"
        values = {
            name: later.format(name) if isinstance(kind, DateTime) else f"completed.{name}"
            for name, kind in COLUMNS.items()
        } | {"key": f"coalesce(known.key, substring(sha256(int8send(n)) for {KEY_BYTES}))"}
        given = {"records": records, "low": low, "high": high, "step": step, "made": self._made}
        self.ask(_COPY.format(values=", ".join(values.values())), given)
        self._made += records

    def _settle(self) -> None:
        self.ask(f"VACUUM (ANALYZE) {NAME}")
        self.ask("CHECKPOINT")


def _shuffled(keys: list[str]) -> Iterator[str]:
    rng = random.Random(0)  # noqa: S311 -- to be repeated
    while True:
        yield rng.choice(keys)
