"""A transaction that was begun before the operation: what it has done, and its end.

The operation needs a transaction of its own, so the earlier one ends. What it only read is not lost;
what it set is set again; and what cannot be carried over is refused.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

from sqlalchemy import Connection, PoolProxiedConnection

from flask_idempotency.core.errors import NotAtomic, StoreUnavailable, sqlstate
from flask_idempotency.drivers import known_driver
from flask_idempotency.drivers.port import FAILED
from flask_idempotency.drivers.sqlalchemy_private import StandsUnder, put_under
from flask_idempotency.drivers.sqlstates import ABORTED
from flask_idempotency.drivers.sqltext import CONSTRAINTS, CURSOR, LOCKS, SAVEPOINT, SIGNALS, UNSURE

from . import questions as sql
from .ear import hear_cursors, noted
from .units import StandIn, Units

WRITTEN = (
    "db.session had written, locked rows or drawn from a sequence, but not committed, before the"
    " idempotent view began: commit before the view, or do it inside"
)


class SetAside:
    """What the request's session was in the middle of when the operation began. A context manager.

    Its transaction in the database has ended, and its connection is back in the pool; the session does
    not know. It goes on in the operation (:meth:`go_on`), or else, when the context has ended, on
    another connection: whoever has begun the transaction may end it. Raises ``NotAtomic`` if the
    transaction cannot end without loss, ``StoreUnavailable`` if its connection is lost.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection | None = connection
        pooled: Any = connection.connection
        self._settings: sql.Carried | None = None
        if isinstance(pooled, _Returned):
            self._settings = pooled.settings
        elif connection.dialect.name == "postgresql":
            self._settings = _examine(connection)
        elif getattr(pooled.driver_connection, "in_transaction", True):
            raise NotAtomic(WRITTEN)
        pooled.rollback()
        pooled.close()
        put_under(connection, None)

    def __enter__(self) -> SetAside:
        return self

    def go_on(self, units: Units) -> None:
        """Let the session's transaction go on as the first unit of the operation."""
        if self._connection is not None:
            units.adopt(self._connection, self._settings)
            self._connection = None

    def __exit__(self, *_error: object) -> None:
        if self._connection is not None:
            give_back(self._connection, self._settings)


def give_back(connection: Connection, settings: sql.Carried | None = None) -> None:
    """Let a connection go on, when it is next used, on another one from its pool."""
    put_under(connection, _Returned(connection, settings))


class _Returned(StandsUnder):
    """In the place of a pooled connection that was given back in the middle of a transaction.

    The first use takes another one from the pool, and sets there what was set on the first. Until then
    there is nothing to commit or to roll back.
    """

    is_valid = False

    def __init__(self, connection: Connection, settings: sql.Carried | None) -> None:
        self._connection, self.settings = connection, settings

    def commit(self) -> None:
        """Nothing, unless something was set for the connection."""
        if self.settings is not None and self.settings.lasting:
            self._take().commit()

    def rollback(self) -> None:
        """Nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._take(), name)

    def _take(self) -> PoolProxiedConnection:
        connection = self._connection
        if isinstance(connection.connection, _Returned):
            pooled = connection.engine.raw_connection()
            put_under(connection, pooled)
            if self.settings is not None:
                with closing(_cursor(connection)) as cursor:
                    cursor.execute(self.settings.everything)
            hear_cursors(connection)
        return connection.connection


def has_written(connection: Connection) -> bool:
    """Return True if the connection's transaction has changed anything. Raises the driver's error."""
    below: Any = connection.connection
    if isinstance(connection.connection, _Returned):
        return False
    if isinstance(connection.connection, StandIn):  # the transaction is not its own
        return bool(below.units.has_unsaved_writes())
    if connection.dialect.name != "postgresql":
        return bool(getattr(connection.connection.driver_connection, "in_transaction", True))
    return _ask(connection, sql.HAS_WRITTEN)[0] and (
        not _undid(connection) or _ask(connection, sql.HAS_LOCKED)[0]
    )


def has_failed(connection: Connection) -> bool:
    """Return True if the connection's transaction can only be rolled back, or is lost."""
    if connection.invalidated:
        return True
    below: Any = connection.connection
    if isinstance(below, _Returned):
        return False
    if isinstance(below, StandIn):
        return bool(below.units.is_failed())
    info = getattr(below.driver_connection, "info", None)  # libpq's
    return getattr(info, "transaction_status", None) == FAILED


def _undid(connection: Connection) -> bool:
    """Return True if the connection's transaction was rolled back to a savepoint."""
    return bool(noted(connection).traits & SAVEPOINT)


def _ask(connection: Connection, statement: str) -> Any:
    with closing(_cursor(connection)) as cursor:
        cursor.execute(statement)
        return cursor.fetchone()


def _cursor(connection: Connection) -> Any:
    """For a statement of ours, which nobody hears: its values are in its text."""
    pooled, driver = connection.connection, known_driver(connection.dialect)
    return pooled.cursor() if driver is None else driver.question(pooled)


def _earlier(connection: Connection) -> Any:
    """Ask what the connection's transaction contains: see :data:`sql.EARLIER`."""
    is_own = not isinstance(connection.connection, StandIn)
    written = is_own or has_written(connection)
    numbered, isolation, special, has_cursor, has_locks = _ask(connection, sql.EARLIER)
    if is_own:
        written = numbered and (has_locks or not _undid(connection))
    return written, isolation, special, has_cursor, is_own and has_locks


def _examine(connection: Connection) -> sql.Carried | None:
    """Refuse what cannot be carried into the operation; return what is to be set again there."""
    before = noted(connection)
    try:
        written, isolation, special, has_cursor, has_locks = _earlier(connection)
        if written:
            raise NotAtomic(WRITTEN)
        if isolation in sql.STRICT:
            raise NotAtomic(
                f"db.session had read before the idempotent view began, at {isolation.upper()}: what it"
                " read belongs to another snapshot than what the view would write, and no conflict"
                " would be noticed. End that transaction before the view (db.session.rollback()),"
                " or read inside"
            )
        what = (
            ("chosen READ ONLY or DEFERRABLE for its transaction", special),
            ("opened a cursor on the server that is still open (a stream)", has_cursor),
            (
                "taken a lock (advisory, LOCK TABLE, or a session-level one left on the connection)",
                has_locks or before.traits & LOCKS,
            ),
            ("sent LISTEN or NOTIFY", before.traits & SIGNALS),
            ("sent SET CONSTRAINTS", before.traits & CONSTRAINTS),
            ("chosen how its transactions are isolated", before.traits & CURSOR),
        )
        for deed, is_so in what:
            if is_so:
                raise NotAtomic(
                    f"db.session had {deed} before the idempotent view began, which would end with that"
                    " transaction: do it inside the view"
                )
        if both := before.for_connection & before.for_transaction:
            raise NotAtomic(
                f"db.session had set {min(both)} both for its transaction and for the connection"
                " before the idempotent view began, and only one of them can be carried into it"
            )
        for_connection = before.for_connection - {"*"}
        names = for_connection | before.for_transaction - {"*"}
        if before.traits & UNSURE:
            local, lasting = (set(found or ()) for found in _ask(connection, sql.FUNCTIONS))
            names |= local | lasting
            for_connection |= lasting - local
        if not names:
            return None
        values = _ask(connection, sql.current_settings(names))
        settings = dict(zip(sorted(names), values, strict=True))
        return sql.Carried(settings, frozenset(for_connection))
    except connection.dialect.loaded_dbapi.Error as error:
        if sqlstate(error) == ABORTED:
            raise NotAtomic(
                "a statement in db.session had failed before the idempotent view began, and nobody had"
                " rolled back: call db.session.rollback() where the error is caught"
            ) from error
        raise StoreUnavailable from error
