"""The steps of an operation that is not atomic: each runs once, and its result is kept.

Before a step the lease is renewed, which also asks whether the operation is still ours: an attempt
that was paused and taken over meanwhile begins nothing more. A step's result is recorded in one
statement that asks the same again.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

from . import session
from .core.ports import Lease
from .core.records import Claim
from .errors import StepError
from .operation import Operation
from .options import read_lease
from .state import AppState
from .work import Work

_present: ContextVar[tuple[Steps, str, bool] | None] = ContextVar(
    "flask_idempotency_step", default=None
)
"""The step whose function runs, and whether it is atomic. Of this thread: a view may have several."""


class Steps:
    """The steps of one attempt."""

    def __init__(
        self,
        state: AppState,
        operation: Operation,
        lease: Lease,
        claim: Claim,
        other_binds: Sequence[str | None],
    ) -> None:
        self._state, self._operation, self._lease, self._claim = state, operation, lease, claim
        self._other_binds = other_binds
        self._seconds = claim.lease_seconds or 0.0
        self._recorded: dict[str, bytes] | None = {} if operation.attempt == 1 else None
        self._used: set[str] = set()

    def run(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        atomic: bool,
    ) -> Any:
        """See :meth:`Operation.step`."""
        self._check(name, function)
        recorded = self._lease.steps() if self._recorded is None else self._recorded
        self._recorded = None  # ask again if this does not end well: it may be recorded all the same
        stored = recorded.get(name)
        if stored is not None:
            result = self._state.sealer.open_bytes(stored, self._claim.key, _purpose(name))
        elif atomic:
            result = self._run_in_transaction(name, function, args, kwargs)
        else:
            with session.parked(self._state.db, self._state.pool):
                self._lease.extend(self._seconds)
            with self._named(name, atomic=False):
                result = _encoded(name, function(*args, **kwargs))
            with session.parked(self._state.db, self._state.pool):
                self._lease.record(name, self._sealed(name, result))
        recorded[name] = self._sealed(name, result)
        self._recorded = recorded
        self._used.add(name)
        return json.loads(result)

    def begin_again(self) -> None:
        """The view comes now, after ``on_interrupted``: it may ask for the steps that this recorded."""
        self._used.clear()

    def extend(self, seconds: float | timedelta) -> None:
        """See :meth:`Operation.extend`."""
        seconds = read_lease(seconds)
        if (present := self._present()) is not None and present[1]:
            raise StepError(
                f"extend() was called inside step {present[0]!r}, which is atomic: its transaction"
                " holds the record. Call it before; the end of the step renews the lease"
            )
        self._lease.extend(seconds)

    def _check(self, name: object, function: Callable[..., Any]) -> None:
        """Raise ``StepError`` for what cannot be a step, before anything is done."""
        if not isinstance(name, str) or not 1 <= len(name) <= 255 or "\0" in name:
            raise StepError(f"a step's name has 1 to 255 characters and no NUL; this is {name!r}")
        if inspect.iscoroutinefunction(function):
            raise StepError(f"the function of step {name!r} is async def; allowed is one that is not")
        if (present := self._present()) is not None:
            raise StepError(f"step {name!r} was called inside step {present[0]!r}: steps do not nest")
        if name in self._used:
            raise StepError(
                f"two steps of one operation are named {name!r}: run again, the second would be given"
                " the first one's result"
            )

    def _present(self) -> tuple[str, bool] | None:
        """The name of the step whose function calls this, and whether it is atomic."""
        found = _present.get()
        return found[1:] if found is not None and found[0] is self else None

    @contextmanager
    def _named(self, name: str, *, atomic: bool) -> Iterator[None]:
        token = _present.set((self, name, atomic))
        try:
            yield
        finally:
            _present.reset(token)

    def _run_in_transaction(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bytes:
        session.refuse_unsaved(self._state.db, name)
        state = self._state
        before = session.set_aside(state.db, state.pool)
        try:
            return self._run_joined(name, function, args, kwargs, before)
        finally:
            if before is not None:
                before.end()

    def _run_joined(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: session.SetAside | None,
    ) -> bytes:
        hold = self._lease.begin()
        try:
            work = Work(self._state, self._operation, hold, self._other_binds, before)
            try:
                try:
                    with self._named(name, atomic=True):
                        result = _encoded(name, function(*args, **kwargs))
                        work.commit()
                except Exception as error:
                    work.raise_if_void(error)
                    raise
                work.raise_if_void(None)
                work.leave()
                hold.record(name, self._sealed(name, result))
            finally:
                work.abandon()
        finally:
            hold.abandon()
        return result

    def _sealed(self, name: str, result: bytes) -> bytes:
        return self._state.sealer.seal_bytes(result, self._claim.key, _purpose(name))


def _purpose(name: str) -> str:
    return f"step {name}"


def _encoded(name: str, value: Any) -> bytes:
    """A step's result as it is kept. Raises ``StepError`` if it is not JSON."""
    try:
        return json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise StepError(
            f"the step {name!r} was done, but its result cannot be kept, as it is not JSON ({error}):"
            " return a dict, list, str, number, bool or None"
        ) from error
