"""What the commands do with the records in SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from sqlalchemy import exc, inspect

from flask_idempotency.core.errors import StoreUnavailable
from flask_idempotency.core.ports import Transaction
from flask_idempotency.stores.admin import ADD, REBUILD, Erasure, Finding, finding, reason, trying
from flask_idempotency.stores.table_admin import (
    AdminStatements,
    TableAdmin,
    erasure_values,
    missing_columns,
    missing_indexes,
)

from . import statements
from .messages import Messages
from .transaction import Writing


class SqliteAdmin(TableAdmin):
    """The records in SQLite, for an operator."""

    sql = AdminStatements(
        now=statements.NOW,
        in_ttl=statements.IN_TTL,
        later="max",
        digits="lower(substr(hex(key), 1, 16))",
        entry=f"json_object('at', {statements.NOW}, 'by', %(by)s, 'did', %(did)s, 'why', {{}})",
        audit="json_insert(coalesce(audit, '[]'), '$[#]', {})",
        first="json_array({})",
        before=statements.BEFORE,
        age="(julianday('now') - min(julianday({}))) * 86400.0",
    )

    _messages: Messages
    remedy = "check that the file is writable and that nobody writes to it for long"

    def erase(self, keys: list[bytes], seen: str | None = None, erasure: Erasure | None = None) -> int:
        """Delete what has no lease. While this writes, no view runs."""
        values = [{"key": key, "seen": seen} for key in keys]
        with self._messages.writing() as run:
            for each in values:
                run(statements.ERASE_STEPS, each)
            erased: int = sum(run(statements.ERASE, each).rowcount for each in values)
            if erasure is not None and erased:
                noted = {**erasure_values(erasure), "why": f"records: {erased}"}
                run(self.sql.erasure, noted)
        return erased

    def purge(self, batch: int, older_than_seconds: float | None = None) -> Iterator[int]:
        """Delete expired or old records in batches."""
        # No record ended before null.
        before = None if older_than_seconds is None else self._before(older_than_seconds)
        while deleted := self._purge({"batch": batch, "before": before}):
            yield deleted

    def purge_briefly(self, batch: int) -> int | None:
        """Delete a batch, unless somebody writes, or reads for long."""
        try:
            return self._purge({"batch": batch, "before": None}, self._messages.begin(waits=False))
        except StoreUnavailable as error:
            if error.__cause__ is not None and "locked" not in str(error.__cause__):
                raise
            return 0

    def _purge(self, values: dict[str, Any], transaction: Writing | None = None) -> int:
        with self._messages.writing(transaction) as run:
            if transaction is not None:
                transaction.hurry()
            run(statements.PURGE_STEPS, values)
            return int(run(statements.PURGE, values).rowcount)

    def create(self) -> list[str]:
        """Create the tables and indexes that are missing."""
        try:
            with self._messages.engine.begin() as connection:
                return list(self._create(connection))
        except exc.SQLAlchemyError as error:
            raise self._messages.error(error) from error

    def examine(self) -> Iterator[Finding]:
        """Check the file and the tables."""
        messages = self._messages
        try:
            database = inspect(messages.engine)
            there = set(database.get_table_names())
        except exc.SQLAlchemyError as error:
            remedy = "check that the file is a SQLite database, readable and writable"
            yield Finding("FAILED", "SQLite", reason(error), remedy)
            return
        yield Finding("ok", "SQLite", f"{sqlite3.sqlite_version}, {messages.engine.url.database}")
        name, steps = messages.table.name, messages.steps.name
        if name not in there:
            yield Finding("FAILED", "table", f"{name} is missing", ADD)
            return
        lacking = ", ".join(missing_columns(database, messages.table))
        all_of_it = f"all {len(messages.table.columns)} of {name}"
        yield finding(not lacking, "columns", all_of_it, f"missing in {name}: {lacking}", REBUILD)
        if steps not in there:
            yield Finding("FAILED", "steps", f"{steps} is missing", ADD)
        elif lacking := ", ".join(missing_columns(database, messages.steps)):
            yield Finding("FAILED", "steps", f"missing in {steps}: {lacking}", REBUILD)
        missing = ", ".join(str(index.name) for index in missing_indexes(database, messages.table))
        yield finding(not missing, "index", "expires_at", f"missing: {missing}", ADD)

    @contextmanager
    def trial(self) -> Iterator[Transaction]:
        """Claim a record; roll back and delete it at the end."""
        with trying(self._records, self._forget) as (_claim, hold):
            yield cast("Transaction", hold)

    def _fetch(self, template: str, values: dict[str, Any]) -> list[Any]:
        return self._messages.fetch(template, values)

    def _change(self, template: str, values: dict[str, Any]) -> int:
        with self._messages.writing() as run:
            return int(run(template, values).rowcount)
