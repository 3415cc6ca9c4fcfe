"""What becomes of an interrupted or failed operation, as an operator decides."""

from __future__ import annotations

import getpass
import hashlib
import logging
from dataclasses import dataclass
from typing import Any

from flask import Response
from werkzeug.datastructures import Headers

from flask_idempotency.core.errors import (
    BodyMalformed,
    IdempotencyError,
    OperationFailed,
    SealBroken,
    UnknownRecord,
)
from flask_idempotency.core.fingerprint import parse_json
from flask_idempotency.core.keys import SHOWN
from flask_idempotency.core.logs import log
from flask_idempotency.core.records import Claim, Record, Sealer, storable
from flask_idempotency.stores.admin import WAITING, AuditEntry, Line
from flask_idempotency.web.response import capture, problem_response
from flask_idempotency.web.routes import AppState, protected_routes

from .find import admin, find
from .words import duration, is_legible, one_line, printable

ACTS = {
    "release": ("released", WAITING),
    "resolve": ("resolved", WAITING),
    "fail": ("failed", WAITING),
    "forget": ("erased", ("completed", "failed", "released")),
}
"""What an operator may do about one record: what is noted of it, and in which states."""

LONGEST_WHY = 500
"""Characters of a reason: `show` has it in one line of a table."""

SAY_WHY = f"Say why, in at most {LONGEST_WHY} characters: the next operator reads it."

_JSON = "application/json"
_WITHOUT_BODY = (204, 205, 304)


class Mistake(IdempotencyError):
    """What an operator gave cannot be used; ``field`` names the option, or the field of the form."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(detail)
        self.field = field


@dataclass(frozen=True)
class Operator:
    """Who acts, and where: ``"cli"`` or ``"console"``. Without ``by``, the user who has logged in."""

    by: str | None
    origin: str

    def note(self, did: str, why: str = "") -> AuditEntry:
        """Return what is noted in a record."""
        try:
            who = one_line(self.by or "") or one_line(getpass.getuser())
        except (KeyError, OSError):  # a container's user without a name
            who = "unknown"
        # Every store takes text with no NUL and no lone surrogate.
        return AuditEntry(who, did, why.strip().replace("\0", "").encode(errors="replace").decode())

    def tell(self, entry: AuditEntry, *, level: int = logging.WARNING, **facts: Any) -> None:
        """Log what was done, for whoever keeps the log longer than the record has its note.

        At ``WARNING``, which is written even where nothing sets the log up. ``facts`` say what it was
        done to, or None: never a key, a scope or a body.
        """
        facts |= {"origin": self.origin, "by": entry.by, "why": entry.why or None}
        told = {  # in one line: others may have written the text
            name: printable(fact) if isinstance(fact, str) else fact
            for name, fact in facts.items()
            if fact is not None
        }
        details = ", ".join(f"{name} {fact}" for name, fact in told.items())
        log.log(level, f"operator {entry.did}: %s", details, extra={"did": entry.did, **told})  # noqa: G004


def acts(line: Line) -> list[str]:
    """Return what may be done about a record as it is now."""
    found = [act for act, (_, states) in ACTS.items() if line.state in states]
    return [act for act in found if act != "forget" or not line.waits]


def undecided(
    state: AppState,
    digits: str,
    act: str,
    *,
    attempt: int | None = None,
    token: str | None = None,
) -> Line:
    """Return the record that an operator is about to decide about, as it is now.

    :param attempt: the attempt that the operator has looked into, if it was said.
    :param token: that of the record as the operator has seen it (:func:`token_of`), if it was said.
    :raises UnknownRecord: if there is no such record, or more than one.
    :raises IdempotencyError: if it has changed since, or this cannot be done about it.
    """
    line = find(state, digits)
    if attempt not in (None, line.attempt) or token not in (None, token_of(line)):
        raise _overtaken(line)
    if act not in acts(line):
        done, states = ACTS[act]
        raise IdempotencyError(
            f"{line.key[:SHOWN]} is {line.state.replace('_', ' ')}: only what is {' or '.join(states)}"
            f" can be {done}"
        )
    return line


def token_of(line: Line) -> str:
    """Return what tells a record from its later versions, for a form: their owner is not for pages."""
    return hashlib.sha256(line.version.encode()).hexdigest()[:16]


def settle(
    state: AppState,
    seen: Line,
    act: str,
    why: str,
    operator: Operator,
    response: Response | None = None,
    *,
    not_done: bool = False,
) -> None:
    """Release an operation, fail it for good, or resolve it by storing ``response`` as its response.

    :param seen: the record as the operator has seen it.
    :param not_done: no more was done than the finished steps: it may be released although it is old,
        and has the age of a first attempt again.
    :raises Mistake: for a reason that says nothing, and for a release of what is too old.
    :raises UnknownRecord: if the record is gone.
    :raises IdempotencyError: if it has changed since, or somebody works on it. Then nothing is done.
    """
    if not is_legible(why, LONGEST_WHY):
        raise Mistake("why", SAY_WHY)
    if act == "fail":
        problem = OperationFailed("The operation was interrupted, and will not be run again.")
        response = problem_response(state, problem)
    key, shown, anew = seen.hash, seen.key[:SHOWN], act == "release" and not_done
    record = None if anew else state.records.look(key)
    if record is None and not anew:
        raise UnknownRecord(f"{shown} has just been deleted")
    if act == "release" and record is not None and (why_not := too_old(state, seen, record)):
        raise Mistake("not_done", why_not)
    entry, stored = operator.note(ACTS[act][0], why), None
    ttl = max(state.settings.ttl, ttl_of(state, seen))
    if response is not None and record is not None:  # sealed for the record as it is now
        check_sealer(state, record)
        claim = Claim(key, record.name, record.fingerprint, record.owner, ttl)
        stored = state.sealer.seal(capture(response, state.settings), claim)
    if not admin(state).settle(seen, entry, ttl, stored, anew=anew):
        now = find(state, seen.key)
        if now.version != seen.version:
            raise _overtaken(now)
        raise IdempotencyError(f"{shown} was in use just now: look at it again")
    status = None if response is None else response.status_code
    operator.tell(entry, operation=seen.operation, id=shown, status=status)


def too_old(state: AppState, seen: Line, record: Record) -> str:
    """Return why a release could do it twice; "" if it began within the ``ttl`` of its route.

    Until then the other service remembers the view's keys. Later only its books can tell.
    """
    ttl = ttl_of(state, seen)
    if record.age < ttl:
        return ""
    return (
        f"{seen.key[:SHOWN]} began {duration(record.age)} ago, and its ttl is {duration(ttl)}: by now"
        " the other service may have forgotten the keys of its calls, and do them once more. If its"
        " books show no more than the finished steps, release it and say so (--not-done); otherwise do"
        " the rest by hand, and resolve it"
    )


def ttl_of(state: AppState, line: Line) -> float:
    """Return the longest ``ttl`` of its routes, in seconds; the application's where there is none."""
    ttls = [route.ttl for *_, route in protected_routes(state) if route.name == line.operation]
    return max(ttls, default=state.settings.ttl)


def check_sealer(state: AppState, record: Record) -> None:
    """Raise ``SealBroken`` if the record's application encrypts, and this process has no keys."""
    if record.fingerprint.is_keyed and type(state.sealer) is Sealer:
        raise SealBroken(
            "the application encrypts what it stores, but IDEMPOTENCY_ENCRYPTION_KEYS is empty here: it"
            " would reject each retry. Give this process the application's keys"
        )


def given_response(
    state: AppState,
    status: int,
    body: bytes,
    headers: tuple[str, ...] = (),
    content_type: str | None = None,
) -> Response:
    """Return the response that an operator gives; ``headers`` are lines, ``Name: value``.

    Raises :class:`Mistake` for one that could not be stored whole, or is not what it says.
    """
    given = (*headers, f"Content-Type: {content_type}") if content_type and body else headers
    lines = Headers()
    for line in given:
        name, colon, value = line.partition(":")
        pair = name.strip(), value.strip()
        if not colon or not storable([pair]):
            raise Mistake(
                "content_type", f"the header {name!r} is malformed, or one that is never stored"
            )
        lines.add(*pair)
    if len(lines.getlist("Content-Type")) > 1:
        raise Mistake("content_type", "a response has one Content-Type")
    if body and status in _WITHOUT_BODY:
        raise Mistake("body", f"a response with the status {status} has no body")
    if len(body) > state.settings.max_response_bytes:
        raise Mistake("body", "the body is larger than IDEMPOTENCY_MAX_RESPONSE_BYTES")
    if body and lines.get("Content-Type", _JSON) == _JSON:
        try:
            parse_json(body)
        except BodyMalformed as error:
            text = f"the body is not JSON: correct it, or give another content type ({error.detail})"
            raise Mistake("body", text) from error
        lines["Content-Type"] = _JSON
    response: Response = state.app.response_class(body, status)
    response.headers = lines
    return response


def is_empty(response: Response) -> bool:
    """Return True if a response lacks a body that one of its status usually has."""
    return not response.get_data() and response.status_code not in _WITHOUT_BODY


def _overtaken(now: Line) -> IdempotencyError:
    return IdempotencyError(
        f"{now.key[:SHOWN]} is {now.state.replace('_', ' ')} now, in attempt {now.attempt}. That is not"
        " what you have seen, so nothing was done: look at it again"
    )
