"""The operation that a request is: what ``current_operation`` stands for."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

from flask import g, has_app_context, has_request_context, request
from sqlalchemy import Connection, Engine
from werkzeug.local import LocalProxy

from .core.keys import Scope
from .errors import NotAtomic, Problem


@dataclass(eq=False)
class Operation:
    """One operation, identified by scope, namespace, name and key.

    ``attempt`` is 1 for its first execution and one more for each take-over; it is durable before
    the view runs and serves as a fencing token.
    """

    name: str
    namespace: str
    scope: Scope
    key: str = field(repr=False)
    attempt: int
    other_binds: frozenset[Engine] = field(default=frozenset(), repr=False)
    broken: NotAtomic | None = field(default=None, repr=False)
    sessions: dict[Any, bool] = field(default_factory=dict, repr=False)
    home: Any = field(default=None, repr=False)
    _connection: Connection | None = field(default=None, repr=False)
    _outer: Operation | None = field(default=None, repr=False)

    @property
    def connection(self) -> Connection:
        """The SQLAlchemy connection of the operation's transaction, while the view runs.

        What is executed on it commits together with the answer. Do not end its transaction.
        """
        if self._connection is None:
            raise RuntimeError("the operation is not running, so it has no connection")
        return self._connection

    @property
    def running(self) -> bool:
        """Whether its transaction is open."""
        return self._connection is not None

    def open(self, connection: Connection) -> None:
        """The transaction on ``connection`` is the operation's from now on."""
        self._connection, self.home, self._outer = connection, _home(), _running.get()
        _running.set(self)

    def close(self) -> None:
        """The transaction has ended; sessions go their own way again."""
        self._connection = None
        self.sessions.clear()
        if _running.get() is self:
            _running.set(self._outer)


class RequestState:
    """What the extension knows about one request (or, outside of one, application context)."""

    def __init__(self) -> None:
        self.name = ""
        self.key: str | None = None
        self.checked = False
        self.refusal: Exception | None = None
        self.abandon: Callable[[], None] | None = None  # rolls back what is still open
        self.problem: Problem | None = None
        self.replayed = False


_ATTRIBUTE = "_flask_idempotency"


def request_state() -> RequestState:
    """The state of the present request, made when first asked for."""
    state = known_state()
    if state is None:
        state = RequestState()
        setattr(_home(), _ATTRIBUTE, state)
    return state


def known_state() -> RequestState | None:
    """The state of the present request, if the extension has had to do with it."""
    return cast("RequestState | None", getattr(_home(), _ATTRIBUTE, None))


_running: ContextVar[Operation | None] = ContextVar("flask_idempotency_running", default=None)


def running_operation() -> Operation | None:
    """The operation whose transaction is open in this request, or None. Asked for each statement.

    A request that a view makes to its own application, and a thread, are not part of it.
    """
    operation = _running.get()
    if operation is None or not operation.running or operation.home is not _home():
        return None
    return operation


def outer_operation() -> Operation | None:
    """The operation whose view makes the present request to its own application, or None."""
    operation = _running.get()
    return operation if operation is not None and operation.running else None


def _home() -> Any:
    """Where the state is kept: with the request, which a nested application context shares."""
    if has_request_context():
        return request._get_current_object()  # type: ignore[attr-defined]  # noqa: SLF001
    return g._get_current_object() if has_app_context() else None  # noqa: SLF001


def _current() -> Operation:
    operation = running_operation()
    if operation is None:
        raise RuntimeError(
            "current_operation is only there while a view protected by @idempotent runs for a"
            " request that carries an idempotency key"
        )
    return operation


current_operation = cast("Operation", LocalProxy(_current))
"""A proxy to the operation that is being executed."""
