"""The application's own session, in the operation's transaction.

While an operation runs, every session of its view works on the operation's connection, each of its
transactions in a savepoint of its own: ``commit()`` releases a savepoint,
``rollback()`` goes back to one, and nothing but the extension ends the transaction.

Handing a connection to a session does not do it: Flask-SQLAlchemy's ``get_bind`` looks engines up by
bind key and ignores it. So the session's class gets a ``get_bind`` on top, in the private class that
each ``SQLAlchemy()`` object's ``sessionmaker`` has of its own. That needs no change by the user and
holds for sessions that ``db.session.remove()`` makes room for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import CodeType
from typing import Any

from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import Connection, Engine, Table, inspect
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, SessionTransaction, sessionmaker
from sqlalchemy.orm.attributes import set_committed_value
from sqlalchemy.orm.exc import ObjectDeletedError
from sqlalchemy.orm.session import SessionTransactionOrigin

from flask_idempotency.core.errors import ConfigurationError, NotAtomic, StoreUnavailable
from flask_idempotency.core.ports import Units
from flask_idempotency.web.operation import OpenTransaction, joined_operation, outer_operation
from flask_idempotency.web.setup.state import AppState

from .earlier import Earlier, has_written

log = logging.getLogger("flask_idempotency")

READ_AGAIN = 100
"""How many objects are read once more before an operation is rolled back, so that an error handler can
show them. More would keep a failing request busy with what nobody may look at."""


class JoiningSession:
    """Put before the application's session class: works on a running operation's connection."""

    def get_bind(self, *args: Any, **kwargs: Any) -> Engine | Connection:
        """The operation's engine in place of the application's; another database's as it is."""
        bind: Engine | Connection = super().get_bind(*args, **kwargs)  # type: ignore[misc]
        running = joined_operation(self)
        if running is None or bind.engine.pool is not running.units.pool:
            return bind
        return _join(self, bind, running)


def _join(session: Any, bind: Engine | Connection, running: OpenTransaction) -> Engine | Connection:
    """What the session works on in place of ``bind``. Raises ``NotAtomic`` if it would escape."""
    running.sessions[session] = None
    begun = _connections(session).get(bind)
    if begun is not None and running.units.is_joined(begun):
        return bind
    if begun is not None or isinstance(bind, Connection):
        running.refuse(
            f"a session of the view of {running.operation.name} uses a connection of its own, so its"
            " writes cannot commit together with the record: do not hand it a bind, nor one that"
            " it began"
            " to use before the view"
        )
    bound: Engine = running.units.bind(bind)
    return bound


def _connections(session: Session) -> dict[Engine | Connection, Connection]:
    """The connections of the session's present transaction, by what they were asked for with."""
    transaction = session.get_transaction()
    if transaction is None:
        return {}
    return {bind: found[0] for bind, found in transaction._connections.items()}  # noqa: SLF001


def install(db: SQLAlchemy) -> None:
    """Let the sessions of ``db`` join operations. Raises ``ConfigurationError`` if they cannot."""
    factory = getattr(db.session, "session_factory", None)
    if not isinstance(factory, sessionmaker):
        raise ConfigurationError(
            "db.session is not the scoped session that Flask-SQLAlchemy makes, so the writes of a view"
            " cannot be joined to the operation's transaction"
        )
    if not is_joining(db):
        factory.class_ = type(factory.class_.__name__, (JoiningSession, factory.class_), {})


def is_joining(db: SQLAlchemy) -> bool:
    """Whether the sessions of ``db`` are of the class that :func:`install` made."""
    session_class: type = db.session.session_factory.class_
    return issubclass(session_class, JoiningSession)


def prove(db: SQLAlchemy, running: OpenTransaction, table: Table) -> None:
    """Show that a session of this application works inside the operation's transaction.

    ``table`` is one on the bind that the operation protects. Nothing is sent, and no listener of the
    application hears of it. Raises ``ConfigurationError`` if not: then nothing would be protected.
    """
    session = db.session.session_factory()
    try:
        joined = running.units.is_bound(session.get_bind(clause=table))
    except NotAtomic:
        joined = False
    finally:
        running.sessions.pop(session, None)
    if not joined:
        raise ConfigurationError(
            "db.session does not join the operation's transaction, so a view's writes would not be"
            " protected: something replaced its class, or its get_bind() chooses another engine. A"
            " get_bind() of your own, such as one that sends reads to a replica, must return what"
            " super().get_bind() returns while current_operation is there"
        )


class SetAside:
    """What the request's session was in the middle of when the operation began.

    Its transaction in the database has ended; the session does not know. It goes on in the operation
    (:meth:`go_on`), or ends (:meth:`end`).
    """

    def __init__(self, transaction: SessionTransaction, earlier: Earlier) -> None:
        self._transaction: SessionTransaction | None = transaction
        self._earlier = earlier

    def go_on(self, units: Units) -> None:
        """Let the session's transaction go on as the first unit of the operation."""
        if self._transaction is not None:
            self._transaction = None
            units.adopt(self._earlier.connection, self._earlier.settings)

    def end(self) -> None:
        """There is no operation to go on in. Loaded objects stay usable, and what was set stays set."""
        if self._transaction is not None:
            transaction, self._transaction = self._transaction, None
            if self._earlier.settings is not None:
                self._earlier.go_back()
            else:
                transaction.close()


def set_aside(
    db: SQLAlchemy, pool: Any, other_binds: frozenset[Engine] = frozenset()
) -> SetAside | None:
    """Take the connection from the request's session, so that the operation needs no second one.

    Changes that are not flushed yet go along; so does what was written on ``other_binds``. Raises
    ``NotAtomic`` if something was written, locked, or chosen for its transaction: ending that would
    split the operation, or lose it.
    """
    outer = outer_operation()
    session = db.session() if db.session.registry.has() else None
    if outer is not None and outer.units.pool is not pool:
        outer = None
    if outer is not None and (
        outer.units.wrote
        or outer.units.has_open_work
        or (session is not None and session in outer.sessions and has_unsaved(session))
    ):
        raise NotAtomic(
            f"the view of {outer.operation.name} made a request to its own application for another"
            " operation, after it had written: that could not see what was written, nor commit with it."
            " Call the function instead, or make the request before the first write"
        )
    transaction = None if session is None else session.get_transaction()
    if session is None or transaction is None:
        return None
    every = set(_connections(session).values())
    begun = {connection for connection in every if connection.engine.pool is pool}
    for connection in every - begun:
        if connection.engine not in other_binds and has_written(connection):
            raise NotAtomic(
                "db.session had written on another bind, but not committed, before the idempotent view"
                " began, which cannot commit together with the record: commit before the view, or allow"
                ' it with @idempotent(other_binds=["..."])'
            )
    if not begun:
        return None
    if outer is not None and all(map(outer.units.is_joined, begun)):
        transaction.close()
        return None
    if len(begun) > 1 or session.in_nested_transaction():
        raise NotAtomic(
            "db.session was inside begin_nested(), or used several connections, before the idempotent"
            " view began: end that before the view"
        )
    return SetAside(transaction, Earlier(begun.pop()))


@contextmanager
def parked(db: SQLAlchemy, pool: Any) -> Iterator[None]:
    """Give the connection of the present session back meanwhile, if nothing is lost by that.

    So that what comes in between needs no second one. What the session has only read with ends; what it
    has set is set again afterwards.
    """
    session = db.session() if db.session.registry.has() else None
    transaction = None if session is None else session.get_transaction()
    found: SetAside | None = None
    if session is not None and transaction is not None and not session.in_nested_transaction():
        begun = {c for c in _connections(session).values() if c.engine.pool is pool}
        if len(begun) == 1:
            try:
                found = SetAside(transaction, Earlier(begun.pop()))
            except NotAtomic as error:
                if error.__cause__ is not None:  # it has failed
                    _end_transactions(session)
            except StoreUnavailable:
                _end_transactions(session)
    try:
        yield
    finally:
        if found is not None:
            found.end()


def refuse_unsaved(db: SQLAlchemy, step: str) -> None:
    """Raise ``NotAtomic`` if the present session holds changes that ``step`` would commit as its own.

    After a crash the view would make them once more, and the step would not be repeated.
    """
    if db.session.registry.has() and has_unsaved(db.session()):
        raise NotAtomic(
            f"db.session held changes when step {step!r} began, which would have committed with it, and"
            " once more when the operation is run again: commit them before the step, or make them in"
            " its function"
        )


def commit(db: SQLAlchemy, running: OpenTransaction) -> None:
    """Commit what the present session has left uncommitted."""
    if has_leftovers(db, running):
        db.session.commit()


def is_settled_outside(db: SQLAlchemy) -> bool:
    """The same as :func:`is_settled` for a view that is not atomic, whose session is the application's.

    Asks the server if the session has a transaction open.
    """
    if not db.session.registry.has():
        return True
    session = db.session()
    return not (has_unsaved(session) or _is_explicit(session) or _has_written(session))


def end_view(db: SQLAlchemy, name: str) -> None:
    """End the part of a view that is not atomic: what it did not commit is undone, as without us."""
    if not is_settled_outside(db):
        session = db.session()
        log.warning("the view of %s left changes it did not commit; they are undone", name)
        _end_transactions(session)
        _forget_changes(session)


def blocks_records(state: AppState) -> bool:
    """Whether ``db.session`` keeps the records from being written: SQLite has one writer."""
    if not getattr(state.records, "one_writer", False) or not state.db.session.registry.has():
        return False
    return _has_written(state.db.session(), state.pool)


def _has_written(session: Session, pool: Any = None) -> bool:
    try:
        begun = set(_connections(session).values())
        return any(has_written(each) for each in begun if pool in (None, each.engine.pool))
    except Exception:  # it has failed, or its connection is lost: there is nothing to ask it
        return False


def is_settled(db: SQLAlchemy, running: OpenTransaction) -> bool:
    """Whether the view's work is done: nothing waits for a commit that may come above the view."""
    if running.units.has_open_work:
        return False
    return not any(has_unsaved(session) or _is_explicit(session) for session in _all(db, running))


def has_leftovers(db: SQLAlchemy, running: OpenTransaction) -> bool:
    """Whether changes are left that nobody has committed."""
    return running.units.has_unsaved_writes() or any(map(has_unsaved, _all(db, running)))


def commits_in_teardown(app: Flask) -> bool:
    """Whether a teardown function of the application's own mentions a commit.

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


def _is_explicit(session: Session) -> bool:
    transaction = session.get_transaction()
    return transaction is not None and transaction.origin is SessionTransactionOrigin.BEGIN


def _all(db: SQLAlchemy, running: OpenTransaction) -> list[Session]:
    """The sessions that joined, and the present one, which may hold changes and not have joined yet."""
    sessions = dict(running.sessions)
    if db.session.registry.has():
        sessions[db.session()] = None
    return list(sessions)


def leave(db: SQLAlchemy, running: OpenTransaction) -> None:
    """End the view's part: what its sessions did not commit is undone, as without us.

    Loaded objects stay usable for ``after_request`` functions, unless the session holds changes that
    were never committed.
    """
    left = running.units.has_unsaved_writes()
    running.units.leave()
    for session in _all(db, running):
        if has_unsaved(session) or (left and session.in_transaction()):
            log.warning(
                "the view of %s left changes it did not commit; they are undone", running.operation.name
            )
            _end_transactions(session)
            _forget_changes(session)
        elif (
            (transaction := session.get_transaction()) is not None
            and transaction.is_active  # one that has failed waits for the application's rollback()
            and (session in running.sessions or _connections(session))
        ):
            transaction.close()


def has_unsaved(session: Session) -> bool:
    """Whether the session holds changes that it has not sent to the database."""
    changed = any(map(session.is_modified, session.dirty))
    return bool(session.new or session.deleted or changed)


def drop(db: SQLAlchemy) -> None:
    """Undo what a refused request's session holds, so that nobody above it commits that."""
    if db.session.registry.has():
        session = db.session()
        _end_transactions(session)
        _forget_changes(session)


def undo(db: SQLAlchemy, running: OpenTransaction) -> None:
    """Undo all of the view's part: also what it committed is rolled back with the operation.

    What the view committed is gone, but an error handler may still want to show it: objects keep the
    values that a commit would have left them with.
    """
    lost = running.units.is_lost() or running.units.broken is not None
    running.units.leave()  # nothing of it need be sent: the operation's ROLLBACK follows
    for session in _all(db, running):
        loaded = {} if lost else _loaded(session)
        _end_transactions(session)
        if not lost:
            loaded |= _read_again(session, loaded)
            _end_transactions(session)
        _forget_changes(session)
        for instance, values in loaded.items():
            if instance in session:
                for name, value in values.items():
                    set_committed_value(instance, name, value)


def _end_transactions(session: Session) -> None:
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
