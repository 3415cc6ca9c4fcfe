"""Messages to PostgreSQL on connections of the application's pool, outside any view's transaction."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, TypeVar

from sqlalchemy import Engine, Table, exc
from sqlalchemy.pool import SingletonThreadPool, StaticPool

from flask_idempotency.core.errors import ConfigurationError, StoreUnavailable, sqlstate
from flask_idempotency.core.records import Claim
from flask_idempotency.drivers import driver_of
from flask_idempotency.drivers.raw_connection import RawConnection
from flask_idempotency.drivers.sqlstates import is_lost
from flask_idempotency.session.postgres_units import EARLY, Facts
from flask_idempotency.session.questions import FACTS, WHERE_TABLE_IS, WHERE_TABLE_IS_NOW
from flask_idempotency.stores.admin import original
from flask_idempotency.stores.own_pool import reach

from . import statements
from .failures import NO_RIGHT, NO_TABLE, READ_ONLY, record_error

T = TypeVar("T")
Values = dict[str, Any] | None


class KeepsConnection:
    """Has the connection that it was made on, and closes it."""

    def abandon(self) -> None:
        """Roll back what is open and give the connection back."""


class Messages:
    """Sends statements of our own: for these tables, and prepared for this engine."""

    _first = ""  # what each message begins with

    def __init__(self, engine: Engine, table: Table, steps: Table) -> None:
        if isinstance(engine.pool, (StaticPool, SingletonThreadPool)):
            raise ConfigurationError(
                f"the engine's pool is a {type(engine.pool).__name__}, which hands one connection"
                " to everyone: whatever a view writes on db.engine would be part of its operation."
                " Use QueuePool (the default) or NullPool"
            )
        self.engine = engine
        self.port = driver_of(engine.dialect)
        self.table = table
        self.steps = steps
        self._facts: Facts | None = None
        self._cache: dict[tuple[str, str], str] = {}
        self._schema: str | None = None
        self._as_login = False
        self._like = self

    def apart(self, engine: Engine) -> Messages:
        """The same on an engine of our own, to the same database."""
        own = Messages(engine, self.table, self.steps)
        own._like = self
        return own

    def briefly(self) -> Messages:
        """The same for what is only observed: nobody waits long for it, and a crash may lose it."""
        brief = copy(self)
        brief._first = statements.OBSERVING  # noqa: SLF001 -- of this class
        return brief

    def owner(self, claim: Claim) -> str | None:
        """Who has the record of a claim's key by now."""
        row = self.first(statements.OWNER, {"key": claim.key})
        return None if row is None else row[0]

    def first(self, template: str, values: dict[str, Any]) -> tuple[Any, ...] | None:
        """The first row of :meth:`fetch`, if there is any."""
        rows, _ = self._send(template, values)
        return rows[0] if rows else None

    def fetch(self, template: str, values: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Send statements of our own in one message; the last one's rows.

        Raises ``StoreUnavailable``, ``ConfigurationError`` or ``RecordBroken``.
        """
        return self._send(template, values)[0]

    def change(self, template: str, values: dict[str, Any]) -> int:
        """Like :meth:`fetch`: how many rows the last statement changed."""
        return self._send(template, values)[1]

    def operate(self, template: str, values: Values = None) -> tuple[list[tuple[Any, ...]], int]:
        """Send a message of an operator's; the last statement's rows, and how many it changed.

        It waits for a lock no longer than a request does: a migration may hold the table for minutes,
        and the console's pages use the application's pool.
        """
        return self._send(statements.BRIEFLY + template, values)

    def _send(self, template: str, values: Values) -> tuple[list[tuple[Any, ...]], int]:
        def ask(wire: RawConnection) -> tuple[list[tuple[Any, ...]], int]:
            cursor = wire.send(self.prepared(self._first + template, wire), values)
            return (cursor.fetchall() if cursor.description else []), cursor.rowcount

        return self.on_a_wire(ask)

    def on_a_wire(self, use: Callable[[RawConnection], T]) -> T:
        """Run ``use``, a second time if the pooled connection turned out to be unusable.

        It is dead, or after a failover it leads to a server that takes no writes. Every verb may be
        sent twice: a claim that did get through the first time carries our token. A connect that failed
        is not repeated: where the host is silent, it would take its whole time-out again.

        At the end the connection is closed, unless ``use`` returned what keeps it.
        """
        for another_try in (True, False):
            wire = result = None
            try:
                wire = self.connect()
                try:
                    result = use(wire)
                finally:
                    if not isinstance(result, KeepsConnection):
                        wire.close()
                return result
            except (self.port.Error, exc.SQLAlchemyError) as error:
                driver_error = original(error)
                code = sqlstate(driver_error)
                if code == NO_RIGHT and another_try != self._as_login:
                    self._as_login = another_try  # dropped again if it did not help
                    self._cache.clear()
                    if another_try:
                        continue
                if code in NO_TABLE:
                    self._forget_schema()  # it may have moved
                if not is_lost(driver_error) and code != READ_ONLY:
                    raise record_error(error, self.table.fullname) from error
                # As SQLAlchemy does: if one pooled connection is dead, the server went away and the
                # others are dead too. Those in use are not touched. One to a standby would never die
                # by itself.
                self.engine.dispose()
                has_connected = wire is not None or getattr(driver_error, "cursor", None) is not None
                if not another_try or not has_connected:
                    raise StoreUnavailable from error
        raise AssertionError("unreachable")

    def connect(self) -> RawConnection:
        """A connection out of the pool."""
        if self._first:
            reach(self.engine)
        return RawConnection(self.engine, self.port)

    def is_like(self, engine: Engine) -> bool:
        """Return True if these are of the records on ``engine``, on whatever engine they are sent."""
        return self._like.engine is engine

    def prepared(self, template: str, wire: RawConnection) -> str:
        """The statement for these tables and, where it begins a transaction, this engine."""
        begin = wire.isolation if "{begin}" in template else ""
        prepared = self._cache.get((template, begin))
        if prepared is None:
            settings = self.facts(wire).settings if "{settings}" in template else ""
            names = {"table": self._name(self.table, wire), "steps": self._name(self.steps, wire)}
            role = statements.AS_LOGIN if self._as_login else statements.AS_ANYONE
            early = f";\n{EARLY}" if self.port.ANSWERS_EACH else ""
            prepared = template.format(**names, **role, begin=begin, settings=settings, savepoint=early)
            if self._schema is not None or self.table.schema:
                self._cache[template, begin] = prepared
        return prepared

    def _name(self, table: Table, wire: RawConnection) -> str:
        """The table with its schema, found once: a request may leave any search path behind."""
        preparer = self.engine.dialect.identifier_preparer
        if self._schema is None and not self.table.schema:
            known = self._like._schema  # noqa: SLF001 -- for a request, a listener may set the path
            self._schema = known or self._find_schema(preparer.format_table(self.table), wire)
        place = "" if self.table.schema or self._schema is None else f"{self._schema}."
        return place + preparer.format_table(table)

    def _forget_schema(self) -> None:
        self._schema = None
        self._cache.clear()

    def _find_schema(self, table: str, wire: RawConnection) -> str | None:
        for question in (WHERE_TABLE_IS, WHERE_TABLE_IS_NOW):
            schema: str | None = wire.send(question, {"table": table}).fetchall()[0][0]
            if schema is not None:
                return schema
        return None

    def facts(self, wire: RawConnection) -> Facts:
        """Make the engine ready, and find out what depends on its database.

        Takes no lock, which would be held over a round trip: the first requests that come at the same
        time each ask, and get the same facts.
        """
        if self._facts is None or self._facts.is_stale:
            deferred, deferrable, synchronous, watching, *of_functions = wire.send(FACTS).fetchall()[0]
            local, for_connection, reads_may_write, endings, functions_defer = of_functions
            settings = statements.SYNCHRONOUS if synchronous == "off" else ""
            if self._facts is not None:  # an operation's transaction is open here, and no migration
                settings = self._facts.settings  # changes these
            elif watching == "0":  # not set by the operator; None before Postgres 14
                try:
                    wire.send("BEGIN; " + statements.WATCH + "ROLLBACK")
                    settings += statements.WATCH
                except self.port.Error as error:
                    if is_lost(error, wire.driver):
                        raise
                    wire.send("ROLLBACK")
            self._facts = Facts(
                settings,
                deferred,
                deferrable,
                frozenset(local or ()),
                frozenset(for_connection or ()),
                reads_may_write,
                tuple(endings or ()),
                functions_defer,
            )
        return self._facts
