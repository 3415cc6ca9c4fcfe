"""Whether everything the guarantees depend on is in place: servers, and what is protected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flask_idempotency.core.errors import ConfigurationError, IdempotencyError, StoreUnavailable
from flask_idempotency.core.records import SEALED, Record, StoredResponse
from flask_idempotency.session.operation import OpenTransaction, Operation
from flask_idempotency.stores.admin import TRIAL, Finding, reason, trial_claim
from flask_idempotency.web import routes
from flask_idempotency.web.routes import AppState
from flask_idempotency.web.settings import SAFE_METHODS, Route

from .find import admin
from .words import explain

FOR_LISTENERS = (
    "commands have the application's context, but no request and an empty flask.g: let listeners on the"
    " engine do without, as with g.get(...). Of the engine's, our own connections are told to those for"
    " connect alone: set there what the tables need, such as a role"
)
"""What to do where a listener of the application keeps us from the tables."""


def examine(state: AppState) -> Iterator[Finding]:
    """Check that everything the guarantees depend on is in place: servers and routes."""
    ready = True
    for each in _listening("listener", admin(state).examine()):
        # A claim works without an index, and in a Redis that evicts.
        ready = ready and (each.level != "FAILED" or each.subject in ("index", "memory"))
        yield each
    if ready:
        yield from _examine_keys(state)
        yield from _examine_claim(state)
        yield from _listening("own pool", _examine_own_connections(state))
    yield from state.lock.examine()
    yield from _examine_routes(state)


def _listening(subject: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings; what a listener of the application may have raised is one, too."""
    try:
        yield from findings
    except Exception as error:
        yield Finding("FAILED", subject, f"{type(error).__name__}: {reason(error)}", FOR_LISTENERS)


def _examine_keys(state: AppState) -> Iterator[Finding]:
    """Count what is stored under which key: without one of them, retries would get 500."""
    sealer = state.sealer
    try:
        counts = admin(state).sealings()
    except IdempotencyError:  # told elsewhere
        return
    plain = counts.pop(None, 0)
    lost = sum(counts.values()) - sum(counts[SEALED + each] for each in sealer.key_ids)
    if lost:
        remedy = (
            "set IDEMPOTENCY_ENCRYPTION_KEYS as the other processes have it, or retries get 500. If a"
            " key is lost for good, deploy without this check until its responses have expired (ttl)"
        )
        bad = f"{lost:,} responses or steps are encrypted under a key that this process does not have"
        yield Finding("FAILED", "encryption", bad, remedy)
    elif plain and not sealer.accepts_unsealed:
        bad = f"{plain:,} responses or steps are not encrypted, so retries get 500"
        remedy = "if they are from before there were keys, set IDEMPOTENCY_ACCEPT_UNSEALED for one ttl"
        yield Finding("FAILED", "encryption", bad, remedy)
    elif sealer.key_ids:
        each = (f"{counts[SEALED + key]:,}" for key in sealer.key_ids)
        used = f"responses and steps under each key, newest first: {', '.join(each)}"
        yield Finding("ok", "encryption", f"{used} (a key without any may be taken away)")


def _examine_claim(state: AppState) -> Iterator[Finding]:
    """Claim, join a session of the application to the transaction, complete and delete: as a view's."""
    store, claim, subject = admin(state), trial_claim(), "claim"
    try:
        hold = state.records.claim(claim)
        if hold is None or isinstance(hold, Record):
            raise StoreUnavailable
        try:
            if state.records.atomic:
                subject = "db.session"
                yield _examine_session(state, hold)
            subject = "claim"
            hold.complete(StoredResponse(204, (), b""))
        finally:
            hold.abandon()
        yield Finding("ok", subject, "a record was claimed and completed")
    except Exception as error:  # the database's own, too: it says best what it refuses
        yield Finding("FAILED", subject, explain(error), store.remedy)
    try:
        for line in store.lines(1, start=claim.key):
            store.erase(line)
    except IdempotencyError as error:
        yield Finding("FAILED", "deletion", explain(error))


def _examine_session(state: AppState, hold: Any) -> Finding:
    """Join a session to a claim's transaction. Raises ``IdempotencyError`` if it does not join."""
    subject = "db.session"
    try:
        state.sessions.joining()
        with OpenTransaction(state, Operation(TRIAL, "", None, "", hold.attempt), hold):
            if state.bind_key == state.sessions.usual:  # sessions find other binds by their models
                state.sessions.current().get_bind(clause=state.table)
    except IdempotencyError:
        raise
    except Exception as error:  # such as that of a get_bind() that asks the request
        text = f"does not join outside of a request: {type(error).__name__}: {reason(error)}"
        return Finding("advice", subject, text, "the first request tries again, and is refused if not")
    return Finding("ok", subject, "joins the operation's transaction")


def _examine_own_connections(state: AppState) -> Iterator[Finding]:
    """Ask on one of our own connections, as the purge after a response and observing do."""
    if state.records.atomic:
        state.records.look(trial_claim().key)
        yield Finding("ok", "own pool", "reaches the records")


def _examine_routes(state: AppState) -> Iterator[Finding]:
    """Name what the first request would refuse, whose keys they are, and what is not protected."""
    protected: dict[str, Route] = {}
    bare: dict[str, list[str]] = {}
    mistakes: dict[str, Finding] = {}
    for rule in state.app.url_map.iter_rules():
        endpoint, view = rule.endpoint, state.app.view_functions.get(rule.endpoint)
        if view is None or view.__module__.startswith("flask_idempotency.console"):
            continue
        for method in sorted((rule.methods or set()) - SAFE_METHODS):
            try:
                route = _protection(state, endpoint, method)
            except ConfigurationError as error:
                mistakes[error.detail] = Finding("FAILED", "route", error.detail)
                continue
            if route is None:
                bare.setdefault(endpoint, []).append(method)
            else:
                protected[endpoint] = route
    yield from mistakes.values()
    yield _examine_scope(state, protected)
    total = protected.keys() | bare.keys()
    text = f"{len(protected)} of {len(total)} endpoints that change something are protected"
    if observed := sorted(name for name, route in protected.items() if not route.enforce):
        text += f"; {len(observed)} only observed: {', '.join(observed)}"
    if bare:
        named = (
            f"{name} ({', '.join(methods)})" if name in protected else name
            for name, methods in sorted(bare.items())
        )
        text += f"; not protected: {', '.join(named)}"
    if state.settings.enabled:
        yield Finding("ok", "routes", text)
        return
    text = "IDEMPOTENCY_ENABLED is False: nothing is protected"
    yield Finding("advice", "routes", text, "leave the setting out")


def _protection(state: AppState, endpoint: str, method: str) -> Route | None:
    """Return what protects a method of an endpoint. Raises what the first request would raise."""
    given = routes.route_of(state, endpoint, method)
    if given is None or given.methods:  # not by a decorator of its own
        routes.refuse_misplaced(state, endpoint)
    if given is None:
        return None
    route = routes.supported(state, routes.resolved(state, given, endpoint))
    state.engines_of(route.other_binds)
    return route


def _examine_scope(state: AppState, protected: Mapping[str, Route]) -> Finding:
    if state.scope is None and getattr(state.app, "login_manager", None) is not None:
        text = "None, for one tenant, although Flask-Login signs users in"
        remedy = (
            "init_app(..., scope=lambda: current_user.get_id()), unless all users may see all responses"
        )
        return Finding("advice", "scope", text, remedy)
    if state.scope is None:
        return Finding("ok", "scope", "one tenant")
    text = f"asked of {routes.name_of(state.scope)}"
    if shared := sorted(name for name, route in protected.items() if route.scope is None):
        text += f"; one tenant at {', '.join(shared)}"
    return Finding("ok", "scope", text)
