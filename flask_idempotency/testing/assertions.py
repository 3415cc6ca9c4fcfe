"""``assert_idempotent``: what a client that retries may meet, sent to an application's own endpoint."""

from __future__ import annotations

import copy
import threading
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from contextvars import Context
from dataclasses import dataclass
from typing import Any, NoReturn

from flask.testing import FlaskClient
from sqlalchemy import StaticPool
from werkzeug.datastructures import Headers
from werkzeug.test import TestResponse

from flask_idempotency.core.records import Claim
from flask_idempotency.web.setup.state import AppState, app_state

from .crashes import Crash, CrashPoint, armed
from .responses import changed_request, differences, shown
from .watch import Watch, watched

__tracebackhide__ = True  # pytest shows the test's line and the message, not what is in between

Effects = Callable[[], int | Mapping[str, int]]

IN_VIEW_SECONDS = 1.0
"""How long the first request is held back for its duplicates. They are rejected within milliseconds;
on a route with ``wait`` they wait until it goes on."""

OUTSIDE = (
    "A retry repeats what runs outside the view: before_request and after_request functions, decorators"
    " above @idempotent, middleware. Or @idempotent does not protect the view at all."
)
UNCOMMITTED = (
    "The retry repeated what the dead attempt had done outside the operation's transaction: a call to"
    " another system, a write through db.engine or another bind, a commit in a view with atomic=False."
    " Write through db.session; make calls after the commit (an outbox), or as"
    " current_operation.step(...) with a key from derive_key(...)."
)
MISSING = (
    "Does effects() count it, and can it see what is committed? Does the view commit it? If store=..."
    " rejects the response, the view's writes are rolled back."
)
FOLLOWING = (
    "The worker died right after the commit. What was due after it, such as a function given to"
    " after_commit, is lost, and no retry makes up for it. What must not be lost belongs in a table,"
    " written in the same transaction (an outbox)."
)
UNMARKED = (
    "Is @idempotent on the view, below the route's decorator, and does the route read its key where the"
    " request has it?"
)
REMADE = (
    "A replay is the stored response, byte for byte; after_request functions and middleware run on it"
    " again, and changed it. Let what they add depend on the response alone, or name a header that may"
    " differ in ignore_headers=[...]."
)
ALIKE = (
    "A client's mistake would get another request's response. Check the route's fingerprint. If the key"
    " is in the body, or the route ignores what was changed here, pass a changed request of your own:"
    " changed={'json': {...}}."
)


class NotConcurrentWarning(UserWarning):
    """Requests could not be sent at the same time, so nothing is known about concurrent duplicates."""


def assert_idempotent(
    client: FlaskClient,
    method: str,
    path: str,
    *,
    effects: Effects | None = None,
    status: int | None = None,
    duplicates: int = 3,
    changed: Mapping[str, Any] | bool = True,
    ignore_headers: Sequence[str] = (),
    **kwargs: Any,
) -> TestResponse:
    """Send one operation in all the ways in which a client may, and assert one effect and one response.

    It sends the request, ``duplicates`` of it while the first is still in its view, a retry, the same
    key with another body, and one more retry. In a block of :func:`crash_at` or :func:`every_crash` a
    request dies before all these. Each gets an application context of its own, as in production.

    * ``kwargs`` are those of ``client.open``. Without an idempotency key in ``headers`` a new one is
      sent.
    * ``effects`` is called in an application context, and counts what one operation does once: a
      number, or several by name: ``lambda: {"payments": count(), "mails": len(outbox)}``. Each must
      rise by one.
    * ``status`` is that of the operation's response; left out, any below 400. With 400 or above, an
      effect may be missing, and an operation that ``on_interrupted`` holds (409) is not replayed.
    * ``changed`` is what makes the other request: arguments that replace those in ``kwargs``. True
      makes one up, False leaves this check out.
    * ``ignore_headers`` may differ between the responses, as ``Date``, ``Set-Cookie`` and the
      ``Vary: Cookie`` of Flask's session always may.

    Returns the first response. Raises ``AssertionError``, which says what differs and where to look.
    """
    check = Check(client, method, path, kwargs, effects, ignore_headers)
    crash = next((crash for crash in reversed(armed) if check.state in crash.targets), None)
    when = "the first request"
    if crash is not None and not crash.happened:
        response = check.crash(crash)
        if response is not None:  # the view has no such place, so there is nothing new to find out
            return response
        when = f"{crash!r} and a retry"
    first, *others = check.send_at_once(duplicates)
    check.has_status(first, when, status)
    check.is_held = first.status_code == 409 and crash is not None
    at_least = 1 if first.status_code < 400 else 0
    when += f", with {duplicates} duplicates at the same time" if duplicates else ""
    check.effects_are_one(when, at_least, crash)
    for other in others:
        check.is_duplicate(other, first)
    check.is_retry(check.send(), first)
    check.effects_are_one("a retry", at_least)
    if changed is not False:
        request = changed_request(kwargs) if changed is True else {**kwargs, **changed}
        check.is_rejected(check.send(request))
        check.effects_are_one("the same key with another body", at_least)
        check.is_retry(check.send(), first)
    return first


@dataclass
class Check:
    """One operation of an application under test."""

    client: FlaskClient
    method: str
    path: str
    kwargs: Mapping[str, Any]
    effects: Effects | None
    ignore_headers: Sequence[str]
    is_held: bool = False  # the operation is interrupted, and nobody runs it again

    def __post_init__(self) -> None:
        self.state: AppState = app_state(self.client.application)
        self._replayed, self._header = self.state.settings.replayed_header, self.state.settings.header
        self._key = f'"{uuid.uuid4()}"'
        self._ignored = {"date", "server", "set-cookie", self._replayed.lower()}
        self._ignored.update(name.lower() for name in self.ignore_headers)
        self._before = self._counted()

    def send(self, kwargs: Mapping[str, Any] | None = None) -> TestResponse:
        """One request, in a context of its own."""
        kwargs = copy.deepcopy(dict(self.kwargs if kwargs is None else kwargs))  # a file is read once
        headers = kwargs["headers"] = Headers(kwargs.get("headers"))
        if self._header not in headers:
            headers[self._header] = self._key
        # A client in a with block keeps its last request's context, which is of no use in another.
        twin = copy.copy(self.client)
        vars(twin).update(preserve_context=False, _context_stack=ExitStack(), _new_contexts=[])
        return Context().run(twin.open, self.path, method=self.method, **kwargs)

    def send_at_once(self, duplicates: int) -> list[TestResponse]:
        """The first request, and duplicates of it before it commits."""
        if duplicates and any(isinstance(e.pool, StaticPool) for e in self.state.engines.values()):
            warnings.warn(
                "all requests share one connection to the database in memory, so the duplicates came"
                " one after the other: use a SQLite file to send them at the same time, or pass"
                " duplicates=0",
                NotConcurrentWarning,
                stacklevel=3,
            )
            return [self.send() for _ in range(1 + duplicates)]
        gate = Gate()
        with watched(self.state, gate), ThreadPoolExecutor(1 + duplicates) as pool:
            try:
                first = pool.submit(self.send)
                first.add_done_callback(lambda _: gate.reached.set())
                gate.reached.wait()
                others = [pool.submit(self.send) for _ in range(duplicates)]
                wait(others, IN_VIEW_SECONDS)
            finally:
                gate.opened.set()
            return [future.result() for future in (first, *others)]

    def crash(self, crash: CrashPoint) -> TestResponse | None:
        """Send the request that dies. Returns its response if it has passed the last place instead."""
        try:
            response = self.send()
        except Crash as died:
            if died.args != (crash,):
                raise
            return None
        if crash.has_passed_the_last_place:
            return response
        if crash.happened:
            self._fail(
                f"something caught the crash and responded with {shown(response)}",
                "A bare except: or except BaseException: also keeps a worker from exiting.",
            )
        self._fail(f"the first request got {shown(response)}", crash.not_reached())

    def has_status(self, response: TestResponse, when: str, status: int | None) -> None:
        """The operation's response has the expected status."""
        if status is None and response.status_code >= 400:
            hint = "Send a request that succeeds, or pass the right response's status=..."
            if response.status_code == 409:
                hint += " An operation with on_interrupted='hold' stays interrupted: status=409."
            self._fail(f"after {when} the response is {shown(response)}", hint)
        if status not in (None, response.status_code):
            self._fail(f"after {when} the response is {shown(response)}, not {status}", "")

    def is_duplicate(self, response: TestResponse, first: TestResponse) -> None:
        """A duplicate is rejected as in progress, or gets the first response."""
        if response.status_code == 409 and self._replayed not in response.headers:
            return
        if response.status_code != first.status_code:
            hint = (
                "It must get 409, or the first one's response. Does the pool have a connection for it?"
            )
            self._fail(f"a duplicate of a running request got {shown(response)}", hint)
        self.is_retry(response, first, "a duplicate")

    def is_retry(self, response: TestResponse, first: TestResponse, what: str = "a retry") -> None:
        """A retry gets the first response, marked as a replay."""
        if found := differences(first, response, self._ignored):
            hint = REMADE if self._replayed in response.headers else UNMARKED
            self._fail(f"{what} got another response than the first request", hint, *found)
        if self._replayed not in response.headers and not self.is_held:
            self._fail(f"{what} got {shown(response)}, without the header {self._replayed}", UNMARKED)

    def is_rejected(self, response: TestResponse) -> None:
        """The key belongs to another request."""
        if response.status_code != 422:
            self._fail(f"the same key with another body got {shown(response)}, not 422", ALIKE)

    def effects_are_one(self, when: str, at_least: int, crash: CrashPoint | None = None) -> None:
        """Each count has risen by one. What died at ``crash`` may have left some effects."""
        now = self._counted()
        rises = {name: count - self._before.get(name, 0) for name, count in now.items()}
        wrong = {name: rise for name, rise in rises.items() if not at_least <= rise <= 1}
        if not wrong:
            return
        hints = []
        if max(wrong.values()) > 1:
            # The dead attempt ran once and the retry once: what is there three times has another cause.
            ran = crash is not None and crash.point in ("in-view", "before-commit")
            hints.append(UNCOMMITTED if ran and max(wrong.values()) == 2 else OUTSIDE)
        if min(wrong.values()) < 1:
            has_committed = crash is not None and crash.point == "after-commit"
            hints.append(FOLLOWING if has_committed else MISSING)
        found = [f"{name} rose by {rise}, not by 1" for name, rise in wrong.items()]
        self._fail(f"after {when}", " ".join(hints), *found)

    def _counted(self) -> dict[str, int]:
        def count() -> int | Mapping[str, int]:
            with self.client.application.app_context():
                return self.effects() if self.effects else {}

        counted = Context().run(count)
        return {"effects()": counted} if isinstance(counted, int) else dict(counted)

    def _fail(self, what: str, hint: str, *found: str) -> NoReturn:
        lines = [f"{self.method} {self.path}: {what}", *(f"  {line}" for line in found), hint]
        raise AssertionError("\n".join(line for line in lines if line))


class Gate(Watch):
    """Holds the first request back before its commit, so that its duplicates meet it."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def completing(self, claim: Claim) -> None:  # noqa: ARG002
        """The view has returned."""
        if not self.reached.is_set():
            self.reached.set()
            self.opened.wait()
