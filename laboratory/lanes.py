"""The two lanes: one shop each, and its books as they are, read from the database and the provider."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg2
from psycopg2.extras import RealDictCursor

from example.seed import ALICE, BOB, DemoAccount
from servers import FaultProxy

OPENING = {ALICE.name: 5_000_00, BOB.name: 5_000_00}  # cents, after "Start over"
STOCK = 1000

_EMPTY = """
    DO $$ DECLARE found regclass; BEGIN
        FOR found IN SELECT oid FROM pg_class WHERE relkind = 'r' AND oid >= 16384
            AND relname NOT IN ('account', 'product', 'alembic_version')
        LOOP EXECUTE 'TRUNCATE ' || found || ' RESTART IDENTITY CASCADE'; END LOOP;
    END $$
"""

Row = dict[str, Any]


@dataclass(frozen=True)
class Lane:
    """A shop, and everything around it that a story may look at or break."""

    name: str  # "without" or "with"
    url: str  # of the shop
    network: FaultProxy  # between its clients and it
    cable: FaultProxy  # between it and its database
    database: str  # for psycopg2
    ledger: Path  # the card provider's, in SQLite
    events: Path  # what shops.py writes

    @property
    def is_protected(self) -> bool:
        return self.name == "with"

    @property
    def title(self) -> str:
        return f"{self.name.capitalize()} Flask-Idempotency"

    def rows(self, statement: str, values: Sequence[Any] = ()) -> list[Row]:
        """What a statement gives, on a connection of its own: PostgreSQL may have been restarted."""
        with (
            closing(psycopg2.connect(self.database)) as connection,
            connection,
            connection.cursor(cursor_factory=RealDictCursor) as cursor,
        ):
            cursor.execute(statement, values)
            return [dict(row) for row in cursor.fetchall()] if cursor.description else []

    def balance(self, who: DemoAccount = ALICE) -> int:
        found = self.rows("SELECT balance FROM account WHERE name = %s", (who.name,))
        return int(found[0]["balance"])

    def payments(self) -> list[Row]:
        """From the shop's database, the oldest first."""
        return self.rows(
            "SELECT payment.id, account.name AS who, amount, description, created_at"
            " FROM payment JOIN account ON account.id = account_id ORDER BY payment.id"
        )

    def orders(self) -> list[Row]:
        """From the shop's database, the oldest first."""
        return self.rows(
            'SELECT id, amount, quantity, status, charge_id, created_at FROM "order" ORDER BY id'
        )

    def records(self) -> list[Row]:
        """The extension's records, the oldest first."""
        return self.rows(
            "SELECT encode(key, 'hex') AS key, name, state, attempt, status, created_at, completed_at,"
            " convert_from(body, 'UTF8') AS body FROM idempotency_record ORDER BY created_at"
        )

    def charges(self) -> list[Row]:
        """The card provider's own ledger, the oldest first."""
        with closing(sqlite3.connect(self.ledger, timeout=10)) as ledger:
            ledger.row_factory = sqlite3.Row
            found = "SELECT id, amount, reference, created_at FROM charge ORDER BY rowid"
            return [dict(row) for row in ledger.execute(found)]

    def happened(self, story: str) -> list[Row]:
        """What the shop noted in a story."""
        with self.events.open() as log:
            return [event for event in map(json.loads, log) if event["story"] == story]

    def start_over(self) -> None:
        """Empty all books, and give everybody the money of the beginning."""
        self.rows(_EMPTY)
        for name, cents in OPENING.items():
            self.rows("UPDATE account SET balance = %s WHERE name = %s", (cents, name))
        self.rows("UPDATE product SET stock = %s", (STOCK,))
        with closing(sqlite3.connect(self.ledger, timeout=10)) as ledger, ledger:
            ledger.execute("DELETE FROM charge")
        self.events.write_text("")

    def can_go_on(self, cents: int) -> bool:
        """Whether there is enough of everything for one more story."""
        stock = min(row["stock"] for row in self.rows("SELECT stock FROM product"))
        return stock > 10 and min(self.balance(), self.balance(BOB)) >= cents
