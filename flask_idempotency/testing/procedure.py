"""One operation, sent many times at once, killed, changed; its effects counted after each."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future, wait
from typing import Any, NoReturn

from sqlalchemy import exc

from flask_idempotency.core.engine import Execution
from flask_idempotency.core.errors import ConfigurationError
from flask_idempotency.web.routes import AppState, app_state

from .comparison import differences
from .crashes import CAUGHT, Crash, CrashPoint, armed
from .effects import Counts, Effects, connection_of_test, counter, difference
from .operations import Operation, Outcome, Send, note_signals
from .watch import Point, watched

__tracebackhide__ = True  # pytest shows the test's line and the message, not what is in between

IN_VIEW_SECONDS = 1.0
"""How long the first request is held back for its duplicates. They are rejected within milliseconds;
on a route with ``wait`` they wait until it goes on."""

TIMEOUT_SECONDS = 10.0
"""Longer than any view should take, even on a slow machine; not too long for whoever waits for it."""

NO_OPERATION = (
    "Is @idempotent on the view, below the route's decorator, or does protect() cover it? Is this the"
    " route's address, with or without the slash at its end? Does a call use idempotency.run(...)? Are"
    " IDEMPOTENCY_ENABLED and IDEMPOTENCY_ENFORCE left as they are?"
)
NO_KEY = "The route saw no key: middleware removed the header, or key=... reads it elsewhere."
USED = "Its key was used before. Give each test, and each block of every_crash(), a new one, or none."
UNEXPECTED = (
    "Send what succeeds, or pass what is right: status=... or raises=.... If it conflicts with what"
    " an earlier request wrote, let each send other data."
)
ONE_CONNECTION = (
    "Duplicates at the same time need connections of their own. Let the pool have more, or pass"
    " duplicates=0, as where a fixture binds db.session to one connection and rolls back."
)
SWALLOWED = (
    "To most queues, a call that returns is done: if the first one dies now, the message is lost. Let"
    " RequestInProgress out, or raise what makes your queue deliver it again."
)
RUN = (
    "A run() in the view replays, not the view. Test a message: assert_idempotent_call(app, call),"
    " whose call sends the request and raises if the status is 400 or above."
)
UNREPLAYED = (
    "Is its key or scope=... another one each time: a random number, a time, a job's identifier? Does"
    " store=... reject the response, or skip=... leave the request out? Or an error handler turned a"
    " rejection into this response."
)
REMADE = (
    "after_request functions and middleware run on a replay again, and changed it: let what they add"
    " depend on the response alone, or name a header in ignore_headers=[...]. Let a call return what"
    " run() returns, or what follows from it alone."
)
ALIKE = (
    "A client's mistake would run, or get another one's response. Check the route's fingerprint; and"
    " its scope, which must not come from the body. Give run() payload=.... If the key is in the body,"
    " or the route ignores what was changed here, pass another: changed={'json': {...}}, or 'data'."
)
SHARED = (
    "The two share their keys. Let scope=..., of init_app() or of the route, return whose request it"
    " is: scope=lambda: current_user.id. A key must name the whole operation: what a message is about."
    " If these two are the same, pass another one in other=..."
)
OUTSIDE = (
    "A retry repeats what runs outside the operation: before_request, after_request and teardown"
    " functions, decorators above @idempotent, middleware; what a call does beside run(). Or each"
    " retry runs it again: store=... rejects the response, or its key or scope=... is another one."
)
UNLIKE = (
    "Attempt and retry must do together what the first block of every_crash() did. Does the view do"
    " more or less if current_operation.attempt is above 1? A row that only the first block adds, add"
    " before the loop."
)
IN_STEP = (
    "The worker died between step {0!r} and its record, so the retry ran it again. Give the call a key"
    " that the other system recognises: key=current_operation.derive_key({0!r}). A step that writes"
    " rows needs atomic=True."
)
UNCOMMITTED = (
    "The retry repeated what the dead attempt had done outside the operation's transaction: a call to"
    " another system, a queued job, a file, a cache: use an outbox, or step(...) with a key from"
    " derive_key(...). Or rows through db.engine, another bind, session, thread or request: write"
    " through db.session. Or rows that were committed where atomic=False: write them in step(...,"
    " atomic=True). If the two did a part each, use every_crash(), which sees a whole run."
)
MISSING = (
    "Does effects() count it? Does the view commit it, and roll nothing back, in every attempt? If"
    " store=... rejects the response, its writes are rolled back."
)
UNCOUNTED = (
    "The application's tables have as many rows as before. Does the view commit it, and roll nothing"
    " back, in every attempt? What is no row, let a function count: effects=lambda: {'mails': ...}. If"
    " it does nothing at all, say so: effects=dict."
)
FOLLOWING = (
    "The worker died right after the commit: a function given to after_commit or call_on_close is"
    " lost. What must not be lost belongs in a table, written in the same transaction (an outbox)."
)
LOCKED = (
    "Does the view write through db.engine, a session or a thread of its own? That waits for the"
    " operation's transaction: write through db.session. Or the test, or something before the view, has"
    " a transaction open: commit or close it first."
)
HANGING = f"It waits for what never comes, or for a lock. {LOCKED} If it is just slow: timeout=..."
HIDDEN = "app.testing = True shows the error."
PROBLEMS = {
    "key-required": NO_KEY,
    "key-reused": "Does the route's fingerprint, or payload=..., depend on a time or a random number?",
    "operation-interrupted": (
        "It stays interrupted if on_interrupted='hold', or by its max_attempts: pass status=409, or"
        " raises=OperationInterrupted. Or let it run again: on_interrupted='retry', more max_attempts."
    ),
    "store-unavailable": f"The pool has no connection left, or somebody else writes. {LOCKED}",
}
"""What it means to get such a problem."""


def sending(send: Send) -> Future[Outcome]:
    """What will come back. The thread is a daemon: one that hangs does not keep the process alive."""
    future: Future[Outcome] = Future()

    def run() -> None:
        try:
            future.set_result(send())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="assert_idempotent", daemon=True).start()
    return future


class Check:
    """One operation, and what it has done so far."""

    def __init__(self, operation: Operation, effects: Effects | None, timeout: float) -> None:
        self._operation, self._rows_only, self._timeout = operation, effects is None, timeout
        self._state: AppState = app_state(operation.app)
        self._counted = counter(self._state, effects)
        self._before = self._expected = self._counted()  # without and with the effects of one run
        self._by_duplicates: Counts = Counter()
        self._left: Counts = Counter()  # by the dead attempt
        self._needs_effect = True

    def run(self, duplicates: int) -> Any:
        """Send it in all the ways in which a client or a queue may; return what came back first."""
        if duplicates and connection_of_test(self._state) is not None:
            raise ConfigurationError(ONE_CONNECTION)
        operation = self._operation
        note_signals(operation.app)
        crash = next((crash for crash in reversed(armed) if self._state in crash.targets), None)
        when = who = f"the first {operation.noun}"
        if crash is not None and not crash.happened:
            outcome = self._crash(crash)
            if outcome is not None:  # the view has no such place, so there is nothing new to find out
                return outcome.result
            who, when = f"after {crash!r} a retry", f"{crash!r} and a retry"
        first, *others = self._send_at_once(duplicates)
        self._is_right(first, who, has_crashed=crash is not None)
        self._needs_effect = not first.has_failed
        if who != when and crash is not None and crash.whole_run is not None and self._needs_effect:
            self._expect_a_whole_run(crash.whole_run)
        when += f", with {duplicates} duplicates at the same time" if duplicates else ""
        self._effects_are_one(when, crash)
        for duplicate in others:
            self._is_duplicate(duplicate, first)
        self._is_same(self._sent(operation.send), first)
        self._effects_are_one("a retry")
        if operation.changed is not None:
            self._is_rejected(self._sent(operation.changed))
            self._effects_are_one(f"a changed {operation.noun} with the same key")
            self._is_same(self._sent(operation.send), first)
        if operation.other is not None:
            self._is_another(operation.other, first)
        if self._rows_only and self._needs_effect and self._expected == self._before:
            self._fail(f"after {when}, nothing was counted", UNCOUNTED)
        return first.result

    # Sending.

    def _sent(self, send: Send) -> Outcome:
        """Return what comes back, if a test can wait that long."""
        return self._result(sending(send))

    def _result(self, sent: Future[Outcome]) -> Outcome:
        if not wait([sent], self._timeout).done:
            self._hangs()
        error = sent.exception()
        if isinstance(error, exc.OperationalError) and "database is locked" in str(error):
            self._fail("SQLite's database is locked", LOCKED)
        return sent.result()

    def _hangs(self) -> NoReturn:
        self._fail(f"a request has not returned within {self._timeout:g} s", HANGING)

    def _send_at_once(self, duplicates: int) -> list[Outcome]:
        """The first request, and duplicates of it before it commits."""
        send, start = self._operation.send, self._counted()
        outcomes = self._send_during(duplicates) if duplicates else [self._sent(send)]
        # What the dead attempt has left is part of one run, unless the retry has done it once more.
        now, self._left = self._counted(), difference(self._before, start)
        done = difference(start, difference(self._by_duplicates, now))
        twice = Counter({name: left for name, left in self._left.items() if done[name]})
        self._expected = difference(twice, difference(self._by_duplicates, now))
        return outcomes

    def _expect_a_whole_run(self, whole_run: Counts) -> None:
        """Dead attempt and retry do together what the first block of ``every_crash`` has shown."""
        change = difference(self._before, self._expected)
        if not whole_run:
            whole_run.update(change)
        for name, one in whole_run.items():
            if round(change[name] - one, 6):  # floats differ a little, by what they are added to
                self._expected[name] = self._before[name] + one

    def _send_during(self, duplicates: int) -> list[Outcome]:
        """The duplicates come when the first request's view has returned, before it commits."""
        send, returned, go_on = self._operation.send, threading.Event(), threading.Event()

        def hold_first(point: Point, _execution: Execution, _step: str | None = None) -> None:
            if point == "before-commit" and not returned.is_set():
                returned.set()
                go_on.wait(self._timeout)  # what is counted may wait for what the view has locked

        with watched(self._state, hold_first):
            first = sending(send)
            first.add_done_callback(lambda _: returned.set())
            try:
                if not returned.wait(self._timeout):
                    self._hangs()
                try:
                    alone = self._counted()
                except exc.TimeoutError:
                    self._fail("the pool has no connection left to count the effects", ONE_CONNECTION)
                others = [sending(send) for _ in range(duplicates)]
                # Duplicates of a first request that has ended without a record run their view.
                wait(others, self._timeout if first.done() else IN_VIEW_SECONDS)
                self._by_duplicates = difference(alone, self._counted())
            finally:
                go_on.set()
            return [self._result(sent) for sent in (first, *others)]

    def _crash(self, crash: CrashPoint) -> Outcome | None:
        """Send the request that dies. Returns what came back if the view has no such place."""
        try:
            with crash.of_an_assertion():
                outcome = self._sent(self._operation.send)
        except Crash as died:
            if died.args != (crash,):
                raise
            return None
        if crash.has_passed_the_last_place:
            return outcome
        said = f"the first {self._operation.noun} {outcome.said}"
        if crash.happened:
            self._fail(f"something caught the crash, and {said}", CAUGHT)
        self._fail(said, self._explained(outcome) or crash.not_reached())

    # What comes back.

    def _is_right(self, first: Outcome, who: str, *, has_crashed: bool) -> None:
        """It is what the test expects, of an operation that is new, unless a request has died."""
        said = f"{who} {first.said}"
        if not first.is_right:
            self._fail(f"{said}, not {self._operation.expected}", self._explained(first) or UNEXPECTED)
        outcomes = {event.outcome for event in first.events} - {"observed"}
        if outcomes <= {"unprotected"}:
            self._fail(f"{said}, and ran no operation", NO_KEY if outcomes else NO_OPERATION)
        if first.is_replay and not has_crashed:
            self._fail(f"{said}: an earlier operation's response", USED)

    def _is_duplicate(self, duplicate: Outcome, first: Outcome) -> None:
        """It is rejected as in progress, or is a replay."""
        if duplicate.problem != "request-in-progress":
            self._is_same(duplicate, first, "a duplicate")
        elif not duplicate.has_failed:
            self._fail(f"a duplicate of a running call {duplicate.said}", SWALLOWED)

    def _is_same(self, outcome: Outcome, first: Outcome, what: str = "a retry") -> None:
        """It is a replay of the first, if anything of that is stored."""
        found = differences(first.facts, outcome.facts)
        ends = {event.outcome for event in first.events}
        is_stored = not first.has_failed or ends & {"executed", "replayed"}
        if is_stored and not outcome.is_replay:
            is_of_run = any(event.outcome == "replayed" for event in outcome.events)
            hint = self._explained(outcome) or (RUN if is_of_run else UNREPLAYED)
            self._fail(f"{what} {outcome.said}, which is no replay of the first", hint, *found)
        if found:
            hint = REMADE if outcome.is_replay else self._explained(outcome)
            self._fail(f"{what} {outcome.said}, which differs from the first", hint, *found)

    def _is_rejected(self, changed: Outcome) -> None:
        """The key belongs to something else."""
        if changed.problem != "key-reused":
            said = f"a changed {self._operation.noun} with the same key {changed.said}"
            self._fail(f"{said}, and was not rejected", ALIKE)

    def _is_another(self, send: Send, first: Outcome) -> None:
        """The other operation has a response and an effect of its own."""
        whose, start = self._operation.whose, self._counted()
        theirs = self._sent(send)
        has_effect = self._counted() != start
        if theirs.is_replay or theirs.problem == "key-reused":
            self._fail(f"{whose} {theirs.said}: it is taken for the first one", SHARED)
        if theirs.has_failed and not first.has_failed:
            hint = "Pass one in other=... that succeeds: one of a user who is signed in."
            self._fail(f"{whose} {theirs.said}, but the first {first.said}", hint)
        if self._needs_effect and self._expected != self._before and not has_effect:
            self._fail(f"{whose} had no effect of its own", MISSING)
        self._before = difference(difference(self._before, start), self._counted())
        self._expected = self._counted()
        self._is_same(self._sent(send), theirs, f"a retry of {whose}")
        self._is_same(self._sent(self._operation.send), first)
        self._effects_are_one("retries of both")

    def _explained(self, outcome: Outcome) -> str:
        """Say what it means that this came back, if it does not say that itself."""
        if outcome.facts.get("status") == 500 and not self._state.app.testing:
            return HIDDEN
        return PROBLEMS.get(outcome.problem or "", "")

    # Effects.

    def _effects_are_one(self, when: str, crash: CrashPoint | None = None) -> None:
        """The effects are those of one run. What died at ``crash`` may have left some of them."""
        now = self._counted()
        wrong = [name for name in now if now[name] != self._expected[name]]
        needed = self._needs_effect and not self._rows_only
        missing = [name for name in now if needed and now[name] == self._before[name]]
        if not wrong and not missing:
            return
        hints = [self._why(wrong, crash)] if wrong else []
        if missing:
            has_committed = crash is not None and crash.point == "after-commit"
            hints.append(FOLLOWING if has_committed else MISSING)
        changed, one = difference(self._before, now), difference(self._before, self._expected)
        found = [f"{name} changed by {changed[name]:+}, not by {one[name]:+}" for name in wrong]
        found += [f"{name} did not change" for name in missing if name not in wrong]
        self._fail(f"after {when}", " ".join(hints), *found)

    def _why(self, wrong: list[str], crash: CrashPoint | None) -> str:
        """Say where to look for what is ``wrong``."""
        if crash is None or any(self._by_duplicates[name] for name in wrong):
            return OUTSIDE
        if not any(self._left[name] for name in wrong):
            return UNLIKE
        if crash.step is not None:
            return IN_STEP.format(crash.step)
        return UNCOMMITTED if crash.point in ("in-view", "before-commit") else OUTSIDE

    def _fail(self, what: str, hint: str, *found: str) -> NoReturn:
        """Raise ``AssertionError`` with what is wrong, and where to look."""
        lines = [f"{self._operation.name}: {what}", *(f"  {line}" for line in found), hint]
        raise AssertionError("\n".join(line for line in lines if line))
