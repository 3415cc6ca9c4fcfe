"""Which operation a request is about, and what it claims: header, body and scope as plain values."""

from __future__ import annotations

import time
from binascii import b2a_base64
from contextlib import suppress
from os import urandom
from typing import cast

import flask

from flask_idempotency.core.errors import (
    ConfigurationError,
    IdempotencyError,
    KeyExpired,
    KeyMalformed,
    KeyRequired,
    StoreUnavailable,
)
from flask_idempotency.core.fingerprint import Fingerprint
from flask_idempotency.core.keys import Scope, birth_of, natural_key, parse_key
from flask_idempotency.core.ports import Records
from flask_idempotency.core.records import Claim, Record, State
from flask_idempotency.session.operation import Operation

from . import forms
from .body import FORM_TYPES, Body, fingerprint
from .request import Request, current_scope
from .routes import AppState
from .settings import REQUIRED, Route

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


def prepare(request: flask.Request, current: Request, route: Route) -> None:
    """Begin with an operation of ``route``: read the key's header, unless the body may hold the key.

    From now on, what is read of the body is counted.
    ``refusal`` says what is wrong with the key. Raises only what ``protect(skip=...)`` does.
    """
    current.begin(route)
    if route.skip is not None and route.skip(request):
        current.skipped = True
        return
    try:
        media_type = request.mimetype
        current.may_be_inside = route.key is not None or media_type in FORM_TYPES
        if not current.may_be_inside:
            current.key = _header_key(request, current)
        if current.may_be_inside or current.key is not None:
            if current.body is None:
                current.body = Body(request, media_type, refuses=route.enforce)
        elif route.required:
            raise KeyRequired
    except IdempotencyError as refusal:
        current.refusal = refusal


def identify(request: flask.Request, current: Request) -> Operation | None:
    """The operation that the request is about; None if it has no key and needs none, or is skipped.

    Reads no body of an unauthenticated caller, except where a request without a key may pass. Raises
    what :func:`prepare` found wrong.
    """
    route = current.route
    if current.skipped:
        return None
    if current.refusal is not None:
        raise current.refusal
    is_first = route.required or current.key is not None
    scope: Scope = current_scope(route.scope) if is_first else None
    if current.may_be_inside:
        _find_key(request, current)
    if current.key is None and current.field is None:
        if route.required:
            raise KeyRequired
        return None
    if not is_first:
        scope = current_scope(route.scope)
    made = None
    if current.field is not None:
        current.key, made = forms.read_field(current.field, current.state.app, route, scope)
    return new_operation(route, scope, cast("str", current.key), made)


def new_operation(route: Route, scope: Scope, key: str, made: float | None = None) -> Operation:
    """The operation that ``key`` stands for; ``made`` is when its form was.

    Raises ``KeyMalformed`` where the route requires a birth and there is none to be believed.
    """
    born = made
    if born is None and route.refuse_old_keys:
        born = birth_of(key)
    if born is not None and born > time.time() + AHEAD_SECONDS:
        born = None
    if born is None and route.refuse_old_keys == REQUIRED:
        raise KeyMalformed(
            "The key does not say when it was made, or says a time more than a day ahead. Allowed:"
            " a UUID of version 7 (RFC 9562)."
        )
    return Operation(route.name, route.namespace, scope, key, attempt=0, born=born)


def _find_key(request: flask.Request, current: Request) -> None:
    """Look for the key in the request itself; that of a form without a field is in the header.

    A wrong field is rejected whatever the header says. Some browsers send one of their own, with a new
    key each time they send the same form: it would run each time.
    """
    body, key = current.body.read(request, current.route, current.state.settings), current.route.key
    if key is not None:
        with suppress(KeyError):  # a missing member of JSON, or field of a form
            value = key()
            current.key = None if value is None or value == "" else natural_key(value)
    else:
        current.field = forms.value_of_field(body.form)
        current.key = _header_key(request, current) if current.field is None else None


def _header_key(request: flask.Request, current: Request) -> str | None:
    """The key in the request's header, or None without one. Raises ``KeyMalformed``."""
    value = request.environ.get(current.state.header)
    return None if value is None else parse_key(value)


def request_claim(request: flask.Request, current: Request, operation: Operation) -> Claim:
    """Make the claim of the request.

    Raises what :func:`new_claim` and reading the body raise.
    """
    route = current.route
    body = current.body.read(request, route, current.state.settings)
    found = fingerprint(request, body, route)
    if route.key is not None or callable(route.fingerprint):
        body.unread(request)  # they may have read it
    return new_claim(current.state, route, operation, found)


def new_claim(state: AppState, route: Route, operation: Operation, fingerprint: Fingerprint) -> Claim:
    """Make the claim of a new attempt at ``operation``."""
    if not operation.name.isascii():
        _refuse_unstorable(state, operation.name)
    ttl = route.ttl
    if route.refuse_old_keys or operation.born is not None:  # an old form is always refused
        ahead = 0.0 if operation.born is None else max(0.0, operation.born - time.time())
        ttl += LONGER_SECONDS + ahead
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


def _refuse_unstorable(state: AppState, name: str) -> None:
    with suppress(StoreUnavailable):  # the claim meets that, too
        if not state.can_hold(name):
            raise ConfigurationError(
                f"the encoding of the database cannot hold the name {name!r}: give the operation"
                " another one, name=..., of ASCII characters"
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
