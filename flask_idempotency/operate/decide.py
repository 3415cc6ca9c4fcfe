"""What becomes of an interrupted or failed operation, as an operator decides."""

from __future__ import annotations

import getpass
import logging
import secrets
from codecs import BOM_UTF8
from contextlib import suppress
from dataclasses import replace
from typing import Any

from flask import Response
from werkzeug.datastructures import Headers

from flask_idempotency.core.errors import (
    BodyMalformed,
    IdempotencyError,
    OperationFailed,
    RecordBroken,
    SealBroken,
    UnknownRecord,
)
from flask_idempotency.core.fingerprint import parse_json
from flask_idempotency.core.keys import SHOWN
from flask_idempotency.core.logs import log
from flask_idempotency.core.ports import Sealer
from flask_idempotency.core.records import Claim, Record
from flask_idempotency.core.storable import storable
from flask_idempotency.stores.admin import AuditEntry, Line, Verdict
from flask_idempotency.web.response import capture, problem_response
from flask_idempotency.web.routes import AppState, protected_routes

from .find import admin, find
from .words import duration, one_line, printable

LONGEST_WHY = 500
"""Characters of a reason: `show` has it in one line of a table."""

SAY_WHY = f"Say why, in at most {LONGEST_WHY} characters: the next operator reads it."

_WITHOUT_BODY = (204, 205, 304)


def undecided(state: AppState, digits: str, attempt: int | None = None) -> Line:
    """Return the record that an operator is about to decide about, as it is now.

    :param digits: 8 or 16 hex digits, the first of the key's hash.
    :param attempt: the attempt that the operator has looked into, if it was said.
    :raises UnknownRecord: if there is no such record, or more than one.
    :raises IdempotencyError: if it is neither interrupted nor failed, or in another attempt.
    """
    store = admin(state)
    line = find(store, digits)
    key = line.key[:SHOWN]
    if attempt not in (None, line.attempt):
        raise overtaken(line)
    if line.state == "released":
        raise IdempotencyError(f"{key} has been released: its next retry runs the view again")
    if line.state not in ("interrupted", "failed"):
        raise IdempotencyError(
            f"{key} is {line.state.replace('_', ' ')}: only what is interrupted or failed can be"
            " released or resolved"
        )
    return line


def settle(
    state: AppState,
    seen: Line,
    entry: AuditEntry,
    response: Response | None = None,
    *,
    origin: str,
    anew: bool = False,
) -> None:
    """Release an interrupted or failed operation, or store ``response`` as its response.

    :param seen: the record as the operator has seen it.
    :param entry: what is noted in the record.
    :param origin: see :func:`tell`.
    :param anew: what is released has the age of a first attempt again.
    :raises UnknownRecord: if the record is gone.
    :raises IdempotencyError: if it has changed since, or somebody works on it. Then nothing is done.
    """
    store, shown = admin(state), seen.key[:SHOWN]
    key = store.key(bytes.fromhex(seen.key))
    record = None if key is None or response is None else state.records.look(key)
    if key is None or (response is not None and record is None):
        raise UnknownRecord(f"{shown} has just been deleted")
    owner, ttl = secrets.token_urlsafe(16), state.settings.ttl
    verdict = Verdict(key, owner, ttl, entry, seen.version, anew=anew)
    if response is not None and record is not None:  # sealed for the record as it is now
        check_sealer(state, record)
        claim = Claim(key, record.name, record.fingerprint, verdict.owner, verdict.ttl_seconds)
        sealed = state.sealer.seal(capture(response, state.settings), claim)
        verdict = replace(verdict, response=sealed)
    # A statement whose reply was lost is sent twice: then it was done all the same.
    if not store.settle(verdict) and not _is_done(state, verdict):
        now = find(store, seen.key)
        if now.version != seen.version:
            raise overtaken(now)
        raise IdempotencyError(f"{shown} was in use just now: look at it again")
    status = None if response is None else response.status_code
    tell(entry, origin, operation=seen.operation, id=shown, status=status)


def too_old(state: AppState, seen: Line) -> str:
    """Return why a release could do it twice; "" if it began within the ``ttl`` of its route.

    Until then the other service remembers the view's keys. Later only its books can tell.
    """
    key = admin(state).key(bytes.fromhex(seen.key))
    record = None if key is None else state.records.look(key)
    ttls = [found.route.ttl for found in protected_routes(state) if found.route.name == seen.operation]
    ttl = max(ttls, default=state.settings.ttl)
    if record is None or record.age < ttl:
        return ""
    return (
        f"{seen.key[:SHOWN]} began {duration(record.age)} ago, and its ttl is {duration(ttl)}: by now"
        " the other service may have forgotten the keys of its calls, and do them once more"
    )


def overtaken(now: Line) -> IdempotencyError:
    """Return the error for a decision about a record that has changed since the operator saw it."""
    return IdempotencyError(
        f"somebody was first: {now.key[:SHOWN]} is {now.state.replace('_', ' ')} now, in attempt"
        f" {now.attempt}. Nothing was done: look at it again"
    )


def check_sealer(state: AppState, record: Record) -> None:
    """Raise ``SealBroken`` if the record's application encrypts, and this process has no keys."""
    if record.fingerprint.is_keyed and type(state.sealer) is Sealer:
        raise SealBroken(
            "the application encrypts what it stores, but IDEMPOTENCY_ENCRYPTION_KEYS is empty here: it"
            " would reject each retry. Give this process the application's keys"
        )


def _is_done(state: AppState, verdict: Verdict) -> bool:
    with suppress(RecordBroken):
        record = state.records.look(verdict.key)
        return record is not None and record.owner == verdict.owner
    return False


def noted(did: str, why: str, by: str | None) -> AuditEntry:
    """Return what is noted in a record: ``by`` whom (or the user who has logged in), and ``why``."""
    try:
        who = one_line(by or "") or one_line(getpass.getuser())
    except (KeyError, OSError):  # a container's user without a name
        who = "unknown"
    # Every store takes text with no NUL and no lone surrogate.
    return AuditEntry(who, did, why.replace("\0", "").encode(errors="replace").decode())


def tell(entry: AuditEntry, origin: str, *, level: int = logging.WARNING, **facts: Any) -> None:
    """Log what an operator did, for whoever keeps the log longer than the record has its note.

    At ``WARNING``, which is written even where nothing sets the log up.

    :param origin: ``"cli"`` or ``"console"``.
    :param facts: what it was done to, or None: never a key, a scope or a body.
    """
    told = {**facts, "origin": origin, "by": entry.by, "why": entry.why or None}
    told = {  # in one line: others may have written the text
        name: printable(fact) if isinstance(fact, str) else fact
        for name, fact in told.items()
        if fact is not None
    }
    details = ", ".join(f"{name} {fact}" for name, fact in told.items())
    log.log(level, f"operator {entry.did}: %s", details, extra={"did": entry.did, **told})  # noqa: G004


def failure(state: AppState) -> Response:
    """Return the response of an operation that shall not run again."""
    problem = OperationFailed("The operation was interrupted, and will not be run again.")
    return problem_response(state.app, problem, state.settings)


def given_response(
    state: AppState,
    status: int,
    body: bytes,
    headers: tuple[str, ...] = (),
    content_type: str | None = None,
) -> Response:
    """Return the response that an operator gives; ``headers`` are lines, ``Name: value``.

    Raises ``IdempotencyError`` for one that could not be stored whole, or is not what it says.
    """
    given = (*headers, f"Content-Type: {content_type}") if content_type else headers
    lines = Headers()
    for line in given:
        name, colon, value = line.partition(":")
        pair = name.strip(), value.strip()
        if not colon or not storable([pair]):
            raise IdempotencyError(f"the header {name!r} is malformed, or one that is never stored")
        lines.add(*pair)
    if len(lines.getlist("Content-Type")) > 1:
        raise IdempotencyError("a response has one Content-Type")
    if body and status in _WITHOUT_BODY:
        raise IdempotencyError(f"a response with the status {status} has no body")
    if len(body) > state.settings.max_response_bytes:
        raise IdempotencyError("the body is larger than IDEMPOTENCY_MAX_RESPONSE_BYTES")
    if body and "Content-Type" not in lines:
        _check_json(body)
        lines.add("Content-Type", "application/json")
    response: Response = state.app.response_class(body, status)
    response.headers = lines
    return response


def is_empty(response: Response) -> bool:
    """Return True if a response lacks a body that one of its status usually has."""
    return not response.get_data() and response.status_code not in _WITHOUT_BODY


def _check_json(body: bytes) -> None:
    if body.startswith(BOM_UTF8):  # a request may have one; RFC 8259 lets no sender add it
        raise IdempotencyError("the body begins with a byte order mark, which JSON has not: remove it")
    try:
        parse_json(body)
    except BodyMalformed as error:
        text = f"the body is not JSON: correct it, or give --content-type ({error.detail})"
        raise IdempotencyError(text) from error
