"""``assert_idempotent``: what a client that retries may meet, sent to an application's own endpoint."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from contextvars import Context
from functools import cached_property
from typing import Any, Literal

from flask.testing import EnvironBuilder, FlaskClient
from werkzeug.datastructures import Headers
from werkzeug.exceptions import HTTPException
from werkzeug.test import TestResponse

from flask_idempotency.core.errors import ConfigurationError, KeyReused
from flask_idempotency.core.keys import uuid7
from flask_idempotency.core.storable import REPLAYED
from flask_idempotency.web.routes import name_of, refuse_misplaced, route_of

from .comparison import changed_request, differences, shown
from .crashes import CrashPoint, armed
from .effects import Effects, kind_of
from .procedure import TIMEOUT_SECONDS, Check

__tracebackhide__ = True  # pytest shows the test's line and the message, not what is in between

OUTSIDE = (
    "A retry repeats what runs outside the view: before_request, after_request and teardown functions,"
    " decorators above @idempotent, middleware. Or each retry runs the view, because store=... rejects"
    " the response, or the key does not reach the route, or scope=... is another one in each request."
)
MISSING = (
    "Does effects() count it, and can it see what is committed? Does the view commit it, and roll"
    " nothing back, in every attempt? If store=... rejects the response, the view's writes are rolled"
    " back."
)
UNREPLAYED = (
    "The view is protected, but its response was not found again. Does the route read its key where the"
    " request has it, does store=... accept the response, does skip=... not leave the request out, and"
    " does scope=... return the same for each request of a user?"
    " Or an error handler turned a rejection into this response."
)
SHARED = (
    "The two users share their keys, so one sees the other's response. Let scope=..., the one of"
    " init_app() or of the route, return whose request it is: scope=lambda: current_user.id. A key=..."
    " of the route must name the whole operation. If these two are the same user, pass another one's in"
    " other=..."
)
REMADE = (
    "A replay is the stored response, byte for byte; after_request functions and middleware run on it"
    " again, and changed it. Let what they add depend on the response alone, or name a header that may"
    " differ in ignore_headers=[...]."
)
ALIKE = (
    "A client's mistake would run as another operation, or get another request's response. Check the"
    " route's fingerprint; and its scope, which must not come from the body. If the key is in the body,"
    " or the route ignores what was changed here, pass a changed request of your own:"
    " changed={'json': {...}}, or changed={'data': {...}} for a form."
)
USED = (
    "Its key was used before, so there is nothing to find out. Send a new one in each test, and in each"
    " block of every_crash(); or leave it out, and the kit makes one."
)
PROBLEMS = {
    "key-required": (
        "The request had a key, and the view did not see it: middleware removed the header, or the"
        " route reads its key elsewhere, where this request has none."
    ),
    "key-reused": (
        "It was the same request, and was taken for another one. Does the route's fingerprint depend on"
        " a time or a random number?"
    ),
    "key-malformed": (
        "The route takes no such key as this one; without a key in headers, the kit sends a UUID of 36"
        " characters. Pass one that is right: headers={'Idempotency-Key': ...}, a new one for each."
    ),
    "operation-interrupted": (
        "An operation with on_interrupted='hold' stays interrupted: pass status=409. Or declare that it"
        " may run again: on_interrupted='retry'."
    ),
    "store-unavailable": (
        "The database cannot be reached; or, with SQLite, somebody else writes in it: the test, or"
        " something before the view, has a transaction open. Commit or close it first."
    ),
    "scope-unknown": (
        "The scope found nobody: send what signs a user in, such as headers={'Authorization': ...}."
    ),
}
"""What it means that a request got such a problem."""


def assert_idempotent(
    client: FlaskClient,
    method: str,
    path: str,
    *,
    effects: Effects | None = None,
    status: int | None = None,
    duplicates: int = 3,
    changed: Mapping[str, Any] | bool = True,
    other: Mapping[str, Any] | FlaskClient | None = None,
    ignore_headers: Sequence[str] = (),
    timeout: float = TIMEOUT_SECONDS,
    **kwargs: Any,
) -> TestResponse:
    """Send one operation in all the ways in which a client may, and assert one effect and one response.

    It sends the request, ``duplicates`` of it while the first is still in its view, a retry, the same
    key with another body, and one more retry. In a block of :func:`crash_at` or :func:`every_crash` a
    request dies before all these. Each gets an application context of its own, as in production.

    * ``kwargs`` are those of ``client.open``. Without an idempotency key in ``headers`` a new one is
      sent.
    * ``effects`` is called in an application context, and counts what one operation does: a number, or
      several by name: ``lambda: {"payments": count(), "mails": len(outbox)}``. Each must change, by
      any amount; what the first request alone does is one run's effect, and nothing else may add to
      it. Left out, the rows of the application's own tables are counted, and some must come or go; what
      an ``UPDATE`` changes goes unseen.
      ``dict`` says that there is nothing to count.
    * ``status`` is that of the operation's response; left out, any below 400. With 400 or above, an
      effect may be missing, and an operation that ``on_interrupted`` holds (409) is not replayed.
    * ``changed`` is what makes the other request: arguments that replace those in ``kwargs``. True
      makes one up, False leaves this check out.
    * ``other`` makes the request another user's: arguments that replace those in ``kwargs``, such as
      ``{"headers": {"Authorization": "..."}}``, or a client that has signed in. With the same key it
      must get a response of its own, and have an effect of its own.
    * ``ignore_headers`` may differ between the responses, as ``Date``, ``Set-Cookie`` and the
      ``Vary: Cookie`` of Flask's session always may.
    * ``timeout`` is how many seconds each request may take, before it counts as one that never returns.

    Returns the first response. Raises ``AssertionError``, which says what differs and where to look,
    and ``TypeError`` if ``effects`` counts no numbers, or an argument is of a wrong type.
    """
    if not isinstance(client, FlaskClient):
        raise TypeError(f"client must be a test client, app.test_client(). This is {kind_of(client)}")
    for name, value in {"changed": changed, "other": other}.items():
        if isinstance(value, (str, bytes)):
            raise TypeError(f"{name} must be arguments of a request, by name. This is {kind_of(value)}")
    check = RequestCheck(client, method, path, kwargs, effects, ignore_headers, timeout)
    check.is_not_misplaced()
    crash = next((crash for crash in reversed(armed) if check.state in crash.targets), None)
    when = "the first request"
    if crash is not None and not crash.happened:
        response = check.crash(crash)
        if response is not None:  # the view has no such place, so there is nothing new to find out
            return response
        when = f"{crash!r} and a retry"
    first, *others = check.send_at_once(duplicates)
    check.is_new(first, crash)
    check.has_status(first, when, status)
    check.is_held = first.status_code == 409 and crash is not None
    at_least = 1 if first.status_code < 400 else 0
    when += f", with {duplicates} duplicates at the same time" if duplicates else ""
    check.effects_are_one(when, at_least, crash)
    for duplicate in others:
        check.is_duplicate(duplicate, first)
    check.is_retry(check.sent(), first)
    check.effects_are_one("a retry", at_least)
    if changed is not False:
        request = check.changed(changed)
        check.is_rejected(check.sent(request))
        check.effects_are_one("the same key with another body", at_least)
        check.is_retry(check.sent(), first)
    if other is not None:
        check.is_another_users(other, first, at_least)
    if at_least:
        check.something_is_counted(when)
    return first


class RequestCheck(Check[TestResponse]):
    """One operation, sent as an HTTP request."""

    subject = "the first request got"
    missing = MISSING
    parts = (
        "If the dead attempt and its retry did a part of it each, count the parts under names of their"
        " own: effects=lambda: {'a': ..., 'b': ...}."
    )

    def __init__(
        self,
        client: FlaskClient,
        method: str,
        path: str,
        kwargs: Mapping[str, Any],
        effects: Effects | None,
        ignore_headers: Sequence[str],
        timeout: float,
    ) -> None:
        super().__init__(client.application, f"{method} {path}", effects, timeout)
        self._client, self._method = client, method
        self._path, self._kwargs = path, kwargs
        if "?" in path and "query_string" not in kwargs:  # apart, so that a changed request replaces it
            self._path, _, query = path.partition("?")
            self._kwargs = {**kwargs, "query_string": query}
        self._header = self.state.settings.header
        self._key = Headers(kwargs.get("headers")).get(self._header) or f'"{_new_key()}"'
        self._ignored = {"date", "server", "set-cookie", REPLAYED.lower()}
        self._ignored.update(name.lower() for name in ignore_headers)
        self.outside = self._unprotected() or OUTSIDE
        self.is_held = False  # the operation is interrupted, and nobody runs it again

    def send(
        self, kwargs: Mapping[str, Any] | None = None, client: FlaskClient | None = None
    ) -> TestResponse:
        """One request, in a context of its own."""
        try:
            kwargs = copy.deepcopy(
                dict(self._kwargs if kwargs is None else kwargs)
            )  # a file is read once
        except TypeError as error:
            raise TypeError(
                f"the request cannot be sent more than once ({error}): in place of an open file, give"
                " io.BytesIO(...)"
            ) from error
        kwargs.setdefault("buffered", True)  # a response is closed, as a server does
        headers = kwargs["headers"] = Headers(kwargs.get("headers"))
        if self._header not in headers:
            headers[self._header] = self._key
        # A client in a with block keeps its last request's context, which is of no use in another.
        twin = copy.copy(client or self._client)
        vars(twin).update(preserve_context=False, _context_stack=ExitStack(), _new_contexts=[])
        return Context().run(twin.open, self._path, method=self._method, **kwargs)

    def changed(self, changed: Mapping[str, Any] | Literal[True]) -> Mapping[str, Any]:
        """The arguments of another request."""
        if changed is not True:
            return {**self._kwargs, **changed}
        token = self.state.app.config.get("WTF_CSRF_FIELD_NAME", "csrf_token")
        return changed_request(self._kwargs, unchanged=token)

    def run_again(self) -> bool:
        """The same request with a key of its own, where the key is the header's."""
        headers = Headers(self._kwargs.get("headers"))
        headers[self._header] = f'"{_new_key()}"'
        response = self.sent({**self._kwargs, "headers": headers})
        return response.status_code < 400 and not self._is_replay(response)

    def _is_replay(self, response: TestResponse) -> bool:
        """Return True if it is marked as one, or the response is that has redirected to it."""
        return any(REPLAYED in each.headers for each in (response, *response.history))

    def is_not_misplaced(self) -> None:
        """Fail if the protection stands above the route, or is switched off: it protects nothing."""
        if not self.state.settings.enabled:
            hint = "IDEMPOTENCY_ENABLED is False in this application: set it to True for this test."
            self.fail("the view is not protected", hint)
        try:
            if self._endpoint is not None:
                refuse_misplaced(self.state, self._endpoint)
        except ConfigurationError as error:
            self.fail("the view is not protected", f"{error}.")

    def _unprotected(self) -> str:
        endpoint = self._endpoint
        if endpoint is None or route_of(self.state, endpoint, self._method.upper()):
            return ""
        view = name_of(self.state.app.view_functions[endpoint])
        return (
            f"Nothing protects {view}: put @idempotent on it, below the route's decorator, or let"
            " protect() cover it. (A decorator without functools.wraps hides a protection below it, and"
            " is repeated with each retry.)"
        )

    @cached_property
    def _endpoint(self) -> str | None:
        """The endpoint that the request leads to."""
        where = {name: self._kwargs.get(name) for name in ("base_url", "subdomain")}
        app = self.state.app
        environ = EnvironBuilder(app, self._path, method=self._method, **where).get_environ()
        adapter = app.create_url_adapter(app.request_class(environ))
        with suppress(HTTPException):
            return adapter.match()[0] if adapter else None
        return None

    def shown(self, outcome: TestResponse) -> str:
        """A response's status, and the beginning of its body."""
        return shown(outcome)

    def is_new(self, first: TestResponse, crash: CrashPoint | None) -> None:
        """Nobody has used the key before; only a request that has died may have."""
        if crash is None and self._is_replay(first):
            self.fail(f"the first request got {shown(first)}: an earlier operation's response", USED)

    def has_status(self, response: TestResponse, when: str, status: int | None) -> None:
        """The operation's response has the expected status."""
        if status is None and response.status_code >= 400:
            hint = "Send a request that succeeds, or pass the right response's status=..."
            if response.status_code == 409:
                hint += " If it conflicts with what an earlier request wrote, let each send other data."
            said = f"after {when} the response is {shown(response)}"
            self.fail(said, self.explained(response) or hint)
        if self._endpoint is None and status is None and response.status_code == 308:
            hint = "Send it to the address of the route, with or without the slash at its end."
            self.fail(f"the request is redirected to {response.location}", hint)
        if status not in (None, response.status_code):
            said = f"after {when} the response is {shown(response)}, not {status}"
            self.fail(said, self.explained(response))

    def is_duplicate(self, response: TestResponse, first: TestResponse) -> None:
        """A duplicate is rejected as in progress, or gets the first response."""
        if response.status_code == 409 and not self._is_replay(response):
            return
        if response.status_code != first.status_code:
            hint = (
                "It must get 409, or the first one's response. Does an error handler change the 409, or"
                " has the pool no connection for it?"
            )
            said = f"a duplicate of a running request got {shown(response)}"
            self.fail(said, self.explained(response) or hint)
        self.is_retry(response, first, "a duplicate")

    def is_retry(self, response: TestResponse, first: TestResponse, what: str = "a retry") -> None:
        """A retry gets the first response, marked as a replay."""
        if found := differences(first, response, self._ignored):
            why = self.explained(response) or self._unprotected() or UNREPLAYED
            hint = REMADE if self._is_replay(response) else why
            self.fail(f"{what} got another response than the first request", hint, *found)
        if not self._is_replay(response) and not self.is_held:
            hint = self._unprotected() or UNREPLAYED
            self.fail(f"{what} got {shown(response)}, without the header {REPLAYED}", hint)

    def is_rejected(self, response: TestResponse) -> None:
        """The key belongs to another request."""
        if response.status_code != KeyReused.status:
            said = f"the same key with another body got {shown(response)}, not {KeyReused.status}"
            self.fail(said, ALIKE)

    def explained(self, outcome: TestResponse) -> str:
        """Say what the problem in a response means, or how to see the error of a view."""
        if outcome.status_code == 500 and not self.state.app.testing:
            return "app.testing = True shows the error: then it reaches the test."
        body = outcome.get_json(silent=True)
        kind = str(body.get("type", "")) if isinstance(body, dict) else ""
        return PROBLEMS.get(kind.removeprefix(self.state.settings.problem_base), "")

    def is_another_users(
        self, other: Mapping[str, Any] | FlaskClient, first: TestResponse, at_least: int
    ) -> None:
        """Another user's request with the same key is an operation of its own."""
        what = (None, other) if isinstance(other, FlaskClient) else ({**self._kwargs, **other},)
        who = "another user's request with the same key"
        with self.another_operation(who, at_least):
            theirs = self.sent(*what)
            if self._is_replay(theirs) or theirs.status_code == KeyReused.status:
                self.fail(f"{who} got {shown(theirs)}: it is taken for the first user's", SHARED)
            if theirs.status_code != first.status_code and not self.is_held:
                hint = "Pass a request in other=... that succeeds: one of a user who is signed in."
                self.fail(f"{who} got {shown(theirs)}, not {first.status_code}", hint)
        self.is_retry(self.sent(*what), theirs, "a retry of another user")
        self.is_retry(self.sent(), first)
        self.effects_are_one("retries of both users", at_least)


def _new_key() -> str:
    """One that says its age, for a route that requires that."""
    return uuid7(time.time_ns() // 1_000_000, os.urandom(10))
