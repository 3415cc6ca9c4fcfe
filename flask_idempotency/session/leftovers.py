"""What a session leaves behind: what it has not committed, and how that is undone."""

from __future__ import annotations

from contextlib import suppress
from typing import NoReturn
from weakref import WeakSet

from sqlalchemy import Connection, inspect
from sqlalchemy.exc import InvalidRequestError, SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import set_committed_value
from sqlalchemy.orm.session import SessionTransactionOrigin

from flask_idempotency.core.errors import NotAtomic
from flask_idempotency.core.logs import log
from flask_idempotency.drivers.raw_connection import raw_of
from flask_idempotency.private import begun_by, connections

from .transaction import HAS_WRITTEN, transaction_of

of_tests: WeakSet[Connection] = WeakSet()
"""Connections to which a test has bound the sessions. What is written in its transaction is the test's,
or was committed by a view."""

COMMIT_THEM = (
    "commit them in the view, in a decorator or in an after_request function (a teardown is too late),"
    " or drop them with db.session.rollback()"
)


def has_unsaved(session: Session) -> bool:
    """Return True if the session holds changes that it has not sent to the database."""
    if session.new or session.deleted:
        return True
    return session.identity_map.check_modified() and any(map(session.is_modified, session.dirty))


def is_explicit(session: Session) -> bool:
    """Return True if somebody has said begin(), who will say commit(), too."""
    transaction = session.get_transaction()
    return transaction is not None and transaction.origin is SessionTransactionOrigin.BEGIN


def holds_changes(session: Session | None) -> bool:
    """Return True if a session holds changes that nobody has committed. Asks the server."""
    if session is None or has_unsaved(session):
        return session is not None
    return any(map(has_written, connections(session)))


def waits_for_commit(session: Session | None) -> bool:
    """Return True if a commit of the application may follow, outside of an atomic operation."""
    return session is not None and (is_explicit(session) or holds_changes(session))


def has_written(connection: Connection) -> bool:
    """Return True if a connection's transaction has changed anything that a commit would keep.

    One that has failed, or whose connection is lost, keeps nothing.
    """
    if (transaction := transaction_of(connection)) is not None:
        return transaction.has_written(or_locked=True)
    if not connection.in_transaction() or connection in of_tests:
        return False
    if connection.dialect.name != "postgresql":
        return bool(getattr(connection.connection.driver_connection, "in_transaction", True))
    # Below SQLAlchemy's listeners and what an agent for tracing hears: the application sent nothing.
    with suppress(SQLAlchemyError, connection.dialect.loaded_dbapi.Error):
        raw = raw_of(connection.connection, connection.dialect)
        raw.continues = raw.is_unsure = True
        numbers, _, has_locked = raw.send(HAS_WRITTEN)[0][0]
        return bool(numbers and has_locked)
    return False


def refuse_changes(what: str) -> NoReturn:
    """Raise ``NotAtomic`` for changes in a session that the end of ``what`` would commit or undo."""
    raise NotAtomic(
        f"db.session held changes when {what} began, whose end would commit or undo them. Commit them"
        " before it, or make them in its function"
    )


def end_view(session: Session | None, name: str, *, in_request: bool, failed: bool) -> None:
    """End the part of a view that is not atomic: what it did not commit is undone, as without us.

    After ``run()`` a session in need of a rollback gets one, as the next job in the context would meet
    it. Raises ``NotAtomic`` after a ``run()`` that has not ``failed``: its caller might commit.
    """
    has_left = holds_changes(session)
    if has_left:
        log.warning("the view of %s left changes it did not commit; they are undone", name)
    if has_left or not (in_request or session is None or session.is_active):
        undo(session)
    if has_left and not (in_request or failed):
        raise NotAtomic(f"{name} left changes in db.session that nobody had committed: {COMMIT_THEM}")


def undo(session: Session | None) -> None:
    """Undo what a session holds, so that nobody above the view commits that.

    Its objects are as after a rollback, and read again when they are used. An error handler may still
    show the primary key of one whose row is gone, because the operation was rolled back.
    """
    if session is None:
        return
    end_transactions(session)
    for instance in list(session.deleted):
        try:
            session.add(instance)
        except InvalidRequestError:  # until the end of a ``with session.begin():`` nothing may be added
            if instance in session:  # not gone with another one, as below
                session.expunge(instance)
    for instance in list(session.new):
        if instance in session:  # not gone with another one, by the cascade of a relationship
            session.expunge(instance)
    session.expire_all()
    for instance in session:
        state = inspect(instance)
        for column, value in zip(state.mapper.primary_key, state.identity, strict=True):
            set_committed_value(instance, state.mapper.get_property_by_column(column).key, value)


def end_transactions(session: Session) -> None:
    """Without the events of a rollback that the application did not ask for."""
    for transaction in begun_by(session):
        try:  # noqa: SIM105 -- a context would take three calls more
            transaction.close()
        except SQLAlchemyError:  # the connection is lost, and everything undone
            pass
