"""What the commands do with the records in SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from sqlalchemy import Column, Connection, Table, exc, inspect
from sqlalchemy.schema import CreateColumn

from flask_idempotency.core.ports import Transaction
from flask_idempotency.core.records import Claim
from flask_idempotency.stores.admin import ADD, MIGRATE, Due, Erasure, Finding, finding, reason, trying
from flask_idempotency.stores.table import COMMANDS_ONLY, defined_counts
from flask_idempotency.stores.table_admin import (
    FORGET,
    ODD_KEYS,
    TableAdmin,
    admin_statements,
    erasure_values,
    examine_counts,
    examine_keys,
    unsound,
)

from . import statements
from .messages import Messages


class SqliteAdmin(TableAdmin):
    """The records in SQLite, for an operator."""

    sql = admin_statements(
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

    def resumable(self, limit: int, max_attempts: int, backoff_seconds: float) -> list[Due]:
        """Return what to resume now, and put off its next try. While this writes, no view runs."""
        values = {"limit": limit, "max_attempts": max_attempts, "backoff": backoff_seconds}
        with self._messages.writing() as run:
            found = [Due(bytes(row[0]), *row[1:]) for row in run(statements.RESUMABLE, values)]
            for due in found:
                run(statements.PICKED, {"key": due.key})
        return found

    def count_try(self, due: Due) -> bool:
        """Count a try."""
        values = {"key": due.key, "owner": due.owner}
        with self._messages.writing() as run:
            return bool(run(statements.COUNT_TRY, values).rowcount)

    def postpone(self, key: bytes) -> None:
        """Put one off."""
        with self._messages.writing() as run:
            run(statements.PUT_OFF, {"key": key})

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

    def _purge(self, values: dict[str, Any]) -> int:
        with self._messages.writing() as run:
            run(statements.PURGE_STEPS, values)
            return int(run(statements.PURGE, values).rowcount)

    def create(self) -> list[str]:
        """Create what is missing: the tables, or columns and indexes of one that is there."""
        messages, done = self._messages, list[str]()
        try:
            with messages.engine.begin() as connection:
                done += self._create_tables(connection)
                done += self._add_columns(connection)
                for index in self._missing_indexes(connection):
                    index.create(connection)
                    done.append(f"created the index {index.name}")
        except exc.SQLAlchemyError as error:
            raise messages.error(error) from error
        return done

    def _add_columns(self, connection: Connection) -> Iterator[str]:
        """Add what may be null. Raises ``ConfigurationError`` if anything else is missing."""
        for table in self._messages.table, self._messages.steps:
            for column in self._missing_columns(table):
                if not column.nullable:
                    raise unsound(table)
                what = CreateColumn(column).compile(dialect=connection.dialect)
                name = connection.dialect.identifier_preparer.format_table(table)
                connection.exec_driver_sql(f"ALTER TABLE {name} ADD COLUMN {what}")
                yield f"added the column {column.name}"

    def examine(self) -> Iterator[Finding]:
        """Check the file and the tables."""
        messages = self._messages
        try:
            with messages.engine.connect() as connection:
                there = set(inspect(connection).get_table_names())
        except exc.SQLAlchemyError as error:
            remedy = "check that the file is a SQLite database, readable and writable"
            yield Finding("FAILED", "SQLite", reason(error), remedy)
            return
        yield Finding("ok", "SQLite", f"{sqlite3.sqlite_version}, {messages.engine.url.database}")
        name, steps = messages.table.name, messages.steps.name
        if name not in there:
            yield Finding("FAILED", "table", f"{name} is missing", ADD)
            return
        yield self._examine_columns(messages.table, "columns")
        if steps not in there:
            yield Finding("FAILED", "steps", f"{steps} is missing", ADD)
        elif self._missing_columns(messages.steps):
            yield self._examine_columns(messages.steps, "steps")
        with messages.engine.connect() as connection:
            missing = ", ".join(str(index.name) for index in self._missing_indexes(connection))
        yield finding(not missing, "index", "expires_at", f"missing: {missing}", ADD)
        yield from examine_keys(self._fetch(ODD_KEYS, {})[0][0])
        if (counts := defined_counts(messages.table)) is not None:
            whole = counts.name in there and not self._missing_columns(counts)
            yield examine_counts(messages.engine, counts, is_whole=whole)

    @contextmanager
    def trial(self) -> Iterator[Transaction]:
        """Claim a record; roll back and delete it at the end."""

        def forget(claim: Claim) -> None:
            with self._messages.writing() as run:
                run(FORGET, {"key": claim.key, "owner": claim.owner})

        with trying(self._records, forget) as (_claim, hold):
            yield cast("Transaction", hold)

    def _examine_columns(self, table: Table, subject: str) -> Finding:
        """A request needs all columns but those that are for commands only."""
        missing = self._missing_columns(table)
        names = ", ".join(column.name for column in missing)
        can_add = all(column.nullable for column in missing)
        is_needed = not all(column.name in COMMANDS_ONLY for column in missing)
        bad, remedy = f"missing in {table.name}: {names}", ADD if can_add else MIGRATE
        text = f"all {len(table.columns)} of {table.name}"
        return finding(not missing, subject, text, bad, remedy, "FAILED" if is_needed else "advice")

    def _missing_columns(self, table: Table) -> list[Column[Any]]:
        there = {column["name"] for column in inspect(self._messages.engine).get_columns(table.name)}
        return [column for column in table.columns if column.name not in there]

    def _missing_indexes(self, connection: Any) -> list[Any]:
        table = self._messages.table
        there = {index["name"] for index in inspect(connection).get_indexes(table.name)}
        return sorted(
            (index for index in table.indexes if index.name not in there), key=lambda i: str(i.name)
        )

    def _fetch(self, template: str, values: dict[str, Any]) -> list[Any]:
        return self._messages.fetch(template, values)

    def _change(self, template: str, values: dict[str, Any]) -> int:
        with self._messages.writing() as run:
            return int(run(template, values).rowcount)
