"""psycopg 3.

It sees a transaction that is open, whoever has begun it, so there is nothing to switch.

Our messages go through ``connection.pgconn`` in libpq's pipeline mode: each statement has a result of
its own, and all take one round trip. What is sent on a connection is prepared there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from secrets import token_hex
from types import SimpleNamespace
from typing import Any, ClassVar

import psycopg
from psycopg import adapt, generators, pq
from psycopg.errors import error_from_result

from flask_idempotency.core.errors import NotAtomic

from .any import Statement, statements
from .raw_connection import IDLE, Answer, Prepared, RawConnection, Values

_OK = {pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK}
_SHOWN = "idempotency_shown"

_IN_PIPELINE = (
    "db.session began, committed or rolled back inside a pipeline() of psycopg's, where the operation"
    " cannot send its own statements: end the pipeline before"
)

_Given = dict[str, tuple[Any, pq.Format]]
"""Values by their names, as libpq takes them, each with its format."""

_Statement = tuple[str, tuple[str, ...] | None]
"""One of a message, and the names of its values; None for one that comes but once."""


class Connection(RawConnection):
    """See :class:`RawConnection`."""

    plain_cursor = psycopg.Cursor
    _is_interrupted = False
    levels: ClassVar = {each: each.name.replace("_", " ") for each in psycopg.IsolationLevel}

    @property
    def prepares(self) -> bool:  # type: ignore[override]
        """See :class:`RawConnection`."""
        return self.driver.prepare_threshold is not None

    def status(self) -> int:
        """See :class:`RawConnection`."""
        return self.driver.pgconn.transaction_status  # type: ignore[no-any-return]

    def show(self) -> None:
        """See :class:`RawConnection`: a ``transaction()`` refuses ``commit()`` and ``rollback()``."""
        self._block = self.driver.transaction(_SHOWN)
        self._block.__enter__()
        self.is_shown = True

    def undo(self) -> None:
        """See :class:`RawConnection`. The block's savepoint ended with one around: it ends another."""
        if self._is_interrupted:
            raise self.Error("the connection is in the middle of a pipeline")
        if self.is_shown:
            end = "" if self.status() == IDLE else "ROLLBACK;"
            self.send(f"{end}BEGIN;SAVEPOINT {_SHOWN}")
            self._block.__exit__(None, None, None)
            self.is_shown = False
        if self.status() != IDLE:
            self.driver.rollback()  # which also forgets what the driver has prepared

    def exchange(
        self, text: str, values: Values | None, first: Sequence[str], prepared: Prepared | None
    ) -> Answer:
        """See :class:`RawConnection`. Raises ``NotAtomic`` in a ``pipeline()`` of the view's."""
        is_ours = self._is_interrupted or self.is_lost()  # one that is lost keeps ours, too
        if self.driver.pgconn.pipeline_status and not is_ours:
            raise NotAtomic(_IN_PIPELINE)
        parts = statements(text) if values is None else statements(text, "${0}", "%")
        if self.continues and self.status() == IDLE:
            self.driver.execute("SELECT 1")  # it begins as it was told to
        was_idle = self.status() == IDLE or list(first) == ["ROLLBACK"]
        message: list[_Statement] = list(_in_transactions(parts) if was_idle else parts)
        message[:0] = [(each, None) for each in first]
        # Not with the adapters of an application's connection.
        context: Any = SimpleNamespace(connection=self.driver, adapters=psycopg.adapters)
        transformer = adapt.Transformer(context)
        given = _dumped(transformer, values or {})
        results = self._results(message, given, prepared)
        counts = (each.command_tuples for each in reversed(results))
        rows = next((each for each in reversed(results) if each.nfields), None)
        found = _rows(transformer, rows) if rows else []
        return found, next((count for count in counts if count is not None), -1)

    def execute_behind(self, first: list[str], _cursor: Any, execute: Callable[[str], object]) -> None:
        """See :class:`RawConnection`."""
        own = psycopg.Cursor(self.driver)
        try:
            with self.driver.pipeline():
                for each in first:
                    own.execute(each, prepare=False)
                execute("")
        except BaseException as error:
            if self.is_lost() or not self.driver.pgconn.pipeline_status:
                raise
            self._is_interrupted = True  # psycopg says that it cannot end the pipeline: but why?
            raise error.__context__ or error from None

    def _results(
        self, message: list[_Statement], given: _Given, prepared: Prepared | None
    ) -> list[Any]:
        """Send statements in one round trip; all results. Raises the error of the first that fails.

        A message that was interrupted leaves the connection closed: nobody knows what has arrived.
        """
        driver, pgconn, before = self.driver, self.driver.pgconn, set(prepared or ())
        try:
            with driver.lock:  # an exit at the line of a ``try`` in it would keep it
                pgconn.enter_pipeline_mode()
                _queue(pgconn, message, given, prepared, driver.info.encoding)
                pgconn.pipeline_sync()
                results = driver.wait(_results(pgconn))
                if pgconn.status == pq.ConnStatus.OK:
                    pgconn.exit_pipeline_mode()
        except BaseException:
            driver.close()
            raise
        for result in results:
            if result.status not in _OK:
                if prepared:
                    for sql in prepared.keys() - before:  # it may have been skipped
                        del prepared[sql]
                raise error_from_result(result, driver.info.encoding)
        return results  # type: ignore[no-any-return]


@lru_cache(128)
def _in_transactions(parts: tuple[Statement, ...]) -> tuple[_Statement, ...]:
    """As in the simple protocol: several statements, also behind a COMMIT, are one transaction."""
    ended = [place for place, (sql, _) in enumerate(parts, 1) if sql == "COMMIT"]
    before, last = parts[: max(ended, default=0)], parts[max(ended, default=0) :]
    if len(last) < 2 or last[0][0].startswith("BEGIN"):
        return parts
    return (*before, ("BEGIN", None), *last, ("COMMIT", None))


def _queue(
    pgconn: Any, message: list[_Statement], given: _Given, prepared: Prepared | None, encoding: str
) -> None:
    """Give libpq the statements."""
    for sql, names in message:
        values = [given[name][0] for name in names] if names else []
        formats = [given[name][1] for name in names] if names else []
        if prepared is None or names is None:
            pgconn.send_query_params(sql.encode(encoding), values, None, formats)
        else:
            if sql not in prepared:
                prepared[sql] = f"idempotency_{token_hex(12)}".encode()
                pgconn.send_prepare(prepared[sql], sql.encode(encoding))
            pgconn.send_query_prepared(prepared[sql], values, formats)


def _results(pgconn: Any) -> Generator[Any, Any, list[Any]]:
    """Send what waits in libpq, and read all results up to the end of the pipeline."""
    yield from generators.send(pgconn)
    results: list[Any] = []
    while True:
        found = yield from generators.fetch_many(pgconn)
        if not found or found[0].status == pq.ExecStatus.PIPELINE_SYNC:
            return results
        results += found


def _dumped(transformer: Any, values: Values) -> _Given:
    """What libpq takes of the values."""
    binary, text = adapt.PyFormat.BINARY, adapt.PyFormat.TEXT
    formats = [binary if type(value) is bytes else text for value in values.values()]
    sent = transformer.dump_sequence(list(values.values()), formats)
    return dict(zip(values, zip(sent, transformer.formats, strict=True), strict=True))


def _rows(transformer: Any, result: Any) -> list[tuple[Any, ...]]:
    """All rows of a result."""
    transformer.set_pgresult(result)
    return transformer.load_rows(0, result.ntuples, tuple)  # type: ignore[no-any-return]
