"""What a session leaves behind: what it has not committed, and how that is undone."""

from __future__ import annotations

from contextlib import suppress
from types import CodeType
from typing import Any

from flask import Flask
from sqlalchemy import inspect
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import set_committed_value
from sqlalchemy.orm.exc import ObjectDeletedError
from sqlalchemy.orm.session import SessionTransactionOrigin

from flask_idempotency.core.errors import NotAtomic
from flask_idempotency.core.logs import log
from flask_idempotency.drivers.sqlalchemy_private import connections

from .before_view import give_back, has_failed, has_written
from .databases import Databases
from .operation import OpenTransaction
from .sources import Sessions

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
    if has_unsaved(sessions.present()):
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


def end_view(databases: Databases, name: str, *, in_request: bool, failed: bool) -> None:
    """End the part of a view that is not atomic: what it did not commit is undone, as without us.

    After ``run()`` a session in need of a rollback gets one, as the next job in the context would meet
    it. Raises ``NotAtomic`` where what is undone would have been committed later: in a teardown, or
    after a ``run()`` that has not ``failed``.
    """
    session = databases.sessions.present()
    if session is None:
        return
    if not in_request and _needs_rollback(session):
        drop(session)
    if not (has_unsaved(session) or _has_written(session)):
        return
    drop_leftovers(session, name)
    if commits_in_teardown(databases.app) if in_request else not failed:
        raise NotAtomic(f"{name} left changes in db.session that nobody had committed: {COMMIT_THEM}")


def _needs_rollback(session: Session) -> bool:
    transaction = session.get_transaction()
    if transaction is None or not transaction.is_active:
        return transaction is not None
    return any(has_failed(each) for each in connections(session).values())


def blocks_records(databases: Databases) -> bool:
    """Return True if ``db.session`` keeps the records from being written: SQLite has one writer."""
    if not databases.records.one_writer:
        return False
    session = databases.sessions.present()
    return session is not None and _has_written(session, databases.database.pool)


def _has_written(session: Session, pool: Any = None) -> bool:
    try:
        begun = set(connections(session).values())
        return any(has_written(each) for each in begun if pool in (None, each.engine.pool))
    except Exception:  # it has failed, or its connection is lost: it cannot be asked
        return False


COMMIT_THEM = (
    "commit them in the view, in a decorator or in an after_request function (a teardown is too late),"
    " or drop them with db.session.rollback()"
)


def commits_in_teardown(app: Flask) -> bool:
    """Return True if a teardown function of the application's own mentions a commit.

    Such a commit comes when the response is on its way, too late for any record. A function that calls
    another one for it is not recognised.
    """
    functions = [*app.teardown_appcontext_funcs]
    for each in app.teardown_request_funcs.values():
        functions += each
    return any("commit" in _names(getattr(each, "__code__", None)) for each in functions)


def _names(code: Any) -> set[str]:
    if not isinstance(code, CodeType):
        return set()
    return set(code.co_names).union(*map(_names, code.co_consts))


def end_session(session: Session, running: OpenTransaction) -> None:
    """End a session's part of an operation. It has left nothing, so loaded objects stay usable."""
    transaction = session.get_transaction()
    if transaction is None:
        return
    if transaction.is_active:
        if session in running.sessions or connections(session):
            transaction.close()
        return
    for connection in filter(running.units.is_joined, connections(session).values()):
        give_back(connection)  # the session waits for the application's rollback()


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
