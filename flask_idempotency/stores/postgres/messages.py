"""Messages to PostgreSQL outside of any view's transaction, on the application's pool or our own."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from sqlalchemy import Engine, Table, exc
from sqlalchemy.pool import SingletonThreadPool, StaticPool

from flask_idempotency.core.errors import ConfigurationError, StoreUnavailable, sqlstate
from flask_idempotency.core.records import Claim
from flask_idempotency.drivers.raw_connection import RawConnection, borrowed
from flask_idempotency.stores.admin import original
from flask_idempotency.stores.own_pool import apart, reach

from . import statements
from .failures import NO_TABLE, READ_ONLY, is_lost, record_error

T = TypeVar("T")
Values = dict[str, Any] | None


@dataclass(frozen=True)
class Facts:
    """What was asked once of an engine's database.

    ``begins`` are statements that a transaction of ours begins with, ``role`` and ``schema`` are those
    of a fresh connection, and ``deferred`` says that constraints are checked at COMMIT by definition.
    ``reads_may_write``: no text tells what a SELECT does.
    """

    begins: str
    role: str
    schema: str | None
    deferred: bool
    reads_may_write: bool


class Messages:
    """Sends statements of our own: for these tables, and prepared for this engine."""

    sql, alone = statements.SQL, statements.ALONE
    _first = ""  # what each message begins with

    def __init__(self, engine: Engine, table: Table) -> None:
        if isinstance(engine.pool, (StaticPool, SingletonThreadPool)):
            raise ConfigurationError(
                f"the engine's pool is a {type(engine.pool).__name__}, which hands one connection"
                " to everyone: whatever a view writes on db.engine would be part of its operation."
                " Use QueuePool (the default) or NullPool"
            )
        self.engine, self.table = engine, table
        self.Error: type[Exception] = engine.dialect.loaded_dbapi.Error
        self._facts: Facts | None = None
        self._cache: dict[tuple[str, str], str] = {}

    @cached_property
    def own(self) -> Messages:
        """The same on connections that are none of the application's.

        Made when first needed, so that they are made ready by all of the pool's listeners.
        """
        own = Messages(apart(self.engine), self.table)
        own.own = own
        return own

    def briefly(self) -> Messages:
        """The same for what is only observed: nobody waits long for it, and a crash may lose it."""
        brief = copy(self.own)
        brief._first, brief.own = statements.OBSERVING, brief  # noqa: SLF001 -- of this class
        return brief

    def owner(self, claim: Claim) -> str | None:
        """Who has the record of a claim's key by now."""
        rows = self.fetch(self.sql.owner, {"key": claim.key})
        return rows[0][0] if rows else None

    def fetch(self, template: str, values: Values = None) -> list[tuple[Any, ...]]:
        """Send statements of our own in one message; the last one's rows.

        Raises ``StoreUnavailable``, ``ConfigurationError`` or ``RecordBroken``.
        """
        return self.send(template, values)[0]

    def change(self, template: str, values: Values = None) -> int:
        """Like :meth:`fetch`: how many rows the last statement changed."""
        return self.send(template, values)[1]

    def send(self, template: str, values: Values = None) -> tuple[list[tuple[Any, ...]], int]:
        """Send a message; the last statement's rows, and how many it changed."""

        def ask() -> tuple[list[tuple[Any, ...]], int]:
            if self._first:
                reach(self.engine)
            text = self.prepared(self._first + template)
            with borrowed(self.engine) as raw:
                return raw.send(text, values)

        return self.twice(ask)

    def twice(self, use: Callable[[], T]) -> T:
        """Call ``use``, a second time if the pooled connection turned out to be unusable.

        It is dead, or after a failover it leads to a server that takes no writes. Every verb may be
        sent twice: a claim that did get through the first time carries our token. A connect that failed
        is not repeated, as it would take its whole time-out again where the host is silent.
        """
        for another_try in (True, False):
            try:
                return use()
            except (self.Error, exc.SQLAlchemyError) as error:
                driver_error = original(error)
                code = sqlstate(driver_error)
                if code in NO_TABLE:  # it may have moved
                    self.forget_facts()
                if not is_lost(driver_error, self.Error) and code != READ_ONLY:
                    raise self.error(error) from error
                # As SQLAlchemy does: if one pooled connection is dead, the server went away and the
                # others are dead too. Those in use are not touched. One to a standby would never die
                # by itself.
                self.engine.dispose()
                if not another_try:
                    raise StoreUnavailable from error
        raise AssertionError("unreachable")

    def error(self, error: Exception) -> Exception:
        """Return what an error of the database, or of its driver, means."""
        return record_error(error, self.table.fullname, self.Error)

    def prepared(self, template: str, level: str = "") -> str:
        """The statement for these tables and, where it begins a transaction, this ``level``."""
        prepared = self._cache.get((template, level))
        if prepared is None:
            facts, name = self.facts(), self.engine.dialect.identifier_preparer
            place = "" if self.table.schema or not facts.schema else f"{facts.schema}."
            prepared = template.format(
                table=place + name.format_table(self.table),
                role=facts.role,
                settings=facts.begins,
                begin=level,
            )
            if self.table.schema or facts.schema:
                self._cache[template, level] = prepared
        return prepared

    def forget_facts(self) -> None:
        """Ask again: something has proved wrong."""
        self._facts = self.own._facts = None  # noqa: SLF001 -- of this class
        self._cache.clear()

    def facts(self) -> Facts:
        """What a transaction must know about the database, asked on a connection of our own.

        Takes no lock, which would be held over a round trip: the first requests that come at the same
        time each ask, and get the same facts.
        """
        if self._facts is None and self.own is not self:
            self._facts = self.own.facts()
        if self._facts is None:
            table = self.engine.dialect.identifier_preparer.format_table(self.table)
            with borrowed(self.engine) as raw:
                row = raw.send(statements.FACTS, {"table": table})[0][0]
                role, schema, deferred, reads_may_write, synchronous, watching = row
                begins = statements.SYNCHRONOUS if synchronous == "off" else ""
                if watching == "0" and _can_watch(raw):  # None before PostgreSQL 14
                    begins += statements.WATCH
            self._facts = Facts(begins, role, schema, deferred, reads_may_write)
        return self._facts


def _can_watch(raw: RawConnection) -> bool:
    """Try what the server's sockets may not be able to tell."""
    try:
        raw.send(f"BEGIN;\n{statements.WATCH}ROLLBACK")
    except raw.Error:
        if raw.is_lost():
            raise
        return False
    return True
