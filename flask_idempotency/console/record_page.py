"""The pages of one record, and what an operator can do about it."""

from __future__ import annotations

import logging
import re

import flask
from flask import current_app, redirect, request, url_for
from werkzeug.wrappers import Response

from flask_idempotency.core.errors import IdempotencyError
from flask_idempotency.core.keys import SHOWN
from flask_idempotency.core.records import storable
from flask_idempotency.operate import decide
from flask_idempotency.operate.decide import Mistake, settle, undecided
from flask_idempotency.operate.erase import erase
from flask_idempotency.operate.find import admin, find
from flask_idempotency.operate.show import look_into
from flask_idempotency.stores.admin import Line
from flask_idempotency.web.routes import AppState, app_state

from . import access
from .pages import page
from .timeline import moments

MOST_SHOWN = 100_000
"""Bytes of a body on a page: more is for a program to read, not for a person."""


def record(digits: str) -> Response:
    """Show one record: its facts, what happened, and its response without the body."""
    return _page(app_state(current_app), digits)


def body(digits: str) -> Response:
    """The same with the body of its response and the results of its steps, which the record notes."""
    state, operator = app_state(current_app), access.operator()
    line, entry = find(state, digits), operator.note("shown")
    if not admin(state).note(line.hash, entry):
        raise IdempotencyError("This record is in use just now, or gone: nothing was shown.")
    operator.tell(entry, level=logging.INFO, operation=line.operation, id=line.key[:SHOWN])
    return _page(state, digits, with_body=True)


def _page(state: AppState, digits: str, *, with_body: bool = False) -> Response:
    found = look_into(state, find(state, digits), filter(None, request.args.getlist("derive")))
    stored = found.record.response if found.record else None
    return page(
        "record.html",
        found=found,
        line=found.line,
        moments=moments(found),
        stored=stored,
        headers=storable(stored.headers or ()) if stored else (),
        with_body=with_body,
        most=MOST_SHOWN,
    )


def confirm(digits: str, action: str) -> Response:
    """Show what an action would do, and its form."""
    state = app_state(current_app)
    return _form(state, action, undecided(state, digits, action))


def act(digits: str, action: str) -> Response:
    """Do it, and show the record; or the form again with what is wrong."""
    state, form = app_state(current_app), request.form
    line = undecided(state, digits, action, token=form.get("seen", ""))
    operator, not_done = access.operator(), "not_done" in form
    if action == "forget":
        if not erase(state, [line], operator, line.operation):
            raise IdempotencyError("This record is in use just now, or gone: nothing was erased.")
        return page("message.html", title="Erased", done="A retry runs the view again.", detail="")
    try:
        response = _given(state) if action == "resolve" else None
        settle(state, line, action, form.get("why", ""), operator, response, not_done=not_done)
    except Mistake as mistake:
        return _form(state, action, line, mistake)
    return redirect(url_for(".record", digits=line.key), 303)


def _given(state: AppState) -> flask.Response:
    """Return the response that was filled in. Raises :class:`Mistake` for what is none."""
    form = request.form
    status, kind = form.get("status", ""), form.get("content_type", "").strip()
    if not re.fullmatch("[2-5][0-9]{2}", status):
        raise Mistake("status", "A status is a number from 200 to 599.")
    content = form.get("body", "").replace("\r\n", "\n").encode()
    given = decide.given_response(state, int(status), content, (), kind)
    if decide.is_empty(given) and "empty" not in form:
        raise Mistake("empty", f"There is no body: every retry would get an empty {status}.")
    return given


def _form(state: AppState, action: str, line: Line, mistake: Mistake | None = None) -> Response:
    return page(
        "confirm.html",
        400 if mistake else 200,
        action=action,
        line=line,
        seen=decide.token_of(line),
        found=look_into(state, line),
        form=request.form,
        mistake=mistake,
    )
