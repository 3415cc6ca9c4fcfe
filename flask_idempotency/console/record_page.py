"""The pages of one record, and what an operator can do about it."""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from dataclasses import dataclass, field

import flask
from flask import current_app, redirect, request, url_for
from werkzeug.wrappers import Response

from flask_idempotency.core import keys
from flask_idempotency.core.errors import IdempotencyError, RecordBroken, UnknownRecord
from flask_idempotency.core.records import Record
from flask_idempotency.core.storable import storable
from flask_idempotency.operate.decide import (
    LONGEST_WHY,
    SAY_WHY,
    check_sealer,
    failure,
    given_response,
    is_empty,
    noted,
    overtaken,
    settle,
    tell,
    too_old,
)
from flask_idempotency.operate.erase import Erasable, erase
from flask_idempotency.operate.find import admin, find
from flask_idempotency.operate.show import Found, derived, key_of, shown_steps
from flask_idempotency.operate.words import is_legible
from flask_idempotency.stores.admin import Line
from flask_idempotency.web.routes import AppState, app_state

from . import access
from .pages import checked, page
from .timeline import SHOWN, moments

MOST_SHOWN = 100_000
"""Bytes of a body on a page: more is for a program to read, not for a person."""


_STUCK = ("interrupted", "failed")

STATES_OF = {
    "release": _STUCK,
    "resolve": _STUCK,
    "fail": ("interrupted",),
    "forget": ("completed", "failed", "released"),
}
"""What can be done about a record, in which states. ``parts.html`` has the words."""

NOTED = {"release": "released", "resolve": "resolved", "fail": "failed"}
"""What the record notes, with who and why; nothing if the record is gone then."""

ORIGIN = "console"
"""Where it was done, in the log."""


def record(digits: str) -> Response:
    """Show one record: its facts, what happened, and its response without the body."""
    return _page(_found(digits))


def body(digits: str) -> Response:
    """The same with the body of its response and the results of its steps, which the record notes."""
    found, store = _found(digits), admin(app_state(current_app))
    entry, line = noted(SHOWN, "", access.who()), found.line
    if not store.note(_key(found), entry):
        raise IdempotencyError("This record is in use just now: nothing was shown.")
    tell(entry, ORIGIN, level=logging.INFO, operation=line.operation, id=line.key[: keys.SHOWN])
    return _page(_found(digits), with_body=True)


def _found(digits: str, action: str = "release") -> Found:
    if action not in STATES_OF:
        raise UnknownRecord("There is no such action.")
    store = admin(app_state(current_app))
    return Found.of(store, find(store, checked(digits)))


def _page(found: Found, *, with_body: bool = False) -> Response:
    state = app_state(current_app)
    key = _key(found)
    row, broken = _row(state, key)
    steps, unreadable = shown_steps(state, key, found.steps)
    names = tuple(name for name in request.args.getlist("derive") if name)
    stored = row.response if row else None
    headers = storable(stored.headers or ()) if stored else ()
    return page(
        "record.html",
        line=found.line,
        moments=moments(found, row),
        steps=steps,
        derived=derived(key, names),
        unreadable=unreadable if with_body else "",
        advice=found.advice,
        with_results=with_body,
        is_leased=row is not None and row.lease_left is not None,
        stored=stored,
        headers=headers,
        broken=broken,
        body=_shown(stored.body) if with_body and stored and stored.body is not None else None,
        most=MOST_SHOWN,
        actions=[action for action, states in STATES_OF.items() if found.line.state in states],
        done=access.said(found.line.key),
    )


def _row(state: AppState, key: bytes) -> tuple[Record | None, str]:
    """Return the record with its response decrypted; or why it cannot be read."""
    try:
        record = state.engine.look(key)
        if record is not None:
            check_sealer(state, record)
    except RecordBroken as error:
        return None, error.detail
    return record, ""


def _key(found: Found) -> bytes:
    key = key_of(app_state(current_app), found)
    if key is None:
        raise UnknownRecord("The record has just been deleted.")
    return key


def _shown(content: bytes) -> str:
    """Return a body as text. What is no text stays legible."""
    return content[:MOST_SHOWN].decode(errors="backslashreplace")


@dataclass
class Form:
    """What an operator has filled in, and what is wrong with it, by the names of the fields."""

    status: str = "200"
    content_type: str = "application/json"
    body: str = ""
    empty: str = ""
    not_done: str = ""
    why: str = ""
    errors: dict[str, str] = field(default_factory=dict)


def confirm(digits: str, action: str) -> Response:
    """Show what an action would do, and its form."""
    found = _found(digits, action)
    _check_state(action, found)
    return _form(action, found, Form())


def act(digits: str, action: str) -> Response:
    """Do it, and show the record; or the form again with what is wrong."""
    found = _found(digits, action)
    if request.form.get("seen") != _seen(found.line):
        raise overtaken(found.line)
    _check_state(action, found)
    names = ("status", "content_type", "body", "empty", "not_done", "why")
    given = {name: request.form[name] for name in names if name in request.form}
    form = Form(**given)  # type: ignore[arg-type]
    if action in NOTED and not is_legible(form.why, LONGEST_WHY):
        form.errors["why"] = SAY_WHY
    state = app_state(current_app)
    response = _response(state, action, form)
    if action == "release" and not form.not_done and (why_not := too_old(state, found.line)):
        form.errors["not_done"] = f"{why_not}."
    if form.errors:
        return _form(action, found, form)
    if action not in NOTED:
        return _forget(state, found)
    entry = noted(NOTED[action], form.why.strip(), access.who())
    anew = action == "release" and bool(form.not_done)
    settle(state, found.line, entry, response, origin=ORIGIN, anew=anew)
    where = url_for(f"{request.blueprint}.record", digits=found.line.key)
    return access.say(redirect(where, 303), action, found.line.key)


def _forget(state: AppState, found: Found) -> Response:
    mine = Erasable([([_key(found)], found.line.version)], Counter(), found.line.operation)
    if not sum(erase(state, mine, access.who(), origin=ORIGIN)):
        raise IdempotencyError("This record is in use just now: nothing was erased.")
    return access.say(redirect(url_for(f"{request.blueprint}.records"), 303), "forget")


def _response(state: AppState, action: str, form: Form) -> flask.Response | None:
    """Return the response to store; None, with ``form.errors``, if there is none."""
    if action == "fail":
        return failure(state)
    if action != "resolve":
        return None
    if not re.fullmatch("[2-5][0-9]{2}", form.status):
        form.errors["status"] = "A status is a number from 200 to 599."
        return None
    content = form.body.replace("\r\n", "\n").encode()
    kind = form.content_type.strip()
    try:
        given = given_response(state, int(form.status), content, (), None if kind in _JSON else kind)
    except (IdempotencyError, ValueError) as error:
        form.errors["body"] = str(error)
        return None
    if is_empty(given) and not form.empty:
        form.errors["empty"] = f"There is no body: every retry would get an empty {form.status}."
    return given


_JSON = ("", "application/json")


def _check_state(action: str, found: Found) -> None:
    if found.line.state not in STATES_OF[action]:
        words = found.line.state.replace("_", " ")
        raise IdempotencyError(f"This record is {words}: there is nothing to {action}.")


def _seen(line: Line) -> str:
    """Return what a form is about without telling it: an owner's token is not for pages."""
    return hashlib.sha256(f"{line.version} {line.state} {line.attempt}".encode()).hexdigest()[:16]


def _form(action: str, found: Found, form: Form) -> Response:
    return page(
        "confirm.html",
        400 if form.errors else 200,
        action=action,
        is_noted=action in NOTED,
        line=found.line,
        seen=_seen(found.line),
        advice=found.advice,
        form=form,
    )
