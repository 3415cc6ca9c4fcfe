"""What the commands do with the records in PostgreSQL.

Each method is a few statements outside any request, on connections of the application's own pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from psycopg2.extensions import AsIs
from sqlalchemy import Table, exc, text

from flask_idempotency.core.errors import ConfigurationError
from flask_idempotency.core.records import Claim
from flask_idempotency.stores.admin import Due, Finding, original, trying
from flask_idempotency.stores.table import FILLFACTOR
from flask_idempotency.stores.table_admin import (
    FORGET,
    Size,
    TableAdmin,
    admin_statements,
    between,
    unsound,
)

from . import checks, statements
from .failures import store_error
from .holds import PostgresHold
from .messages import Messages
from .shape import Shape, index_on, preparer, shape_of, wrong_columns

_ONE_AT_A_TIME = text("SELECT pg_advisory_xact_lock(hashtext(:table))")
_CREATE_INDEX = "CREATE INDEX CONCURRENTLY IF NOT EXISTS {name} ON {{table}} (expires_at)"
_CREATE_PARTIAL = """CREATE INDEX CONCURRENTLY IF NOT EXISTS {name} ON {{table}} ({column})
 WHERE {not_null} IS NOT NULL"""
_DROP_INDEX = "DROP INDEX CONCURRENTLY IF EXISTS {name}"
_FILL = f"ALTER TABLE {{table}} SET (fillfactor = {FILLFACTOR})"


class PostgresAdmin(TableAdmin):
    """The records in PostgreSQL, for an operator."""

    sql = admin_statements(
        now="clock_timestamp()",
        in_ttl="clock_timestamp() + %(ttl)s * interval '1 second'",
        later="greatest",
        digits="encode(substring(key for 8), 'hex')",
        age="extract(epoch FROM clock_timestamp() - nullif({}, '-infinity'))::float8",
        bounded=statements.BOUNDED,
        # The same pages each time, so that a number moves only if the table does.
        sample="TABLESAMPLE SYSTEM (%(percent)s) REPEATABLE (0)",
        # As text: it may be infinite, before the year 1 or after 9999. BC is written, AD is not.
        time="""coalesce(replace(
         to_char({0} AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US BC'), ' AD', ''), {0}::text)""",
    )

    _messages: Messages
    remedy = checks.POOLER

    def reopen(self, start: bytes, owner: str, ttl_seconds: float) -> bytes | None:
        """Let a record be run again."""
        values = {**between(start), "owner": owner, "ttl": ttl_seconds}
        row = self._messages.run(self.sql.reopen + " RETURNING key", values)[0]
        return None if row is None else bytes(row[0])

    def resumable(self, limit: int, max_attempts: int, backoff_seconds: float) -> list[Due]:
        """Return the operations to resume now, and put off their next try."""
        values = {"limit": limit, "max_attempts": max_attempts, "backoff": backoff_seconds}
        rows = self._fetch(statements.RESUMABLE, values)
        return [
            Due(bytes(key), name, attempt, owner, bytes(request))
            for key, name, attempt, owner, request in rows
        ]

    def count_try(self, due: Due) -> bool:
        """Count a try of an operation that nobody holds."""
        return self._messages.run(statements.COUNT_TRY, {"key": due.key, "owner": due.owner})[1] == 1

    def postpone(self, key: bytes) -> None:
        """Put off an operation that nobody holds."""
        self._messages.run(statements.PUT_OFF, {"key": key})

    def purge(self, batch: int) -> Iterator[int]:
        """Delete expired records in batches, the earliest first."""
        for (piece,) in self._fetch(statements.PIECES, {}):
            values = {"piece": AsIs(piece), "batch": batch, "since": "-infinity"}
            deleted, values["since"] = self._fetch(statements.PURGE, values)[0]
            while deleted:
                yield deleted
                deleted, values["since"] = self._fetch(statements.PURGE, values)[0]

    def create(self) -> list[str]:
        """Create what is missing: the tables, or the indexes and fill factor of an existing one."""
        messages, table = self._messages, self._messages.table
        done: list[str] = []
        try:
            with messages.engine.begin() as connection:
                connection.execute(_ONE_AT_A_TIME, {"table": table.fullname})
                done += self._create_tables(connection)
        except exc.SQLAlchemyError as error:
            if getattr(original(error), "pgcode", None) == "42501":
                raise ConfigurationError(
                    "the database user may not create tables here: run this as one that may, such as"
                    " the owner of the schema"
                ) from error
            raise store_error(error, table.fullname) from error
        shape = _sound(messages, table)
        _sound(messages, messages.steps)
        return done + _complete(messages, shape)

    def examine(self) -> Iterator[Finding]:
        """Check the server and the table."""
        return checks.examine(self._messages)

    @contextmanager
    def trial(self) -> Iterator[PostgresHold]:
        """Claim a record of its own."""

        def forget(claim: Claim) -> None:
            self._messages.run(FORGET, {"key": claim.key, "owner": claim.owner})

        with trying(self._records, forget) as (claim, hold):
            mine = cast("PostgresHold", hold)
            checks.change(self._messages.table, mine, claim)
            yield mine

    def _size(self) -> Size:
        pages, *counted = self._fetch(statements.SIZE, {})[0]
        return Size(max(pages / statements.SAMPLED_PAGES, 1.0), *counted)

    def _fetch(self, template: str, values: dict[str, Any]) -> list[Any]:
        return self._messages.fetch(template, values)[0]


def _sound(messages: Messages, table: Table) -> Shape:
    """The table as it is. Raises ``ConfigurationError`` if it cannot be repaired here."""
    shape = shape_of(messages, table)
    if shape is None or not shape.has_key or wrong_columns(table, shape):
        raise unsound(table)
    return shape


def _complete(messages: Messages, shape: Shape) -> list[str]:
    """Add the index and the fill factor to a table in use, which goes on being read and written."""
    done = []
    if not shape.has_expiry:
        for broken in shape.broken:
            messages.run(_DROP_INDEX.format(name=broken))
        name = preparer.format_index(index_on(messages.table, "expires_at"))
        messages.run(_CREATE_INDEX.format(name=name))
        done.append("created the index on expires_at")
    for is_there, column, not_null, what in (
        (shape.has_resumable, "created_at", "request", "resumable operations"),
        (shape.has_leased, "lease_expires_at", "lease_expires_at", "operations with a lease"),
    ):
        if not is_there:
            name = preparer.format_index(index_on(messages.table, column))
            messages.run(_CREATE_PARTIAL.format(name=name, column=column, not_null=not_null))
            done.append(f"created the index of {what}")
    if shape.fillfactor is None:
        messages.run(_FILL)
        done.append(f"set the fill factor to {FILLFACTOR}")
    return done
