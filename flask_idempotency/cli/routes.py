"""What is protected, and how: the command that lists it, and what `check` says of it."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from flask import Blueprint, Flask, current_app, request, request_started

from flask_idempotency.core.errors import ConfigurationError
from flask_idempotency.core.fingerprint import Named, Pointer
from flask_idempotency.core.keys import scope_tail
from flask_idempotency.session.flask_context import ask_before_request, handle_error
from flask_idempotency.stores.admin import Finding, finding
from flask_idempotency.web.request.observed_body import is_used_up
from flask_idempotency.web.request.state import current_scope, this_request
from flask_idempotency.web.setup.options import (
    OPTIONS,
    SAFE_METHODS,
    Route,
    ScopeCallable,
)
from flask_idempotency.web.setup.routes import (
    covering_route,
    hidden_route,
    is_registered,
    name_of,
    refuse_contradiction,
    refuse_hidden,
    refuse_misplaced,
    refuse_shared_name,
    refuse_unsupported,
    route_of,
)
from flask_idempotency.web.setup.state import AppState, app_state, states

from .group import as_json_option, cli, write_rows

HERE = {"REMOTE_ADDR": "127.0.0.1"}
"""Whom a request of ours comes from."""


@dataclass(frozen=True)
class WriteRoute:
    """The methods of one URL rule that have the same protection; ``route`` is None without any."""

    endpoint: str
    methods: list[str]
    rule: str
    route: Route | None
    is_hidden: bool

    @property
    def protected_by(self) -> str | None:
        """Name what protects it."""
        if self.route is None:
            return None
        return "decorator" if self.route.methods is None else "protect"


def write_routes(state: AppState) -> Iterator[WriteRoute]:
    """Every route that changes something, in the order of the URL map, but the console's."""
    for rule in state.app.url_map.iter_rules():
        if _is_console(state.app.blueprints.get(rule.endpoint.rpartition(".")[0])):
            continue
        rows: list[WriteRoute] = []
        for method in sorted((rule.methods or set()) - SAFE_METHODS):
            route = route_of(state, rule.endpoint, method)
            hidden = hidden_route(state, rule.endpoint, method) if route is None else None
            row = WriteRoute(rule.endpoint, [], rule.rule, route or hidden, hidden is not None)
            same = next((each for each in rows if replace(each, methods=[]) == row), None)
            if same is None:
                rows.append(same := row)
            same.methods.append(method)
        yield from rows


def _is_console(blueprint: Any) -> bool:
    """Return True if a blueprint is the operators' page."""
    return blueprint is not None and blueprint.import_name == "flask_idempotency.console.blueprint"


@cli.command("routes")
@as_json_option
def list_routes(as_json: bool) -> None:
    """List every route that changes something, and how it is protected.

    These are the routes with POST, PUT, PATCH or DELETE, without the operator's page. "protected by" is
    "decorator" for @idempotent, "protect" for Idempotency.protect, and "not" (null in JSON) without
    protection; "observed" is added where it only observes (in JSON, "enforce" is false). Shows the
    options that differ from their defaults; in JSON all of them, with the application's settings filled
    in, and callables by name. Needs neither database nor Redis.
    """
    state = app_state(current_app)
    rows = [_row(state, each, as_json) for each in write_routes(state)]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        write_rows(rows, as_json, "no route has POST, PUT, PATCH or DELETE")


def _row(state: AppState, each: WriteRoute, as_json: bool) -> dict[str, Any]:
    options = _options(state, each)
    if as_json:
        row = {"endpoint": each.endpoint, "methods": each.methods, "rule": each.rule}
        return {**row, "protected_by": each.protected_by, **options}
    given = [f"{name}={_text(options[name])}" for name in options if _is_given(each.route, name)]
    by = each.protected_by or "not"
    return {
        "endpoint": each.endpoint,
        "methods": ",".join(each.methods),
        "rule": each.rule,
        "protected by": by if options["enforce"] in (True, None) else f"{by}, observed",
        "options": " ".join(given) or None,
    }


_OPTIONS = (*OPTIONS, "skip")


def _options(state: AppState, each: WriteRoute) -> dict[str, Any]:
    """All options of a route as JSON, with the settings where it has none; all None without a route."""
    if (route := each.route) is None:
        return dict.fromkeys(_OPTIONS)
    route = route.resolved(state.settings, state.scope, each.endpoint)
    values = {name: getattr(route, name) for name in _OPTIONS}
    values["resumable"] = route.resumable or route.resumable is not None
    if route.atomic:
        values["lease"] = values["on_interrupted"] = None
    if isinstance(route.key, Pointer):
        values["key"] = f"json:{route.key.text}"
    return {name: _shown(value) for name, value in values.items()}


def _shown(value: Any) -> Any:
    match value:
        case Pointer() | Named():
            return value.text
        case tuple():
            return [_shown(each) for each in value]
        case float() if value.is_integer():
            return int(value)
    return name_of(value) if callable(value) else value


def _is_given(route: Route | None, option: str) -> bool:
    return route is not None and getattr(route, option) != getattr(Route(), option)


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def examine_routes(state: AppState) -> Iterator[Finding]:
    """Check what is protected, and what only seems to be."""
    found = list(write_routes(state))
    yield from _examine_each(state, found)
    yield from _examine_targets(state)
    yield from _examine_foreign(state, found)
    yield from [*_examine_strangers(state, found)] or [_examine_scope(state, found)]
    yield from _examine_console(state)
    yield from _examine_early_readers(state, found)
    endpoints = {each.endpoint for each in found}
    covered = {each.endpoint for each in found if each.protected_by}
    by_protect = {each.endpoint for each in found if each.protected_by == "protect"}
    text = f"{len(covered)} of {len(endpoints)} endpoints that change something are protected"
    if by_protect:
        text += f", {len(by_protect)} of them by protect()"
    if observed := {each.endpoint for each in found if _is_observed(state, each.route)}:
        text += f"; {len(observed)} only observed: {', '.join(sorted(observed))}"
    bad = "IDEMPOTENCY_ENABLED is False: nothing is protected"
    remedy = "leave the setting out, or see `flask idempotency routes` for what it would protect"
    yield finding(state.settings.enabled, "routes", text, bad, remedy, "advice")


def _examine_console(state: AppState) -> Iterator[Finding]:
    if any(map(_is_console, state.app.blueprints.values())) and not state.app.secret_key:
        bad = "the operator's page cannot sign its forms, so every request to it gets a 500"
        yield Finding("FAILED", "console", bad, "set SECRET_KEY")


def _examine_early_readers(state: AppState, found: list[WriteRoute]) -> Iterator[Finding]:
    """Try whether something reads a form before it can be kept. The request goes to no view."""
    rules = (each for each in found if each.route is not None and "<" not in each.rule)
    first = next(rules, None)
    target = {"path": first.rule, "method": first.methods[0]} if first else {"method": "POST"}
    reader = ""
    with suppress(Exception), state.app.test_request_context(**target, data={"check": "check"}):
        reader = "the application's class of requests or of sessions" if is_used_up(request) else ""
        for receiver in () if reader else request_started.receivers_for(state.app):
            with suppress(Exception):
                state.app.ensure_sync(receiver)(state.app)
            if is_used_up(request):
                reader = f"{name_of(receiver)}, a receiver of request_started,"
                break
    if reader:
        text = f"{reader} reads forms before they can be kept: each to a protected view gets a 500"
        yield Finding("advice", "forms", text, "let it call request.get_data() first")


def _is_observed(state: AppState, route: Route | None) -> bool:
    return route is not None and not route.resolved(state.settings, state.scope).enforce


def _examine_each(state: AppState, found: list[WriteRoute]) -> Iterator[Finding]:
    said = set()
    for each in found:
        try:
            _refuse(state, each)
        except ConfigurationError as error:
            if error.detail not in said:
                said.add(error.detail)
                yield Finding("FAILED", "route", error.detail)
    if hidden := sorted({each.endpoint for each in found if each.is_hidden}):
        text = f"a decorator above @idempotent hides it at {', '.join(hidden)}"
        yield Finding("advice", "hidden", text, "let the decorator use functools.wraps")


def _refuse(state: AppState, each: WriteRoute) -> None:
    """Raise what the first request would raise."""
    refuse_contradiction(state, each.endpoint)
    if each.protected_by != "decorator":
        refuse_misplaced(state, each.endpoint)
    if each.route is None:
        return
    route = each.route.resolved(state.settings, state.scope, each.endpoint)
    refuse_unsupported(state, route, route.name)
    state.engines_of(each.route.other_binds)
    if each.protected_by == "protect" and (covering := covering_route(state, each.endpoint)):
        refuse_shared_name(state, covering)
        for method in each.methods:
            refuse_hidden(state, each.endpoint, method, each.route)


def _examine_targets(state: AppState) -> Iterator[Finding]:
    """Arguments of ``protect`` and ``exempt`` that are not registered."""
    protections = state.protections
    mine = [each for each in states() if each.protections is protections]

    def is_missing(target: Any) -> bool:
        return not any(is_registered(each, target) for each in mine)

    for target in list(protections.routes):
        if isinstance(target, Blueprint) and is_missing(target):
            text = f"protect() was given the blueprint {target.name!r}, which is not registered"
            if target.name in state.app.blueprints:
                text += ": another one of this name is"
            yield Finding("FAILED", "protect", text, "give it the blueprint object that is registered")
    for target in *sorted(protections.exempt_endpoints), *list(protections.exempt):
        if is_missing(target):
            name = repr(target) if isinstance(target, str) else getattr(target, "name", name_of(target))
            text = f"exempt() was given {name}, which is not registered"
            yield Finding("FAILED", "exempt", text, "give it the view, blueprint or endpoint that is")


def _examine_foreign(state: AppState, found: list[WriteRoute]) -> Iterator[Finding]:
    """Views of installed packages that ``protect`` covers: their forms send no key."""
    packages: dict[str, set[str]] = defaultdict(set)
    for each in found:
        route = each.route
        if route is None or each.protected_by != "protect" or route.skip is not None:
            continue
        package = _package(state.app.view_functions[each.endpoint])
        if route.resolved(state.settings, state.scope).required and _is_installed(
            package, state.app.import_name
        ):
            packages[package].add(each.endpoint)
    for package, endpoints in sorted(packages.items()):
        text = f"protect() covers views of {package}, which send no key: {', '.join(sorted(endpoints))}"
        yield Finding("advice", "protect", text, "leave them out with protect(skip=...) or exempt()")


def _package(view: Any) -> str:
    return str(getattr(view, "__module__", None)).partition(".")[0]


def _is_installed(package: str, import_name: str) -> bool:
    if package == import_name.partition(".")[0]:
        return False
    path = getattr(sys.modules.get(package), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)


def _examine_strangers(state: AppState, found: list[WriteRoute]) -> Iterator[Finding]:
    """Try what a request without credentials gets from each scope callable below ``protect``.

    Above ``@idempotent``, a decorator of the view may come first, so there nobody can tell.
    """
    asked: list[Any] = []
    for each in found:
        if each.route is None or each.protected_by != "protect" or "<" in each.rule:
            continue
        scope = each.route.resolved(state.settings, state.scope, each.endpoint).scope
        if scope in asked:
            continue
        asked.append(scope)
        with state.app.test_request_context(each.rule, method=each.methods[0], environ_base=HERE):
            error = _ask_for_stranger(state.app, scope)
        if error is not None:
            text = f"raises {type(error).__name__} for a request without credentials, which gets a 500"
            if isinstance(error, ConfigurationError):  # what it returned is no scope
                text = f"gives every request a 500: {error}"
            remedy = "let it return None, as on the page about authentication (JWT, sessions, API keys)"
            yield Finding("FAILED", "scope", f"{name_of(scope)} {text}", remedy)


def _ask_for_stranger(app: Flask, scope: ScopeCallable | None) -> BaseException | None:
    """Return what keeps the present request from its 401: an error of ``scope`` that is not handled.

    None also if something of the application rejects the request before.
    """
    try:
        if ask_before_request(app) is not None or this_request().presented.skipped:
            return None
    except Exception:  # so does abort()
        return None
    try:
        scope_tail(current_scope(scope, required=False))
    except Exception as error:
        with suppress(Exception):
            if app.make_response(handle_error(app, error)).status_code < 500:
                return None
        return error.__cause__ or error if isinstance(error, ConfigurationError) else error
    return None


def _examine_scope(state: AppState, found: list[WriteRoute]) -> Finding:
    if state.scope is None and getattr(state.app, "login_manager", None) is not None:
        text = "None, for one tenant, although Flask-Login signs users in"
        remedy = (
            "init_app(..., scope=lambda: current_user.get_id()), unless all users may see all responses"
        )
        return Finding("advice", "scope", text, remedy)
    if state.scope is None:
        return Finding("ok", "scope", "one tenant")
    routes = ((each.endpoint, each.route) for each in found if each.route is not None)
    shared = sorted({name for name, route in routes if route.scope is None})
    text = f"asked of {name_of(state.scope)}" + (
        f"; one tenant at {', '.join(shared)}" if shared else ""
    )
    return Finding("ok", "scope", text)
