"""The operation that runs, and the transaction that is open for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar
from weakref import ref

from flask import g, has_app_context, has_request_context, request
from sqlalchemy import Connection, Engine

from flask_idempotency.core.errors import NotAtomic
from flask_idempotency.core.keys import SHOWN, Scope, derive_key, hash_key

from .databases import bind_keys_of
from .transaction import OperationTransaction, innermost

T = TypeVar("T")


def present_request() -> Any:
    """The present request, or None. Whoever pushes an application context in it is still in it."""
    return request._get_current_object() if has_request_context() else None  # type: ignore[attr-defined]  # noqa: SLF001 -- Flask documents it


def present_context() -> Any:
    """Return what identifies the present application context: its ``flask.g``, or None."""
    return g._get_current_object() if has_app_context() else None  # noqa: SLF001 -- as above


class RunsSteps(Protocol):
    """The steps of an operation that is not atomic. :class:`Operation` documents the verbs."""

    def run(self, name: str, call: Callable[[], T], *, atomic: bool) -> T:
        """See :meth:`Operation.step`."""

    def extend(self, seconds: float | timedelta) -> None:
        """See :meth:`Operation.extend`."""

    def after_commit(self) -> list[Callable[[], object]]:
        """Where to put what is to be called after the commit."""


@dataclass
class Operation:
    """One operation, identified by scope, namespace, name and key.

    ``attempt`` is 1 for its first execution and one more for each take-over. It is committed before
    the view runs, so no crash of a process makes two attempts carry one number; a crash of PostgreSQL
    may (an atomic operation's claim is committed asynchronously, docs/request.md). ``born`` is when
    its key was made, in seconds since 1970, where old keys are refused and it says so.
    """

    name: str
    namespace: str
    scope: Scope = field(repr=False)
    key: str = field(repr=False)
    attempt: int
    born: float | None = field(default=None, repr=False, compare=False)
    steps: RunsSteps | None = field(default=None, init=False, repr=False, compare=False)
    after_commit: list[Callable[[], object]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @property
    def id(self) -> str:
        """The digits by which commands, log lines and events name the record. They are no secret."""
        return self.hashed_key().hex()[:SHOWN]

    @property
    def connection(self) -> Connection:
        """The SQLAlchemy connection of the operation's transaction, while the view runs.

        What is executed on it commits together with the response (in a step with ``atomic=True``:
        with the step), and is part of the transaction that ``db.session`` is in at that moment, if it
        is in one. Do not end its transaction.
        """
        running = innermost.get()
        if not isinstance(running, OpenTransaction) or running.operation is not self:
            raise RuntimeError("the operation has no transaction open, so it has no connection")
        running.transaction.show()
        return running.transaction.connection

    def step(
        self,
        name: str,
        function: Callable[..., T],
        /,
        *args: Any,
        atomic: bool = False,
        **kwargs: Any,
    ) -> T:
        """Run ``function(*args, **kwargs)`` once for this operation, and store its result.

        If the operation runs again after a crash, the stored result is returned without another
        call. For operations with ``atomic=False``. ``name`` has 1 to 255 characters, no NUL and no
        lone surrogate. Each step has a name of its own, runs in one thread, and does not nest. The
        result must be JSON; what comes back is the decoded JSON, even the first time. Each finished
        step renews the lease. With ``atomic=True`` the function's writes in ``db.session`` commit
        together with the step, even if it does not call ``commit()``.

        A call that is cut off in the middle is made again: pass the other side a key from
        :meth:`derive_key`, so that it can recognise the repetition. The lease is renewed before the
        call.

        Raises ``LeaseLost`` if another request has taken the operation over, ``StepError`` for a name
        that cannot be one, that was used before or whose step is running in another thread, and for a
        result that is not JSON, ``StoreUnavailable`` if the database cannot be reached, and what the
        function raises.
        """
        steps = self._running_steps("step")
        return steps.run(name, partial(function, *args, **kwargs), atomic=atomic)

    def extend(self, seconds: float | timedelta) -> None:
        """Let the lease run for at least ``seconds`` (a number or a timedelta) from now on.

        For operations with ``atomic=False``. Raises ``LeaseLost``, ``StoreUnavailable``, and
        ``ConfigurationError`` for a value that the option ``lease`` would reject.
        """
        self._running_steps("extend").extend(seconds)

    def note_after_commit(self, function: Callable[[], object]) -> None:
        """Call ``function`` once this, and the step whose function asks for it, has committed."""
        (self.after_commit if self.steps is None else self.steps.after_commit()).append(function)

    def derive_key(self, name: str) -> str:
        """A key to send to another API for the call ``name`` of this operation.

        The same for every attempt, different for every operation and name: 43 letters, digits, ``-``
        and ``_``. It reveals nothing about the client's key.
        """
        return derive_key(self.hashed_key(), name)

    def hashed_key(self) -> bytes:
        """The 23 bytes by which the operation's record is found. They reveal nothing about the key."""
        return hash_key(self.namespace, self.name, self.scope, self.key)

    def _running_steps(self, what: str) -> RunsSteps:
        if self.steps is None:
            raise RuntimeError(
                f"{what}() is for views with @idempotent(atomic=False), while they run; in an atomic"
                " operation everything commits together, or nothing does"
            )
        return self.steps


@dataclass(eq=False)
class Running:
    """An operation from its beginning on, in the context in which it was begun and copies of that."""

    operation: Operation

    def __post_init__(self) -> None:
        self.is_open = True
        self._request, self._context = present_request(), present_context()
        self.outer = innermost.get()
        innermost.set(self)

    def is_here(self) -> bool:
        """Return True if it is the present request's, not that of a view that has sent this request."""
        return self._request is present_request()

    def transaction_of(self, session: Any) -> OpenTransaction | None:  # noqa: ARG002
        """The transaction that a session is to join: none, its view has its own."""
        return None

    def end(self) -> None:
        """End it: what follows is no part of it."""
        self.is_open = False
        if innermost.get() is self:
            innermost.set(self.outer)


@dataclass(eq=False)
class OpenTransaction(Running):
    """An operation while its transaction is open: what the request's sessions join.

    ``engines`` are the application's by bind key, ``other_binds`` those that the view may use besides.
    ``sessions`` are those that joined, each with its own ``join_transaction_mode``.
    """

    transaction: OperationTransaction
    engines: Mapping[str | None, Engine]
    other_binds: frozenset[Engine] = frozenset()
    sessions: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.transaction.running = ref(self)

    def is_in_context(self) -> bool:
        """Return True if this is its application context, not another one that the view has pushed."""
        return self._context is present_context()

    def transaction_of(self, session: Any) -> OpenTransaction | None:
        """This, if a session's work is the view's. Asked for each statement.

        So is the work of a request that the view makes to its own application, if the two share their
        application context, and therefore ``db.session``. Raises ``NotAtomic`` if the operation ended.
        """
        if session not in self.sessions and not (self.is_here() or self.is_in_context()):
            return None
        if not self.is_open:
            self.refuse_late()
        return self

    def refuse_late(self) -> NoReturn:
        """Raise ``NotAtomic`` for work that goes on after the end."""
        raise NotAtomic(
            f"the operation {self.operation.name} has ended, and work that its view started is still"
            " running in a thread or task: what it writes now would not be part of it"
        )

    def refuse_other(self, engine: Engine) -> NoReturn:
        """Raise ``NotAtomic`` for a session that chooses another database."""
        keys = bind_keys_of(engine, self.engines)
        allow = (
            "If a lost or doubled write there does no harm, allow it with"
            f" @idempotent(other_binds={keys})"
            if keys
            else "Let it use db.engine, or for another database an engine of SQLALCHEMY_BINDS"
        )
        self.transaction.refuse(
            f"a session of the view of {self.operation.name} uses another bind, which cannot commit"
            f" together with the record; nothing was committed. It is the database"
            f" {engine.url.database}. {allow}"
        )

    def let_sessions_go(self) -> None:
        """They go their own way from now on."""
        for session, mode in self.sessions.items():
            session.join_transaction_mode = mode
        self.sessions.clear()
        self.end()


def forget_parents() -> None:
    """In a forked child, forget the operation of its parent, and refuse what would go on in it."""
    innermost.set(None)


def forget_ended() -> None:
    """Forget the operation that has ended, in the present context. Copies made of it keep it."""
    running = innermost.get()
    if running is not None and not running.is_open:
        innermost.set(running.outer)


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call what may end an operation in a thread, in a copy of the present context."""
    try:
        return await asyncio.to_thread(function, *args)
    finally:
        forget_ended()


def running_operation() -> Running | None:
    """Return what runs in this request, or None. Raises ``NotAtomic`` if its transaction has ended.

    A request that a view makes to its own application, and a thread, are not part of it.
    """
    running: Running | None = innermost.get()
    if running is None or not running.is_here():
        return None
    if running.is_open:
        return running
    if isinstance(running, OpenTransaction):
        running.refuse_late()
    return None


def outer_transaction() -> OpenTransaction | None:
    """That of the operation whose view makes the present request to its own application, or None."""
    running = innermost.get()
    if running is None or not running.is_open or not isinstance(running, OpenTransaction):
        return None
    return running
