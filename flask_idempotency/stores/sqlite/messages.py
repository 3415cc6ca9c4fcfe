"""Statements to SQLite, alone or in the one transaction that writes."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine, Table, exc

from flask_idempotency.core.errors import ConfigurationError, RecordBroken, StoreUnavailable

from .transaction import Writing

Run = Callable[[str, dict[str, Any]], Any]


class Messages:
    """Sends statements of our own: for these tables, on connections of this engine."""

    def __init__(self, engine: Engine, table: Table, steps: Table) -> None:
        self.engine, self.table, self.steps = engine, table, steps

    def fetch(self, template: str, values: dict[str, Any]) -> list[Any]:
        """The rows of a statement that only reads."""
        try:
            with self.engine.connect() as connection, _reading_any_text(connection):
                return list(connection.exec_driver_sql(self.prepared(template), values))
        except exc.SQLAlchemyError as error:
            raise self.error(error) from error

    def begin(self, connection: Connection | None = None, *, waits: bool = True) -> Writing:
        """The one transaction that writes. Raises ``StoreUnavailable``."""
        return Writing(self.engine, connection, waits=waits)

    def execute(self, transaction: Writing, template: str, values: dict[str, Any]) -> Any:
        """Run one of our statements in a transaction; the driver's cursor."""
        try:
            return transaction.execute(self.prepared(template), values)
        except sqlite3.Error as error:
            raise self.error(error) from error

    @contextmanager
    def writing(self, transaction: Writing | None = None) -> Iterator[Run]:
        """Yield what runs a statement in the transaction, or in a new one; commit at the end."""
        transaction = transaction or self.begin()
        try:
            yield lambda template, values: self.execute(transaction, template, values)
            transaction.commit()
        except (sqlite3.Error, exc.SQLAlchemyError) as error:
            raise self.error(error) from error
        finally:
            transaction.abandon()

    def change(self, template: str, values: dict[str, Any]) -> int:
        """Run one statement in a transaction of its own; how many rows it changed."""
        with self.writing() as run:
            return int(run(template, values).rowcount)

    def prepared(self, template: str) -> str:
        """The statement for these tables."""
        name = self.engine.dialect.identifier_preparer.format_table
        named = re.sub(r"%\((\w+)\)s", r":\1", template)  # values as SQLite wants them
        return named.format(table=name(self.table), steps=name(self.steps))

    def error(self, error: Exception) -> Exception:
        """Return what an error of the database, or of its driver, means."""
        if "no such table" in str(error) or "no such column" in str(error):
            return ConfigurationError(
                f"the table {self.table.fullname} is missing or not up to date: run `flask"
                " idempotency create-table`, call db.create_all(), or make a migration (the table is"
                " part of db.metadata)"
            )
        if "malformed JSON" in str(error):
            return RecordBroken()
        return StoreUnavailable()


@contextmanager
def _reading_any_text(connection: Connection) -> Iterator[None]:
    """Read also what is no UTF-8: one row that somebody else wrote hides no others."""
    driver: Any = connection.connection.driver_connection
    usual, driver.text_factory = driver.text_factory, partial(str, encoding="utf-8", errors="replace")
    try:
        yield
    finally:
        driver.text_factory = usual
