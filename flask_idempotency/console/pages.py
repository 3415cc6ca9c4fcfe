"""The pages: each reads what the commands of ``flask idempotency`` read, and shows it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from flask import current_app, redirect, request, url_for
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from werkzeug.wrappers import Response

from flask_idempotency.core.errors import (
    ConfigurationError,
    IdempotencyError,
    StoreUnavailable,
    UnknownRecord,
)
from flask_idempotency.core.keys import SHOWN
from flask_idempotency.operate.find import (
    DIGITS,
    STATES,
    Sought,
    admin,
    find,
    operation_name,
    operations,
)
from flask_idempotency.operate.words import duration, explain, printable
from flask_idempotency.stores.admin import Line, Overview
from flask_idempotency.web.routes import app_state

from . import access, labels

_STATES = ("in_progress", "interrupted", "released", "failed", "completed", "observed")
"""What needs somebody is on the left, where a narrow screen shows it."""

FEW = 10
"""Records in a list of the overview."""

PAGE, MOST = 50, 1000
"""Records in a list, at first and at most. Whoever wants more narrows it down."""

SMALL = 100_000
"""Records in a table whose newest are listed unasked. That reads all of it: here, some 60 ms."""


def _legible(value: Any) -> Any:
    """Text as the commands write it. Not what a template has escaped, which is sent as it is."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


_templates = Environment(
    loader=PackageLoader("flask_idempotency.console"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_legible,
    trim_blocks=True,
    lstrip_blocks=True,
)
"""Our own: no setting and no template of the application's changes what is escaped."""

_templates.filters.update(
    moment=labels.moment,
    duration=duration,
    size=labels.size,
    number=labels.number,
    digits=lambda key: key[:SHOWN],
    label=lambda name: name.replace("_", " "),
)


def page(template: str, status: int = 200, **values: Any) -> Response:
    """A page, complete."""
    link = lambda endpoint, **of: url_for(f"{request.blueprint}.{endpoint}", **of)  # noqa: E731
    html = _templates.get_template(template).render(
        link=link, token=access.token, application=current_app.name, who=access.who(), **values
    )
    return Response(html, status, mimetype="text/html")


def overview() -> Response:
    """Show the overview."""
    state = app_state(current_app)
    store = admin(state)
    glance = store.overview()
    interrupted = store.leased("interrupted", FEW) if glance.interrupted else []
    running = store.leased("in_progress", FEW) if glance.running else []
    return page(
        "overview.html",
        glance=glance,
        states=_by_operation(glance),
        state_names=[name for name in _STATES if glance.by_state.get(name)],
        interrupted=interrupted,
        running=running,
        operations=operations(state),
        redis=next(state.lock.examine(), None),
    )


def _by_operation(glance: Overview) -> dict[str, Counter[str]]:
    rows: dict[str, Counter[str]] = {}
    for tally in glance.tallies:
        rows.setdefault(tally.operation, Counter())[tally.state] = tally.count
    return rows


def records() -> Response:
    """Show the newest records, of one operation and in one state if these are given."""
    state = app_state(current_app)
    operation = operation_name(request.args.get("operation") or None)
    chosen = request.args.get("state") or None
    limit = max(1, min(request.args.get("limit", PAGE, type=int), MOST))
    if chosen not in (None, *STATES):
        raise UnknownRecord(f"There is no state {chosen}: the states are {', '.join(STATES)}.")
    store = admin(state)
    is_listed = bool(request.args) or store.overview().total <= SMALL
    found = store.newest(operation, chosen, limit + 1) if is_listed else []
    return page(
        "records.html",
        is_listed=is_listed,
        shown=found[:limit],
        more=min(limit * 2, MOST) if len(found) > limit and limit < MOST else None,
        is_cut=len(found) > limit,
        operation=operation,
        chosen=chosen,
        erased=access.said() == "forget",
        states=STATES,
        operations=operations(state),
    )


def search() -> Response:
    """Lead to a record, found by digits or by its key, or to those of a scope.

    A form, as URLs end up in logs of servers.
    """
    state = app_state(current_app)
    digits = request.form.get("digits", "").strip()
    if digits:
        line = find(admin(state), checked(digits))
        return redirect(_record_url(line), 303)
    names = ("operation", "key", "scope", "namespace")
    sought = Sought(*(request.form.get(name, "").strip() or None for name in names))
    shown = sought.lines(state, None, PAGE)
    if shown is None:
        raise UnknownRecord(
            "A record is found by its digits, by its key and operation, or by its scope."
        )
    if len(shown) == 1:
        return redirect(_record_url(shown[0]), 303)
    if not shown:
        raise UnknownRecord("There is no record of this key, operation and scope.")
    return page("found.html", shown=shown, of_scope=sought.key is None, most=PAGE)


def refused(error: IdempotencyError) -> Response:
    """The page for what cannot be done. Before somebody is let in, it is the application's mistake."""
    if not access.is_admitted():
        raise error
    status, title = next(found for kind, found in _REFUSALS.items() if isinstance(error, kind))
    return page("error.html", status, title=title, detail=explain(error))


_REFUSALS = {
    StoreUnavailable: (503, "The records cannot be reached"),
    ConfigurationError: (500, "The records cannot be read"),
    UnknownRecord: (404, "Not found"),
    access.FormRefused: (403, "Not accepted"),
    IdempotencyError: (409, "That is not possible"),
}


def _record_url(line: Line) -> str:
    return url_for(f"{request.blueprint}.record", digits=line.key)


def checked(digits: str) -> str:
    """Return digits as they are compared. Raises ``UnknownRecord`` for anything else."""
    if not DIGITS.fullmatch(digits):  # not repeated: it may be a key
        raise UnknownRecord("The digits of a record are 8 or 16 of 0 to 9 and a to f.")
    return digits.lower()
