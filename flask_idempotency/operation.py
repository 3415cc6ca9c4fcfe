"""The operation that a request is: what ``current_operation`` stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

from flask import g, has_app_context, has_request_context, request
from sqlalchemy import Connection, Engine
from werkzeug.local import LocalProxy

from .core.keys import Scope
from .errors import NotAtomic, Problem


@dataclass
class Operation:
    """One operation, identified by scope, namespace, name and key.

    ``attempt`` is 1 for its first execution and one more for each take-over. It is committed before
    the view runs, so no crash of a process makes two attempts carry one number; a crash of PostgreSQL
    may (an atomic operation's claim is committed asynchronously, docs/request.md).
    """

    name: str
    namespace: str
    scope: Scope
    key: str = field(repr=False)
    attempt: int

    @property
    def connection(self) -> Connection:
        """The SQLAlchemy connection of the operation's transaction, while the view runs.

        What is executed on it commits together with the answer. Do not end its transaction.
        """
        running = _running.get()
        if running is None or running.operation is not self:
            raise RuntimeError("the operation is not running, so it has no connection")
        running.expose()
        return running.connection


@dataclass(eq=False)
class Running:
    """An operation while its transaction is open: what the request's sessions join.

    ``expose`` is called before a view gets the connection itself. ``other_binds`` are engines it may
    write to besides. ``sessions`` are those that joined, and whether each holds changes that it
    flushed and did not commit; ``options`` are the engine's execution options they came with.
    ``broken`` is why nothing may be committed any more; it stays when the view catches the error.
    """

    operation: Operation
    connection: Connection
    expose: Callable[[], None]
    other_binds: frozenset[Engine] = frozenset()
    sessions: dict[Any, bool] = field(default_factory=dict)
    options: Mapping[str, Any] | None = None
    broken: NotAtomic | None = None

    def __post_init__(self) -> None:
        self.is_open = True
        self._home, self._outer = _home(), _running.get()
        _running.set(self)

    def end(self) -> None:
        """The transaction has ended; sessions go their own way again."""
        self.is_open = False
        self.sessions.clear()
        self.leave_context()

    def leave_context(self) -> None:
        """Forget it in the present context. A copy that somebody made of it keeps it, as ended."""
        if _running.get() is self:
            _running.set(self._outer)

    def is_here(self) -> bool:
        """Whether it is the present request's: not that of a view that sent a request of its own."""
        return self._home is _home()


class RequestState:
    """What the extension knows about one request (or, outside of one, application context)."""

    def __init__(self) -> None:
        self.name = ""
        self.key: str | None = None
        self.checked = False
        self.refusal: Exception | None = None
        self.clean_up: Callable[[], None] | None = None  # rolls back what is still open
        self.problem: Problem | None = None


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


_running: ContextVar[Running | None] = ContextVar("flask_idempotency_running", default=None)


def running_operation() -> Running | None:
    """The operation that runs in this request, or None. Asked for each statement.

    A request that a view makes to its own application, and a thread, are not part of it.
    """
    running = _running.get()
    if running is None or not running.is_here():
        return None
    if not running.is_open:
        raise NotAtomic(
            f"the operation {running.operation.name} has ended, and work that its view began goes on in"
            " a thread or task: what it writes now would be no part of it"
        )
    return running


def outer_operation() -> Running | None:
    """The operation whose view makes the present request to its own application, or None."""
    running = _running.get()
    return running if running is not None and running.is_open else None


def _home() -> Any:
    """Where the state is kept: with the request, which a nested application context shares."""
    if has_request_context():
        return request._get_current_object()  # type: ignore[attr-defined]  # noqa: SLF001
    return g._get_current_object() if has_app_context() else None  # noqa: SLF001


def _current() -> Operation:
    running = running_operation()
    if running is None:
        raise RuntimeError(
            "current_operation is only there while a view protected by @idempotent runs for a"
            " request that carries an idempotency key"
        )
    return running.operation


current_operation = cast("Operation", LocalProxy(_current))
"""A proxy to the operation that is being executed."""
