"""The application's own session, joined to the operation's transaction.

While an operation runs, every ``db.session`` of its request works on the operation's connection, in
savepoints (SQLAlchemy's ``join_transaction_mode="create_savepoint"``): ``commit()`` releases a
savepoint, ``rollback()`` goes back to one, and nothing but the extension ends the transaction.

Handing a connection to a session does not do it: Flask-SQLAlchemy's ``get_bind`` looks engines up by
bind key and ignores it. So the session's class gets a ``get_bind`` on top, in the private class that
each ``SQLAlchemy()`` object's ``sessionmaker`` has of its own. That needs no change by the user and
holds for sessions that ``db.session.remove()`` makes room for.
"""

from __future__ import annotations

import logging
from typing import Any

from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import Connection, Engine, Table, event, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker

from .errors import ConfigurationError, NotAtomic
from .operation import Running, outer_operation, running_operation

log = logging.getLogger("flask_idempotency")


class JoiningSession:
    """Put before the application's session class: works on a running operation's connection."""

    idempotency_engines: set[Engine]

    def get_bind(self, *args: Any, **kwargs: Any) -> Engine | Connection:
        """The connection of the operation in place of its engine; any other bind as it is."""
        bind: Engine | Connection = super().get_bind(*args, **kwargs)  # type: ignore[misc]
        running = running_operation()
        if running is None:
            engine = bind.engine
            self.__dict__.setdefault("idempotency_engines", set()).add(engine)
            return bind
        if not isinstance(bind, Engine) or bind.pool is not running.connection.engine.pool:
            return bind
        _join(self, bind, running)
        self.join_transaction_mode = "create_savepoint"
        return running.connection


def _join(session: Any, engine: Engine, running: Running) -> None:
    """Let a session work on the operation's connection as it would on its engine's.

    Raises ``NotAtomic`` where that cannot be done without surprise.
    """
    options = engine.get_execution_options()
    if running.options is None:
        own = running.connection.engine.get_execution_options()
        more = {name: value for name, value in options.items() if own.get(name) != value}
        running.connection.execution_options(**more)
        running.options = options
    elif options != running.options:
        running.broken = NotAtomic(
            f"sessions of the view of {running.operation.name} use engines with different"
            " execution_options (a schema_translate_map, for instance) within one operation"
        )
        raise running.broken
    running.sessions.setdefault(session, False)
    for other in running.sessions:
        # Savepoints nest. What this session commits inside another's would go with that one.
        if other is not session and (transaction := other.get_transaction()) is not None:
            if _has_unsaved(other, flushed=running.sessions[other]):
                running.broken = NotAtomic(
                    f"two sessions of the view of {running.operation.name} have uncommitted work at"
                    " the same time: commit one before using the other"
                )
                raise running.broken
            transaction.close()


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
        event.listen(factory.class_, "after_begin", _refuse_escape)
        event.listen(factory.class_, "after_flush", _note_flush)
        event.listen(factory.class_, "after_commit", _note_commit)


def is_joining(db: SQLAlchemy) -> bool:
    """Whether the sessions of ``db`` are of the class that :func:`install` made."""
    session_class: type = db.session.session_factory.class_
    return issubclass(session_class, JoiningSession)


def _refuse_escape(_session: Session, _transaction: Any, connection: Connection) -> None:
    """A session that begins on another connection to the operation's database would escape."""
    running = running_operation()
    if running is None or connection is running.connection:
        return
    if connection.engine.pool is running.connection.engine.pool:
        running.broken = NotAtomic(
            f"a session of the view of {running.operation.name} uses a connection of its own, so its"
            " writes cannot commit together with the record: do not hand it a bind"
        )
        raise running.broken


def _note_flush(session: Session, _context: Any) -> None:
    _note(session, unsaved=True)


def _note_commit(session: Session) -> None:
    _note(session, unsaved=False)


def _note(session: Session, *, unsaved: bool) -> None:
    running = running_operation()
    if running is not None and session in running.sessions:
        running.sessions[session] = unsaved


def end_earlier_work(db: SQLAlchemy) -> None:
    """End the transaction that the request's session began before the view.

    It gives its connection back, so that a request never needs two at once. Loaded objects stay
    usable, and changes that are not flushed yet go along into the operation. Raises ``NotAtomic`` if
    something was written: committing it would split the operation, rolling back would lose it.
    """
    if not db.session.registry.has():
        return
    session = db.session()
    transaction = session.get_transaction()
    if transaction is None:
        return
    outer = outer_operation()
    if outer is not None and _has_unsaved(session, flushed=outer.sessions.get(session, False)):
        raise NotAtomic(
            f"the view of {outer.operation.name} made a request to its own application with work in"
            " db.session that it had not committed, which both requests would share: commit it before"
        )
    for engine in tuple(getattr(session, "idempotency_engines", ())):
        if _has_written(session.connection(bind_arguments={"bind": engine})):
            raise NotAtomic(
                "db.session had written, but not committed, before the idempotent view began: commit"
                " before the view, or write inside it"
            )
    transaction.close()


def refuse_unsaved(db: SQLAlchemy, step: str) -> None:
    """Raise ``NotAtomic`` if the present session holds changes that ``step`` would commit as its own.

    After a crash the view would make them once more, and the step would not be repeated.
    """
    if db.session.registry.has() and _has_unsaved(db.session(), flushed=False):
        raise NotAtomic(
            f"db.session held changes when step {step!r} began, which would have committed with it, and"
            " once more when the operation is run again: commit them before the step, or make them in"
            " its function"
        )


def end_reads(db: SQLAlchemy) -> bool:
    """Give the connection of the present session back, if it has only been read with.

    So that what comes next needs no second one. Returns whether the session is without a transaction.
    """
    if not db.session.registry.has():
        return True
    session = db.session()
    transaction = session.get_transaction()
    if transaction is None:
        return True
    engines = tuple(getattr(session, "idempotency_engines", ()))
    try:
        if _has_unsaved(session, flushed=False) or any(
            _has_written(session.connection(bind_arguments={"bind": engine})) for engine in engines
        ):
            return False
    except SQLAlchemyError:  # it has failed, or its connection is lost: there is nothing to ask it
        return False
    transaction.close()
    return True


def commit(db: SQLAlchemy) -> None:
    """Commit what the present session has left uncommitted."""
    if db.session.registry.has():
        db.session.commit()


def end_view(db: SQLAlchemy, name: str) -> None:
    """End the part of a view that is not atomic: what it did not commit is undone, as without us."""
    if not end_reads(db):
        log.warning("the view of %s left changes it did not commit; they are undone", name)
        db.session.rollback()


def _has_written(connection: Connection) -> bool:
    """Whether the open transaction of a session's connection has changed anything."""
    if connection.dialect.name == "postgresql":
        return connection.scalar(text("SELECT txid_current_if_assigned()")) is not None
    if connection.dialect.name == "sqlite":
        return bool(getattr(connection.connection.driver_connection, "in_transaction", True))
    return True  # cannot be asked, so assume the worst


def leave(running: Running) -> None:
    """End the view's part: what its sessions did not commit is undone, as without us.

    Loaded objects stay usable for ``after_request`` functions, unless the session holds changes that
    were never committed.
    """
    for session, flushed in reversed(list(running.sessions.items())):
        transaction = session.get_transaction()
        if _has_unsaved(session, flushed=flushed):
            log.warning(
                "the view of %s left changes it did not commit; they are undone", running.operation.name
            )
            session.rollback()
        elif transaction is not None:
            transaction.close()


def _has_unsaved(session: Session, *, flushed: bool) -> bool:
    """Whether the session holds changes that were never committed."""
    changed = any(map(session.is_modified, session.dirty))
    return bool(flushed or session.new or session.deleted or changed)


def undo(running: Running) -> None:
    """Undo all of the view's part: also what it committed is rolled back with the operation."""
    for session in reversed(list(running.sessions)):
        session.rollback()
        session.expire_all()  # what was committed inside the operation is gone, so read again


def prove(db: SQLAlchemy, running: Running, table: Table) -> None:
    """Show that a session of this application works inside the operation's transaction.

    ``table`` is one on the bind that the operation protects. Raises ``ConfigurationError`` if not: then
    nothing would be protected.
    """
    session = db.session.session_factory()
    root = running.connection.get_transaction()
    try:
        joined = session.connection(bind_arguments={"clause": table}) is running.connection
        session.commit()
    except NotAtomic:
        joined = False
    finally:
        running.sessions.pop(session, None)
        session.close()
    if not joined or root is None or running.connection.get_transaction() is not root:
        raise ConfigurationError(
            "db.session does not join the operation's transaction: something replaced its class or"
            " its get_bind(), so a view's writes would not be protected"
        )
