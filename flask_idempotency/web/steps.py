"""The steps of an operation that is not atomic: each runs once, and its result is stored.

Before a step the lease is renewed, which also asks whether the operation is still ours: an attempt
that was paused and taken over in the meantime starts nothing more. A step's result is recorded in one
statement that asks the same again.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, cast

from flask_idempotency.core import errors
from flask_idempotency.core.engine import Execution
from flask_idempotency.core.logs import log
from flask_idempotency.core.records import legible
from flask_idempotency.session.leftovers import holds_changes, refuse_changes, undo
from flask_idempotency.session.operation import OpenTransaction, Operation, to_continue

from .routes import AppState
from .settings import NAMES, OPTIONS, checked, is_name
from .signals import tell_mistake

_PASSING = ("53", "55P03", "57014", "58")
"""SQLSTATEs that say nothing about the step: it was rolled back, and may succeed another time. Disk,
memory or connections were all taken, a lock was not available, a query was canceled (mostly by
``statement_timeout``), or the system failed."""


MAX_BYTES = 2**20
"""How much the results of one operation's steps may take: they are part of its record, which each step
writes anew."""


@dataclass(eq=False)
class PresentStep:
    """A step that runs. ``after_commit`` is what its function wants called after the commit."""

    steps: Steps
    name: str
    is_atomic: bool
    after_commit: list[Callable[[], object]] = field(default_factory=list)


_present: ContextVar[PresentStep | None] = ContextVar("flask_idempotency_step", default=None)
"""The step whose function runs in this thread: a view may have several threads."""


class Steps:
    """The steps of one attempt. Several threads of the view may call different ones at once."""

    def __init__(
        self, state: AppState, operation: Operation, execution: Execution, binds: Sequence[str | None]
    ) -> None:
        self._state, self._operation, self._other_binds = state, operation, binds
        self._lease, self._claim = execution.hold, execution.claim
        self._recorded: dict[str, bytes | None] | None = {} if operation.attempt == 1 else None
        self._bytes = 0  # of all results
        self._called: dict[str, PresentStep] = {}  # by name
        self.finished: list[str] = []  # the steps whose results this attempt has

    def run(self, name: str, call: Callable[[], Any], *, atomic: bool) -> Any:
        """See :meth:`Operation.step`."""
        self._check(name, call)
        step = PresentStep(self, name, atomic)
        if self._called.setdefault(name, step) is not step:
            raise errors.StepError(
                f"two steps of one operation are named {name!r}, or step {name!r} is running in another"
                " thread: call each step once, and give it a name of its own"
            )
        run = partial(self._run_in_transaction if atomic else self._run_outside, step, call)
        token = _present.set(step)
        try:
            result = self._recorded_result(name)
            if (tracing := self._state.tracing) is not None:
                result = tracing.step(self._operation.name, name, result, run)
            elif result is None:
                result = run()
        except BaseException as error:
            tell_mistake(self._state, self._operation.name, error)
            del self._called[name]
            self._recorded = None  # ask again: it may be recorded all the same
            raise
        finally:
            _present.reset(token)
        self.finished.append(name)
        self._operation.after_commit += step.after_commit  # if it failed, they go with it
        with legible():
            return json.loads(result)

    def _run_outside(self, step: PresentStep, function: Callable[[], Any]) -> bytes:
        self._refuse_open_writes(f"step {step.name!r}")
        # Raises LeaseLost before anything is done that would not count.
        self._lease.extend(self._claim.lease_seconds or 0.0)
        value = function()
        # What has run is recorded as run, whatever came of it: it is never called again.
        result = failure = None
        if self._state.blocks_records():
            undo(self._state.sessions.present())
            failure = errors.StepError(
                f"step {step.name!r} was done, and left changes in db.session that it did not commit."
                " On SQLite they block the step's record, so they were undone: call it with atomic=True"
            )
        try:
            result = self._result(f"step {step.name!r} was done, but its result", value)
        except errors.StepError as error:
            failure = error
        try:
            self._record(step.name, result, self._lease)
        except errors.LeaseLost:
            log.error(
                "operation %s, record %s: another request took it over, or an operator decided, while"
                " its step %r ran: both may have called",
                self._operation.name,
                self._operation.id,
                step.name,
            )
            raise
        if failure is not None:
            raise failure
        return cast("bytes", result)

    def _run_in_transaction(self, step: PresentStep, function: Callable[[], Any]) -> bytes:
        state = self._state
        if holds_changes(state.sessions.present()):
            refuse_changes(f"step {step.name!r}")
        in_test = state.connection_of_test() is not None
        hold = self._lease.open_step(None if in_test else to_continue(state))
        try:
            with OpenTransaction(state, self._operation, hold, self._other_binds) as joined:
                try:
                    result = self._result(f"step {step.name!r} was undone: its result", function())
                    joined.commit()
                except Exception as error:
                    joined.raise_if_uncommittable(error)
                    if (errors.sqlstate(getattr(error, "orig", error)) or "").startswith(_PASSING):
                        raise errors.StoreUnavailable from error
                    raise
                joined.let_go()
            self._record(step.name, result, hold)
        finally:
            hold.abandon()
        return result

    def _result(self, what: str, value: Any) -> bytes:
        """What a step has returned, as it is stored. Raises ``StepError`` if it cannot be."""
        result = encoded(value, what, errors.StepError)
        if self._bytes + len(result) > MAX_BYTES:
            raise errors.StepError(
                f"{what} has {len(result):,} bytes: the results of"
                f" an operation's steps may take {MAX_BYTES:,} together. Return what the next steps"
                " need, and keep the rest in a table of your own"
            )
        return result

    def _record(self, name: str, result: bytes | None, hold: Any) -> None:
        self._claim.refuse_in_child()  # forked in the step's function
        if result is not None:
            self._bytes += len(result)
            result = self._state.sealer.seal_bytes(result, self._claim.key, purpose(name))
        hold.record(name, result)

    def _recorded_result(self, name: str) -> bytes | None:
        """The result that an earlier attempt, or ``on_interrupted``, has recorded, if there is one.

        Raises ``StepError`` for one that could not be stored, and where there is no room for another.
        """
        recorded = self.recorded()
        if (result := recorded.get(name)) is not None:
            return result
        if name in recorded:
            raise errors.StepError(
                f"step {name!r} was done by an earlier attempt, but its result could not be stored, so"
                " nobody knows what came of it: an operator must decide about this operation"
            )
        if self._bytes >= MAX_BYTES:
            raise errors.StepError(
                f"step {name!r} was not called: the results of this operation's steps take"
                f" {MAX_BYTES:,} bytes already, and there is no room for another"
            )
        return None

    def recorded(self) -> dict[str, bytes | None]:
        """The results that are recorded. Raises ``RecordBroken`` if they cannot be read.

        Asked before the view runs again, as its own writes would be repeated up to its first step.
        """
        if (recorded := self._recorded) is None:
            key, opened, stored = self._claim.key, self._state.sealer.open_bytes, self._lease.steps()
            recorded = {
                name: each and opened(each, key, purpose(name)) for name, each in stored.items()
            }
            self._bytes = sum(len(result or b"") for result in recorded.values())
            self._recorded = recorded
        return recorded

    def after_commit(self) -> list[Callable[[], object]]:
        """Where to put what is to be called after the commit: a step that fails drops its own."""
        present = self._present()
        return self._operation.after_commit if present is None else present.after_commit

    def begin_again(self) -> None:
        """After ``on_interrupted`` the view runs: it may ask for the steps recorded there."""
        self._called.clear()
        self.finished.clear()
        self._recorded = None

    def extend(self, seconds: float | timedelta) -> None:
        """See :meth:`Operation.extend`."""
        if (present := self._present()) is not None and present.is_atomic:
            raise errors.StepError(f"extend() inside atomic step {present.name!r}: call it before that")
        self._refuse_open_writes("extend()")
        self._lease.extend(checked("lease", seconds, OPTIONS["lease"]))

    def _refuse_open_writes(self, what: str) -> None:
        """Raise ``StepError`` if the record could not be written, because the session has written.

        Raises ``LeaseLost`` in a forked child.
        """
        self._claim.refuse_in_child()
        if self._state.blocks_records():
            raise errors.StepError(
                f"db.session had uncommitted writes when {what} was called. On SQLite they block every"
                " other write, even the record: commit them first"
            )

    def _check(self, name: str, call: Callable[[], Any]) -> None:
        """Raise ``StepError`` for what cannot be a step, before anything is done.

        Raises ``LeaseLost`` in a forked child.
        """
        self._claim.refuse_in_child()
        if not is_name(name) or not (name.isascii() or self._state.can_hold(name)):
            raise errors.StepError(
                f"a step's name is {name!r}; allowed: {NAMES}, in the encoding of the database"
            )
        if inspect.iscoroutinefunction(call):
            raise errors.StepError(
                f"the function of step {name!r} is async def; allowed is one that is not"
            )
        if (present := self._present()) is not None:
            raise errors.StepError(
                f"step {name!r} was called inside step {present.name!r}: steps do not nest"
            )

    def _present(self) -> PresentStep | None:
        """The step whose function calls this."""
        found = _present.get()
        return found if found is not None and found.steps is self else None


def purpose(name: str) -> str:
    """Name the purpose that a step's result is sealed for."""
    return f"step {name}"


def encoded(value: Any, what: str, refusal: type[errors.IdempotencyError], **how: Any) -> bytes:
    """A value as JSON, as it is stored. Raises ``refusal`` if it is none; ``what`` is its name."""
    try:
        return json.dumps(value, allow_nan=False, **how).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise refusal(
            f"{what} is not JSON ({error}): allowed are dict, list, str, number, bool and None"
        ) from error
