"""One request, or one call of :meth:`Idempotency.run`: which operation it is about, and what it claims.

Header, body and scope become plain values here. And ``current_operation``.
"""

from __future__ import annotations

import asyncio
import time
from binascii import b2a_base64
from contextlib import suppress
from os import urandom
from threading import get_ident
from typing import Any, cast

import flask
from werkzeug.local import LocalProxy

from flask_idempotency.core.errors import (
    ConfigurationError,
    KeyExpired,
    KeyMalformed,
    KeyRequired,
    StoreUnavailable,
)
from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.keys import Scope, birth_of, natural_key, parse_key
from flask_idempotency.core.ports import Records
from flask_idempotency.core.records import Claim, Record, State
from flask_idempotency.flask_context import functions_after_request, present_context, present_request
from flask_idempotency.session.operation import Operation, running_operation

from . import forms
from .body import FORM_TYPES, Body
from .routes import AppState
from .settings import NOT_GIVEN, REQUIRED, Route
from .signals import Subject

OWNER_BYTES = 9
"""An owner's token: 72 random bits tell the few attempts at one operation apart, and take 12 characters
of each record. It is no secret: no client can send one."""

LONGER_SECONDS = 600.0
"""How much longer a record lives where an old key, or an old form, is refused: twice the five minutes
by which a host's clock may differ from the database's, the skew that Kerberos allows (RFC 4120
section 8.2)."""

AHEAD_SECONDS = 86400.0
"""How far ahead a birth is believed: a client's wrong time zone or date makes a record live up to a day
longer, and none for years."""


class Request(Subject):
    """What the extension knows about one request, or one call of :meth:`Idempotency.run`.

    It is about one operation at most. ``route`` has the options of that, ``dispatched`` those of the
    endpoint that Flask has called.
    """

    route: Route
    dispatched: Route | None = None
    skipped = False  # so says protect(skip=...)
    body: Body | None = None  # from when it is known that it may be needed
    may_hold_key = False  # the request itself, in its body or elsewhere: then that wins over the header
    open_attempt: Any = None  # until it is over
    observation: Any = None  # until it is told
    is_replay = False  # the response is a stored one
    is_view = False  # Flask itself has called the view: what it makes of an error is the response
    is_dispatched = False  # Flask calls its view, and our functions at its end
    registered = staticmethod(functions_after_request)  # with flask.after_this_request
    home: tuple[int, int] | None = None  # which application context it has, and which thread

    def __init__(self, state: AppState, request: Any = None, context: Any = None) -> None:
        """Without a ``request``, this is about one call alone.

        The application ``context`` remembers the first request: a view's own requests share it.
        """
        self.state, self.make_response = state, state.app.make_response
        if request is not None:
            request._flask_idempotency = self  # noqa: SLF001
            if _OUTERMOST not in context.__dict__:
                context.__dict__[_OUTERMOST] = request
            self.home, self.is_dispatched = (id(context), get_ident()), True

    def begin(self, route: Route) -> None:
        """From now on this is about an operation of ``route``."""
        self.route, self.name, self.began, self.has_outcome = route, route.name, time.monotonic(), False
        self.skipped = False

    def prepare(self, request: flask.Request, route: Route) -> None:
        """Begin with an operation of ``route``.

        If the body may be needed, what is read of it is counted from now on.
        Raises only what ``protect(skip=...)`` does.
        """
        self.begin(route)
        if route.skip is not None and route.skip(request):
            self.skipped = True
            return
        media_type = request.mimetype
        self.may_hold_key = route.key is not None or media_type in FORM_TYPES
        if self.body is None and (self.may_hold_key or self.state.header in request.environ):
            self.body = Body(request, media_type, refuses=route.enforce)

    def identify(self, request: flask.Request) -> Operation | None:
        """The operation that the request is about; None if it has no key and needs none, or is skipped.

        Reads no body of an unauthenticated caller, except where a request without a key may pass.
        """
        if self.skipped:
            return None
        route, scope, made = self.route, NOT_GIVEN, None
        if self.may_hold_key and route.required:
            scope = route.current_scope()
        key, is_field = self._found_key(request)
        if key is None:
            if route.required:
                raise KeyRequired
            return None
        if scope is NOT_GIVEN:
            scope = route.current_scope()
        if is_field:
            key, made = forms.read_field(key, self.state.app, route, scope)
        return new_operation(route, scope, key, made)

    def _found_key(self, request: flask.Request) -> tuple[str | None, bool]:
        """The key that the request itself holds, or that in the header; and if it is a form's field.

        A wrong field is rejected whatever the header says. Some browsers send one of their own, with a
        new key each time they send the same form: it would run each time.
        """
        route = self.route
        if self.body is not None and self.may_hold_key:
            form = self.body.read(request, route, self.state.settings).form
            if route.key is not None:
                value = None
                with suppress(KeyError):  # a missing member of JSON, or field of a form
                    value = route.key()
                self.body.unread(request)  # it may have read it
                return None if value is None or value == "" else natural_key(value), False
            if (field := forms.value_of_field(form)) is not None:
                return field, True
        value = request.environ.get(self.state.header)
        return None if value is None else parse_key(value), False

    def claim_for(self, request: flask.Request, operation: Operation) -> Claim:
        """Make the claim of the request.

        Raises what :func:`new_claim` and reading the body raise.
        """
        assert self.body is not None  # noqa: S101 -- there is a key
        body = self.body.read(request, self.route, self.state.settings)
        return new_claim(self.state, self.route, operation, body.fingerprint(request, self.route))

    def end_observation(self, response: Any, error: BaseException | None) -> None:
        """Tell what would have happened, as that was to be observed."""
        observation, self.observation = self.observation, None
        observation.finish(response, error)


_OUTERMOST = "_flask_idempotency_request"


def is_home(ours: Request) -> bool:
    """Return True if the context is the request's own: not a copy of it, nor another thread."""
    return ours.home == (id(present_context()), get_ident())


def existing_request() -> Request | None:
    """Ours of the present request, if the extension has had to do with it."""
    ours: Request | None = getattr(present_request(), "_flask_idempotency", None)
    return ours


def new_operation(route: Route, scope: Scope, key: str, made: float | None = None) -> Operation:
    """The operation that ``key`` stands for; ``made`` is when its form was.

    Raises ``KeyMalformed`` where the route requires a birth and there is none to be believed.
    """
    born = birth_of(key) if made is None and route.refuse_old_keys else made
    if born is not None and born > time.time() + AHEAD_SECONDS:
        born = None
    if born is None and route.refuse_old_keys == REQUIRED:
        raise KeyMalformed(
            "The key does not say when it was made, or says a time more than a day ahead. Allowed:"
            " a UUID of version 7 (RFC 9562)."
        )
    return Operation(route.name, route.namespace, scope, key, attempt=0, born=born)


def new_claim(state: AppState, route: Route, operation: Operation, fingerprint: Fingerprint) -> Claim:
    """Make the claim of a new attempt at ``operation``."""
    if not operation.name.isascii():
        with suppress(StoreUnavailable):  # the claim meets that, too
            if not state.can_hold(operation.name):
                raise ConfigurationError(
                    f"the encoding of the database cannot hold the name {operation.name!r}: give the"
                    " operation another one, name=..., of ASCII characters"
                )
    ttl = route.ttl
    if route.refuse_old_keys or operation.born is not None:  # an old form is always refused
        ttl += LONGER_SECONDS + max(0.0, (operation.born or 0.0) - time.time())
    return Claim(
        key=operation.hashed_key(),
        name=operation.name,
        fingerprint=state.sealer.keyed(fingerprint),
        owner=b2a_base64(urandom(OWNER_BYTES), newline=False).decode(),
        ttl_seconds=ttl,
        lease_seconds=None if route.atomic else route.lease,
        max_attempts=route.max_attempts,
        retried_seconds=route.ttl,
    )


def found_for_old(records: Records, route: Route, operation: Operation, claim: Claim) -> Record | None:
    """The record of a key that is older than the memory of it; None for any other key.

    Raises ``KeyExpired`` if there is none: nobody knows whether it has run. Where there is one, it is
    what the engine decides on, so that nothing happens between this look-up and the decision.

    * A record is made with a birth of at most "ahead" and five minutes after the database's time, as
      that host's clock may be fast. It lives for ``ttl``, ahead and ten minutes. So when it expires,
      ``ttl`` after the birth is five minutes ago, and a host that is slow by as much knows it, too:
      every key without a record is refused, or has never had one. If the clocks are right, these ten
      minutes are also what a request may take from here to its claim.
    * What is in progress goes on, expired or not: its view still runs, or nothing of it was committed.
      Gone when it is to be taken over, it was never completed: then it would live for ten minutes more.
    """
    if operation.born is None or time.time() <= operation.born + route.ttl:
        return None
    record = records.look(claim.key)
    if record is None or (record.expired and record.state is not State.IN_PROGRESS):
        raise KeyExpired
    return record


def is_outermost_request() -> bool:
    """Return True if the session of the present request is not that of a view that made it."""
    return present_context().get(_OUTERMOST) is present_request()


def is_in_thread_of_request() -> bool:
    """Return True if another thread than the request's runs this in the request's own context.

    An async view is not: its event loop may be in a thread of its own, but the request waits for it.
    """
    ours = existing_request()
    if ours is None or ours.home is None or is_home(ours) or ours.home[0] != id(present_context()):
        return False
    return asyncio._get_running_loop() is None  # noqa: SLF001 -- in asyncio's own __all__


def present_operation() -> Operation | None:
    """The operation that runs in this request, atomic or not."""
    running = running_operation()
    return None if running is None else running.operation


def _current() -> Operation:
    operation = present_operation()
    if operation is None:
        raise RuntimeError(
            "current_operation is only there while a view protected by @idempotent runs for a request"
            " with a key, or a function in Idempotency.run(): not in a view that is only observed"
            " (IDEMPOTENCY_ENFORCE or enforce=False), nor in a process that was forked in a view"
        )
    return operation


current_operation = cast("Operation", LocalProxy(_current))
"""A proxy to the operation that is being executed."""
