"""What is protected, and how; and what `check` says of it."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flask import Blueprint, Flask, request, request_started

from flask_idempotency.core.errors import ConfigurationError
from flask_idempotency.core.keys import scope_tail
from flask_idempotency.flask_context import ask_before_request, handle_error
from flask_idempotency.stores.admin import Finding, finding
from flask_idempotency.web.body import is_used_up
from flask_idempotency.web.request import current_scope, this_request
from flask_idempotency.web.routes import (
    AppState,
    name_of,
    refuse_contradiction,
    refuse_misplaced,
    refuse_unsupported,
    route_of,
    states,
)
from flask_idempotency.web.settings import SAFE_METHODS, Route, ScopeCallable

HERE = {"REMOTE_ADDR": "127.0.0.1"}
"""Whom a request of ours comes from."""


@dataclass(frozen=True)
class WriteRoute:
    """The methods of one URL rule that have the same protection; ``route`` is None without any.

    It has the application's settings where it has none of its own.
    """

    endpoint: str
    methods: list[str]
    rule: str
    route: Route | None

    @property
    def given(self) -> Route:
        """The options themselves, with some left open."""
        return (self.route and self.route.given) or Route()

    @property
    def protected_by(self) -> str | None:
        """Name what protects it."""
        if self.route is None:
            return None
        return "protect" if self.route.methods else "decorator"


def write_routes(state: AppState) -> Iterator[WriteRoute]:
    """Yield every route that changes something, in the order of the URL map, but the console's."""
    for rule in state.app.url_map.iter_rules():
        if _is_console(state.app.blueprints.get(rule.endpoint.rpartition(".")[0])):
            continue
        rows: list[WriteRoute] = []
        for method in sorted((rule.methods or set()) - SAFE_METHODS):
            route = route_of(state, rule.endpoint, method)
            route = route and route.resolved(state.settings, state.scope, rule.endpoint)
            row = WriteRoute(rule.endpoint, [], rule.rule, route)
            alike = [each for each in rows if (each.route, each.given) == (row.route, row.given)]
            if not alike:
                rows.append(row)
            [*alike, row][0].methods.append(method)
        yield from rows


def _is_console(blueprint: Any) -> bool:
    """Return True if a blueprint is the operators' page."""
    return blueprint is not None and blueprint.import_name == "flask_idempotency.console.blueprint"


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
    if observed := {each.endpoint for each in found if each.route and not each.route.enforce}:
        text += f"; {len(observed)} only observed: {', '.join(sorted(observed))}"
    if bare := sorted({_partly(each, covered) for each in found if not each.protected_by}):
        text += f"; not protected: {', '.join(bare)}"
    bad = "IDEMPOTENCY_ENABLED is False: nothing is protected"
    remedy = "leave the setting out"
    yield finding(state.settings.enabled, "routes", text, bad, remedy, "advice")


def _partly(bare: WriteRoute, covered: set[str]) -> str:
    """Name an endpoint that is not protected, with its methods if others of it are."""
    methods = f" ({', '.join(bare.methods)})" if bare.endpoint in covered else ""
    return bare.endpoint + methods


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


def _examine_each(state: AppState, found: list[WriteRoute]) -> Iterator[Finding]:
    said = set()
    for each in found:
        try:
            _refuse(state, each)
        except ConfigurationError as error:
            if error.detail not in said:
                said.add(error.detail)
                yield Finding("FAILED", "route", error.detail)


def _refuse(state: AppState, each: WriteRoute) -> None:
    """Raise what the first request would raise."""
    refuse_contradiction(state, each.endpoint)
    if each.protected_by != "decorator":
        refuse_misplaced(state, each.endpoint)
    if each.route is not None:
        refuse_unsupported(state, each.route)
        state.engines_of(each.route.other_binds)


def _examine_targets(state: AppState) -> Iterator[Finding]:
    """Find blueprints that ``protect`` was given and no application has."""
    mine = [each.app for each in states() if each.protected is state.protected]
    known = {blueprint for app in mine for blueprint in app.blueprints.values()}
    for target in list(state.protected):
        if isinstance(target, Blueprint) and target not in known:
            text = f"protect() was given the blueprint {target.name!r}, which is not registered"
            if target.name in state.app.blueprints:
                text += ": another one of this name is"
            yield Finding("FAILED", "protect", text, "give it the blueprint object that is registered")


def _examine_foreign(state: AppState, found: list[WriteRoute]) -> Iterator[Finding]:
    """Find views of installed packages that ``protect`` covers: their forms send no key."""
    packages: dict[str, set[str]] = defaultdict(set)
    mine = state.app.import_name.partition(".")[0]
    for each in found:
        route, view = each.route, state.app.view_functions[each.endpoint]
        package = str(getattr(view, "__module__", None)).partition(".")[0]
        path = Path(getattr(sys.modules.get(package), "__file__", None) or "")
        is_foreign = package != mine and not _INSTALLED.isdisjoint(path.parts)
        is_covered = each.protected_by == "protect" and is_foreign
        if route is not None and is_covered and route.required and route.skip is None:
            packages[package].add(each.endpoint)
    for package, endpoints in sorted(packages.items()):
        text = f"protect() covers views of {package}, which send no key: {', '.join(sorted(endpoints))}"
        yield Finding("advice", "protect", text, "leave them out with protect(skip=...) or exempt()")


_INSTALLED = {"site-packages", "dist-packages"}


def _examine_strangers(state: AppState, found: list[WriteRoute]) -> Iterator[Finding]:
    """Try what a request without credentials gets from each scope callable below ``protect``.

    Above ``@idempotent``, a decorator of the view may come first, so there nobody can tell.
    """
    asked: list[Any] = []
    for each in found:
        route = each.route
        if route is None or each.protected_by != "protect" or "<" in each.rule or route.scope in asked:
            continue
        asked.append(scope := route.scope)
        with state.app.test_request_context(each.rule, method=each.methods[0], environ_base=HERE):
            error = _ask_for_stranger(state.app, scope)
        if error is not None:
            text = f"raises {type(error).__name__} for a request without credentials, which gets a 500"
            if isinstance(error, ConfigurationError):  # what it returned is no scope
                text = f"gives every request a 500: {error}"
            remedy = "let it return None, as in 'Whose key it is' on the page 'Protect views'"
            yield Finding("FAILED", "scope", f"{name_of(scope)} {text}", remedy)


def _ask_for_stranger(app: Flask, scope: ScopeCallable | None) -> BaseException | None:
    """Return what keeps the present request from its 401: an error of ``scope`` that is not handled.

    None also if something of the application rejects the request before.
    """
    try:
        if ask_before_request(app) is not None or this_request().skipped:
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
    shared = sorted({each.endpoint for each in found if each.route and each.given.scope is None})
    untried = any(each.protected_by == "decorator" for each in found)
    text = f"asked of {name_of(state.scope)}" + (", not tried below @idempotent" if untried else "")
    return Finding("ok", "scope", text + (f"; one tenant at {', '.join(shared)}" if shared else ""))
