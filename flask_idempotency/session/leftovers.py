"""What a session leaves behind: what it has not committed, and how that is undone."""

from __future__ import annotations

from contextlib import closing, suppress
from typing import Any

from sqlalchemy import Connection, inspect
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import set_committed_value
from sqlalchemy.orm.exc import ObjectDeletedError
from sqlalchemy.orm.session import SessionTransactionOrigin

from flask_idempotency.core.errors import NotAtomic
from flask_idempotency.core.logs import log

from .databases import Databases
from .sources import Sessions
from .sqlalchemy_private import connections
from .transaction import transaction_of

READ_AGAIN = 100
"""How many objects are read once more before an operation is rolled back, so that an error handler can
show them. More would keep a failing request busy with what nobody may look at."""


def has_unsaved(session: Session | None) -> bool:
    """Return True if the session holds changes that it has not sent to the database."""
    if session is None:
        return False
    changed = any(map(session.is_modified, session.dirty))
    return bool(session.new or session.deleted or changed)


def waits_for_commit(session: Session) -> bool:
    """Return True if a decorator or after_request function may still want to commit. Sends nothing."""
    transaction = session.get_transaction()
    is_explicit = transaction is not None and transaction.origin is SessionTransactionOrigin.BEGIN
    return is_explicit or has_unsaved(session)


def refuse_unsaved(sessions: Sessions, step: str) -> None:
    """Raise ``NotAtomic`` if the present session holds changes that ``step`` would commit as its own.

    After a crash the view would make them once more, and the step would not be repeated.
    """
    session = sessions.present()
    if session is not None and (has_unsaved(session) or _has_written(session)):
        raise NotAtomic(
            f"db.session held changes when step {step!r} began, which would have committed with it, and"
            " once more when the operation is run again: commit them before the step, or make them in"
            " its function"
        )


def is_settled_outside(sessions: Sessions) -> bool:
    """Return True if nothing waits for a commit after a view that is not atomic.

    Its session is the application's. Asks the server if the session has a transaction open.
    """
    session = sessions.present()
    return session is None or not (waits_for_commit(session) or _has_written(session))


def refuse_unsettled(databases: Databases, name: str) -> None:
    """Raise ``NotAtomic`` where a view sends its application a request for ``name``, and holds changes.

    The end of ``name``, which is not atomic, would undo them, or a commit in it would be the view's.
    """
    if not is_settled_outside(databases.sessions):
        raise NotAtomic(
            f"a view made a request to its own application for {name} while db.session held changes"
            f" that it had not committed, and the end of {name} would undo them. Commit them before the"
            " request, or call the function instead"
        )


def end_view(databases: Databases, name: str, *, in_request: bool, failed: bool) -> None:
    """End the part of a view that is not atomic: what it did not commit is undone, as without us.

    After ``run()`` a session in need of a rollback gets one, as the next job in the context would meet
    it. Raises ``NotAtomic`` after a ``run()`` that has not ``failed``: its caller might commit.
    """
    session = databases.sessions.present()
    if session is None:
        return
    transaction = session.get_transaction()
    if not in_request and transaction is not None and not transaction.is_active:
        drop(session)
    if not (has_unsaved(session) or _has_written(session)):
        return
    drop_leftovers(session, name)
    if not (in_request or failed):
        raise NotAtomic(f"{name} left changes in db.session that nobody had committed: {COMMIT_THEM}")


def blocks_records(databases: Databases) -> bool:
    """Return True if ``db.session`` keeps the records from being written: SQLite has one writer."""
    if not databases.records.one_writer:
        return False
    session = databases.sessions.present()
    return session is not None and _has_written(session, databases.database.pool)


def has_written(connection: Connection) -> bool:
    """Return True if a connection's transaction has changed anything that a commit would keep."""
    if (transaction := transaction_of(connection)) is not None:
        return transaction.has_written()
    if connection.invalidated or not connection.in_transaction():
        return False
    if connection.dialect.name != "postgresql":
        return bool(getattr(connection.connection.driver_connection, "in_transaction", True))
    with closing(connection.connection.cursor()) as cursor:  # no listener of the application hears it
        try:
            cursor.execute(HAS_WRITTEN)
        except connection.dialect.loaded_dbapi.Error:  # it has failed, or is lost
            return False
        return bool(cursor.fetchone()[0])  # type: ignore[index]


def _has_written(session: Session, pool: Any = None) -> bool:
    begun = set(connections(session).values())
    with suppress(SQLAlchemyError):  # it has failed, or its connection is lost: it cannot be asked
        return any(has_written(each) for each in begun if pool in (None, each.engine.pool))
    return False


HAS_WRITTEN = """SELECT txid_current_if_assigned() IS NOT NULL AND EXISTS (
  SELECT FROM pg_locks LEFT JOIN pg_class ON pg_class.oid = relation
   WHERE pid = pg_backend_pid() AND granted AND (locktype = 'advisory'
      OR locktype = 'relation' AND mode <> 'AccessShareLock' AND relkind IS DISTINCT FROM 'S'))"""
"""Whether a transaction has changed or locked a row. It keeps the number that it was given for what was
rolled back to a savepoint, and what it drew from sequences, but not the locks of that."""

COMMIT_THEM = (
    "commit them in the view, in a decorator or in an after_request function (a teardown is too late),"
    " or drop them with db.session.rollback()"
)


def drop_leftovers(session: Session, name: str) -> None:
    """Undo what the view ``name`` left in a session, and say so."""
    log.warning("the view of %s left changes it did not commit; they are undone", name)
    drop(session)


def drop(session: Session | None) -> None:
    """Undo what a session holds, so that nobody above the view commits that."""
    if session is not None:
        end_transactions(session)
        _forget_changes(session)


def undo(session: Session, *, lost: bool) -> None:
    """Undo a session's part of an operation that is about to be rolled back, or (``lost``) has been.

    What the view committed is gone, but an error handler may still want to show it: objects keep the
    values that a commit would have left them with.
    """
    loaded = {} if lost else _loaded(session)
    end_transactions(session)
    if not lost:
        loaded |= _read_again(session, loaded)
    drop(session)
    for instance, values in loaded.items():
        if instance in session:
            for name, value in values.items():
                set_committed_value(instance, name, value)


def end_transactions(session: Session) -> None:
    """Without the events of a rollback that the application did not ask for."""
    before = None
    while True:
        transaction = session.get_nested_transaction() or session.get_transaction()
        if transaction is None or transaction is before:
            return
        before = transaction
        with suppress(SQLAlchemyError):  # the connection is lost, and everything undone
            transaction.close()


def _forget_changes(session: Session) -> None:
    for instance in list(session.deleted):
        session.add(instance)
    for instance in list(session.new):
        if instance in session:  # not gone with another one, by the cascade of a relationship
            session.expunge(instance)
    session.expire_all()


def _loaded(session: Session) -> dict[Any, dict[str, Any]]:
    """The values of the objects that are as they are in the database."""
    return {
        instance: _values(instance)
        for instance in session
        if inspect(instance).persistent
        and not inspect(instance).expired_attributes
        and not session.is_modified(instance)
    }


def _read_again(session: Session, loaded: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    found = {}
    for instance in [each for each in session if each not in loaded][:READ_AGAIN]:
        with suppress(SQLAlchemyError, ObjectDeletedError):
            session.refresh(instance)
            found[instance] = _values(instance)
    return found


def _values(instance: Any) -> dict[str, Any]:
    state = inspect(instance)
    columns = {attribute.key for attribute in state.mapper.column_attrs}
    return {name: value for name, value in state.dict.items() if name in columns}
