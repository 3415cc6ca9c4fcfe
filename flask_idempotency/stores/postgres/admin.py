"""What the commands do with the records in PostgreSQL.

Each method is a few statements outside any request, on connections of the application's own pool.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import choice
from typing import Any, cast

from sqlalchemy import QueuePool, exc, text

from flask_idempotency.core.errors import ConfigurationError, StoreUnavailable, sqlstate
from flask_idempotency.stores.admin import (
    Erasure,
    Finding,
    original,
    reason,
    remedy_of,
    trying,
)
from flask_idempotency.stores.table_admin import (
    AdminStatements,
    Size,
    TableAdmin,
    erasure_values,
)

from . import checks, statements
from .failures import LOCK_NOT_AVAILABLE, NO_RIGHT, QUERY_CANCELED, store_error
from .holds import PostgresHold
from .messages import Messages

_ONE_AT_A_TIME = text("SELECT pg_advisory_xact_lock(hashtext(:table))")

# While CREATE INDEX waits for a lock, requests queue behind it, and they wait for 250 ms at most.
_IMPATIENTLY = text("SET LOCAL lock_timeout = '100ms'")


def _escaped(name: str) -> str:
    """Return a name as part of a template."""
    return name.replace("%", "%%").replace("{", "{{").replace("}", "}}")


class PostgresAdmin(TableAdmin):
    """The records in PostgreSQL, for an operator."""

    sql = AdminStatements(
        now="clock_timestamp()",
        in_ttl="clock_timestamp() + %(ttl)s * interval '1 second'",
        later="greatest",
        digits="encode(substring(key for 8), 'hex')",
        # Infinite ones have none, and before PostgreSQL 17 an error.
        age="""extract(epoch FROM clock_timestamp()
         - min({0}) FILTER (WHERE isfinite({0})))::float8""",
        before="(clock_timestamp() - %(older)s * interval '1 second')::text",
        # The database's clock, in the form that SQLite has too.
        entry="""jsonb_build_array(jsonb_build_object(
         'at', to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US'),
         'by', %(by)s::text, 'did', %(did)s::text, 'why', ({})::text))""",
        audit="(coalesce(audit::jsonb, '[]') || {})::json",
        first="({})::json",
        count="'records: ' || count(*)",
        durable=statements.DURABLY,
        lock=" FOR UPDATE SKIP LOCKED",
        bounded=statements.BOUNDED,
        # The same pages each time, so that a number moves only if the table does.
        sample="TABLESAMPLE SYSTEM (%(percent)s) REPEATABLE (0)",
        # As text: it may be infinite, before the year 1 or after 9999. BC is written, AD is not.
        time="""coalesce(replace(
         to_char({0} AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US BC'), ' AD', ''), {0}::text)""",
    )

    _messages: Messages
    remedy = checks.POOLER

    def __init__(self, records: Any) -> None:
        super().__init__(records)
        self._since: dict[str, str] = {}  # by piece, where the last brief purge of it ended

    def erase(self, keys: list[bytes], seen: str | None = None, erasure: Erasure | None = None) -> int:
        """Delete what nobody works on."""
        values: dict[str, Any] = {"keys": keys, "seen": seen}
        noted = ""
        if erasure is not None:
            values |= erasure_values(erasure)
            noted = f", noted AS ({self.sql.erasure} FROM gone HAVING count(*) > 0)"
        return int(self._fetch(statements.erase(noted), values)[0][0])

    def purge(self, batch: int, older_than_seconds: float | None = None) -> Iterator[int]:
        """Delete expired or old records in batches, in the order in which they expire."""
        if older_than_seconds is None:
            return self._purge(batch)
        return self._purge(batch, self._before(older_than_seconds), which=statements.OLDER)

    def purge_briefly(self, batch: int) -> int | None:
        """Delete a batch from the table, or from one partition, which is picked at random."""
        pool = cast("QueuePool", self._messages.engine.pool)
        if pool.size() - pool.checkedout() < 2:
            return 0  # the last connection is for a request
        try:
            (piece,) = choice(self._fetch(statements.PIECES, {}))  # noqa: S311
            values = {"batch": batch, "since": self._since.get(piece, "-infinity")}
            purge = statements.purge(_escaped(piece), bounds=statements.AFTER_RESPONSE)
            deleted, since = self._fetch(purge, values)[0]
        except StoreUnavailable as error:
            code = sqlstate(error.__cause__)
            if code not in (LOCK_NOT_AVAILABLE, QUERY_CANCELED):
                raise
            return 0 if code == LOCK_NOT_AVAILABLE else None
        # From the beginning again once there was no more: what was locked is there.
        self._since[piece] = since if deleted == batch else "-infinity"
        return int(deleted)

    def _purge(self, batch: int, before: str | None = None, **parts: str) -> Iterator[int]:
        for (piece,) in self._fetch(statements.PIECES, {}):
            values = {"batch": batch, "since": "-infinity", "before": before}
            purge = statements.purge(_escaped(piece), **parts)
            while True:
                began = time.monotonic()
                deleted, values["since"] = self._fetch(purge, values)[0]
                took = time.monotonic() - began
                if not deleted:
                    break
                yield deleted
                time.sleep(took)  # requests have the disk to themselves for half of the time

    def create(self) -> list[str]:
        """Create the tables and indexes that are missing: one process does, the others find it done."""
        name = self._messages.table.fullname
        engine = self._messages.engine.execution_options(isolation_level="READ COMMITTED")
        try:
            with engine.begin() as connection:
                connection.execute(_ONE_AT_A_TIME, {"table": name})
                connection.execute(_IMPATIENTLY)
                return list(self._create(connection))
        except exc.SQLAlchemyError as error:
            if sqlstate(original(error)) == NO_RIGHT:
                raise ConfigurationError(
                    "the database user may not create tables and indexes here: run this as one that"
                    " may, such as the owner of the tables and their schema"
                ) from error
            raise store_error(error, name, self._messages.Error) from error

    def examine(self) -> Iterator[Finding]:
        """Check the server and the table."""
        return checks.examine(self._messages)

    @contextmanager
    def trial(self) -> Iterator[PostgresHold]:
        """Claim a record of its own. Raises ``ConfigurationError`` if the table rejects it."""
        try:
            with trying(self._records, self._forget) as (claim, hold):
                mine = cast("PostgresHold", hold)
                checks.change(self._messages.table, mine, claim)
                yield mine
        except exc.SQLAlchemyError as error:  # of the INSERT, the UPDATE or the COMMIT
            found = f"{self._messages.table.fullname}: {reason(error)}"
            raise ConfigurationError(f"{found}; {remedy_of(error, self.remedy)}") from error

    def _size(self) -> Size:
        pages, *counted = self._fetch(statements.SIZE, {})[0]
        return Size(max(pages / statements.SAMPLED_PAGES, 1.0), *counted)

    def _fetch(self, template: str, values: dict[str, Any]) -> list[Any]:
        return self._messages.operate(template, values)[0]

    def _change(self, template: str, values: dict[str, Any]) -> int:
        return self._messages.operate(template, values)[1]
