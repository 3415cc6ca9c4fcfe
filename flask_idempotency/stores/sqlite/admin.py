"""What the commands do with the records in SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

from sqlalchemy import Table, exc, inspect

from flask_idempotency.core.errors import ConfigurationError, IdempotencyError, StoreUnavailable
from flask_idempotency.core.ports import Transaction
from flask_idempotency.stores.admin import CREATE, MIGRATE, Due, Finding, reason, trial_claim
from flask_idempotency.stores.table_admin import (
    AdminStatements,
    TableAdmin,
    admin_statements,
    between,
)

from . import statements
from .records import SqliteRecords


class SqliteAdmin(TableAdmin):
    """The records in SQLite, for an operator."""

    sql: AdminStatements = admin_statements(
        now=statements.NOW,
        in_ttl=statements.IN_TTL,
        later="max",
        digits="lower(substr(hex(key), 1, 16))",
    )

    remedy = "see that the file may be written, and that nobody writes to it for long"

    def __init__(self, records: SqliteRecords) -> None:
        self._records, self._messages = records, records.messages

    def reopen(self, start: bytes, owner: str, ttl_seconds: float) -> bytes | None:
        """Let a record be run again."""
        values = {**between(start), "owner": owner, "ttl": ttl_seconds}
        with self._messages.writing() as run:
            found = run(self.sql.reopened, values).fetchone()
            run(self.sql.reopen, values)
        return bytes(found[0]) if found else None

    def resumable(self, limit: int, max_attempts: int, backoff_seconds: float) -> list[Due]:
        """Put off what is to be resumed now, and give it. Who writes here knows that no view runs."""
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

    def purge(self, batch: int) -> Iterator[int]:
        """Delete expired records in batches."""
        while deleted := self._purge({"batch": batch}):
            yield deleted

    def _purge(self, values: dict[str, Any]) -> int:
        with self._messages.writing() as run:
            run(statements.PURGE_STEPS, values)
            return int(run(statements.PURGE, values).rowcount)

    def create(self) -> list[str]:
        """Create what is missing: the tables, or indexes of one that is there."""
        messages, done = self._messages, []
        try:
            with messages.engine.begin() as connection:
                for each, what in (
                    (messages.table, "the table"),
                    (messages.steps, "the table of its steps"),
                ):
                    if not inspect(connection).has_table(each.name):
                        each.create(connection)
                        done.append(f"created {what}")
                for index in self._missing_indexes(connection):
                    index.create(connection)
                    done.append(f"created the index {index.name}")
        except exc.SQLAlchemyError as error:
            raise messages.error(error) from error
        for each in (messages.table, messages.steps):
            if self._missing_columns(each):
                raise ConfigurationError(
                    f"{each.fullname} is there, but its columns are not as they should be (flask"
                    f" idempotency check says how). Columns are not altered here: {MIGRATE}"
                )
        return done

    def examine(self) -> Iterator[Finding]:
        """Check the file and the tables."""
        messages = self._messages
        try:
            with messages.engine.connect() as connection:
                there = set(inspect(connection).get_table_names())
        except exc.SQLAlchemyError as error:
            remedy = "see that the file is a SQLite database, and may be read and written"
            yield Finding("FAILED", "SQLite", reason(error), remedy)
            return
        yield Finding("ok", "SQLite", f"{sqlite3.sqlite_version}, {messages.engine.url.database}")
        name = messages.table.name
        if name not in there:
            yield Finding("FAILED", "table", f"{name} is missing", f"{CREATE}, or {MIGRATE}")
            return
        if missing := self._missing_columns(messages.table):
            yield Finding("FAILED", "columns", f"missing: {', '.join(missing)}", MIGRATE)
        else:
            yield Finding("ok", "columns", f"all {len(messages.table.columns)} of {name}")
        if messages.steps.name not in there:
            yield Finding(
                "FAILED", "steps", f"{messages.steps.name} is missing", f"{CREATE}, or {MIGRATE}"
            )
        elif missing := self._missing_columns(messages.steps):
            text = f"missing in {messages.steps.name}: {', '.join(missing)}"
            yield Finding("FAILED", "steps", text, MIGRATE)
        with messages.engine.connect() as connection:
            absent = [str(index.name) for index in self._missing_indexes(connection)]
        if absent:
            yield Finding("FAILED", "index", f"missing: {', '.join(absent)}", CREATE)
        else:
            yield Finding("ok", "index", "expires_at")

    @contextmanager
    def trial(self) -> Iterator[Transaction]:
        """Claim a record; roll back and delete it at the end."""
        claim = trial_claim()
        try:
            hold = self._records.claim(claim)
            if hold is None:
                raise StoreUnavailable
            try:
                yield cast("Transaction", hold)
            finally:
                hold.abandon()
        finally:
            with suppress(IdempotencyError), self._messages.writing() as run:
                run(statements.FORGET, {"key": claim.key, "owner": claim.owner})

    def _missing_columns(self, table: Table) -> list[str]:
        there = {column["name"] for column in inspect(self._messages.engine).get_columns(table.name)}
        return [column.name for column in table.columns if column.name not in there]

    def _missing_indexes(self, connection: Any) -> list[Any]:
        table = self._messages.table
        there = {index["name"] for index in inspect(connection).get_indexes(table.name)}
        return sorted(
            (index for index in table.indexes if index.name not in there), key=lambda i: str(i.name)
        )

    def _fetch(self, template: str, values: dict[str, Any]) -> list[Any]:
        return self._messages.fetch(template, values)
