"""The pages: each reads what the commands of ``flask idempotency`` read, and shows it."""

from __future__ import annotations

from typing import Any

from flask import current_app, g, redirect, request, url_for
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
from flask_idempotency.operate.find import STATES, Sought, admin, find, operations
from flask_idempotency.operate.words import as_utc, duration, explain, printable
from flask_idempotency.web.routes import app_state

from . import access
from .timeline import ago

FEW = 10
"""Records in a list of the overview."""

PAGE = 100
"""Records in any other list. Whoever wants more narrows it down, or uses the commands."""

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
    utc=as_utc,
    ago=ago,
    duration=duration,
    number="{:,}".format,
    digits=lambda key: key[:SHOWN],
    label=lambda name: name.replace("_", " "),
)


def page(template: str, status: int = 200, **values: Any) -> Response:
    """A page, complete."""
    html = _templates.get_template(template).render(
        url_for=url_for, application=current_app.name, who=access.operator().by, **values
    )
    return Response(html, status, mimetype="text/html")


def overview() -> Response:
    """Show what waits for an operator, what runs, and what there is."""
    state = app_state(current_app)
    store = admin(state)
    return page(
        "overview.html",
        glance=store.overview(),
        interrupted=store.lines(FEW, state="interrupted"),
        operations=operations(state),
        redis=next(state.lock.examine(), None),
    )


def records() -> Response:
    """Show the newest records, or what the form seeks: a record by digits or key, or a scope's.

    A form, as URLs end up in logs of servers.
    """
    state, form = app_state(current_app), request.form
    names = ("operation", "state", "digits", "key", "scope", "namespace")
    given = {name: form.get(name, "").strip() or None for name in names}
    if request.method != "POST":
        given |= {name: request.args.get(name) or None for name in ("operation", "state")}
    chosen, digits = given.pop("state"), given.pop("digits")
    sought = Sought(**given)
    if chosen not in (None, *STATES):
        raise UnknownRecord(f"There is no state {chosen}: the states are {', '.join(STATES)}.")
    is_listed = bool(form or request.args) or admin(state).overview().total <= SMALL
    shown = [find(state, digits)] if digits else []
    if is_listed and not digits:
        shown = sought.lines(state, chosen, PAGE + 1)
    if form and not shown:
        raise UnknownRecord(sought.nothing_found(state))
    if form and len(shown) == 1:
        return redirect(url_for(".record", digits=shown[0].key), 303)
    return page(
        "records.html",
        shown=shown[:PAGE],
        is_cut=len(shown) > PAGE,
        is_listed=is_listed,
        operation=sought.operation,
        chosen=chosen,
        states=STATES,
        operations=operations(state),
    )


def refused(error: IdempotencyError) -> Response:
    """The page for what cannot be done. Before somebody is let in, it is the application's mistake."""
    if "idempotency_who" not in g:
        raise error
    status, title = next(found for kind, found in _REFUSALS.items() if isinstance(error, kind))
    return page("message.html", status, title=title, detail=explain(error), done="")


_REFUSALS = {
    StoreUnavailable: (503, "The records cannot be reached"),
    ConfigurationError: (500, "The records cannot be read"),
    UnknownRecord: (404, "Not found"),
    access.FormRefused: (403, "Not accepted"),
    IdempotencyError: (409, "That is not possible"),
}
