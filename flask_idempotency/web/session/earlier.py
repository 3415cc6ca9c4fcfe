"""A transaction that was begun before the operation: what it has done, and its end.

The operation needs a transaction of its own, so the earlier one ends. What it only read is not lost;
what it set is set again; and what cannot be carried over is refused.
"""

from __future__ import annotations

from typing import Any

from psycopg2 import Error as PostgresError
from psycopg2 import extensions
from psycopg2.errors import InFailedSqlTransaction
from sqlalchemy import Connection, Engine, PoolProxiedConnection
from sqlalchemy.orm import Session, SessionTransaction

from flask_idempotency.core import session_statements as sql
from flask_idempotency.core.errors import NotAtomic, StoreUnavailable
from flask_idempotency.core.ports import Units
from flask_idempotency.core.sqltext import CONSTRAINTS, CURSOR, LOCKS, SIGNALS, UNSURE

from .noted import Noted, note_cursors, noted

WRITTEN = (
    "db.session had written, locked rows or drawn from a sequence, but not committed, before the"
    " idempotent view began: commit before the view, or do it inside"
)


def connections(session: Session) -> dict[Engine | Connection, Connection]:
    """The connections of the session's present transaction, by what they were asked for with."""
    transaction = session.get_transaction()
    if transaction is None:
        return {}
    return {bind: found[0] for bind, found in transaction._connections.items()}  # noqa: SLF001


def connection_to(session: Session, bind: Engine | Connection) -> Connection | None:
    """That of the session's present transaction which was asked for with ``bind``, or None."""
    transaction = session.get_transaction()
    if transaction is None or bind not in transaction._connections:  # noqa: SLF001
        return None
    return transaction._connections[bind][0]  # noqa: SLF001


class SetAside:
    """What the request's session was in the middle of when the operation began. A context manager.

    Its transaction in the database has ended, and its connection is back in the pool; the session does
    not know. It goes on in the operation (:meth:`go_on`), or else when the context ends: loaded objects
    stay usable, and what was set is set again. Raises ``NotAtomic`` if the transaction cannot end
    without loss, ``StoreUnavailable`` if its connection is lost.
    """

    def __init__(self, transaction: SessionTransaction, connection: Connection) -> None:
        pooled = connection.connection
        self._settings: sql.Carried | None = None
        if connection.dialect.name == "postgresql":
            self._settings = _examine(pooled, noted(connection))
        elif getattr(pooled.driver_connection, "in_transaction", True):
            raise NotAtomic(WRITTEN)
        pooled.rollback()
        pooled.close()
        self._transaction: SessionTransaction | None = transaction
        self._connection = connection
        # What SQLAlchemy knows of the transaction goes on, upon another one. There is no public way to
        # change what is under a connection; tests/integration/test_private_hooks.py watches this one.
        connection._dbapi_connection = None  # noqa: SLF001

    def __enter__(self) -> SetAside:
        return self

    def go_on(self, units: Units) -> None:
        """Let the session's transaction go on as the first unit of the operation."""
        self._transaction = None
        units.adopt(self._connection, self._settings)

    def __exit__(self, *_error: object) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is None:
            return
        if self._settings is None:
            transaction.close()
            return
        pooled = self._connection.engine.raw_connection()
        cursor = pooled.cursor()
        cursor.execute(self._settings.everything)
        cursor.close()
        self._connection._dbapi_connection = pooled  # noqa: SLF001
        note_cursors(self._connection)


def has_written(connection: Connection) -> bool:
    """Whether the connection's transaction has changed anything. Raises the driver's error."""
    if connection.dialect.name != "postgresql":
        return bool(getattr(connection.connection.driver_connection, "in_transaction", True))
    return bool(_ask(connection.connection, sql.HAS_WRITTEN)[0])


def _ask(pooled: PoolProxiedConnection, statement: str) -> Any:
    is_psycopg2 = isinstance(pooled.driver_connection, extensions.connection)
    cursor = pooled.cursor(cursor_factory=extensions.cursor) if is_psycopg2 else pooled.cursor()
    try:
        cursor.execute(statement)
        return cursor.fetchone()
    finally:
        cursor.close()


def _examine(pooled: PoolProxiedConnection, noted: Noted) -> sql.Carried | None:
    """Refuse what cannot be carried into the operation; return what is to be set again there."""
    try:
        written, isolation, special, has_cursor, has_locks = _ask(pooled, sql.EARLIER)
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
                has_locks or noted.traits & LOCKS,
            ),
            ("sent LISTEN or NOTIFY", noted.traits & SIGNALS),
            ("sent SET CONSTRAINTS", noted.traits & CONSTRAINTS),
            ("chosen how its transactions are isolated", noted.traits & CURSOR),
        )
        for deed, is_so in what:
            if is_so:
                raise NotAtomic(
                    f"db.session had {deed} before the idempotent view began, which would end with that"
                    " transaction: do it inside the view"
                )
        if both := noted.for_connection & noted.for_transaction:
            raise NotAtomic(
                f"db.session had set {min(both)} both for its transaction and for the connection"
                " before the idempotent view began, and only one of them can be carried into it"
            )
        names = (noted.for_connection | noted.for_transaction) - {"*"}
        if noted.traits & UNSURE:
            names |= set(_ask(pooled, sql.FUNCTIONS)[0] or ())
        if not names:
            return None
        values = _ask(pooled, sql.current_settings(names))
        settings = dict(zip(sorted(names), values, strict=True))
        return sql.Carried(settings, frozenset(noted.for_connection))
    except InFailedSqlTransaction as error:
        raise NotAtomic(
            "a statement in db.session had failed before the idempotent view began, and nobody had"
            " rolled back: call db.session.rollback() where the error is caught"
        ) from error
    except PostgresError as error:
        raise StoreUnavailable from error
