"""The outcome of an operation, for clients that gave up; and the rules that an API publishes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from flask import Blueprint, Response, after_this_request, current_app, jsonify, request

from flask_idempotency.core.errors import (
    PROBLEMS,
    ConfigurationError,
    KeyRequired,
    OutcomeUnknown,
    Problem,
    ReplayForbidden,
    ResponseNotKept,
    StoreUnavailable,
    shown,
)
from flask_idempotency.core.fingerprint import Named, Pointer, natural_key
from flask_idempotency.core.keys import key_syntax, parse_key
from flask_idempotency.core.machine import Situation, resumes, situation
from flask_idempotency.core.records import Record, State, StoredResponse
from flask_idempotency.core.storable import POINTERS
from flask_idempotency.web.request.identity import new_operation
from flask_idempotency.web.request.state import current_scope
from flask_idempotency.web.setup.options import Route, ScopeCallable
from flask_idempotency.web.setup.routes import ProtectedRoute, protected_routes
from flask_idempotency.web.setup.state import AppState, app_state
from flask_idempotency.web.signals import Event, tell_failure, unavailable

_SAYS = {
    "in_progress": "The operation has started and has no response yet. Send the same request again.",
    "completed": "The operation has finished. The same request gets its response.",
    "failed": "The operation has failed. The same request gets its response, and will not run again.",
    "interrupted": "The operation started, and nobody knows how far it got.",
}


def outcomes_blueprint(
    name: str = "idempotency",
    *,
    publish_policy: bool = True,
    decorators: Sequence[Callable[[Any], Any]] = (),
) -> Blueprint:
    """A blueprint, below ``/idempotency`` if it is not registered with another ``url_prefix``.

    ``GET <prefix>/<key>?operation=<name>`` (or ``GET <prefix>?operation=<name>`` with the key in its
    header) gives the outcome of an operation of the caller's scope. ``GET <prefix>/idempotency-policy``
    publishes header, retention, scope and every protected route; ``publish_policy=False`` leaves it
    out. ``decorators``, such as ``[login_required]``, wrap each page, the last one outermost.
    """
    if not isinstance(decorators, list | tuple) or not all(map(callable, decorators)):
        raise ConfigurationError(f"decorators={shown(decorators)}; allowed: a list of decorators")
    blueprint = Blueprint(name, __name__, url_prefix=f"/{name}")
    if publish_policy:
        policy_page = _decorated(idempotency_policy, decorators)
        blueprint.add_url_rule("/idempotency-policy", "idempotency_policy", policy_page)
    page = _decorated(outcome, decorators)
    blueprint.add_url_rule("", "outcome_by_header", page)
    blueprint.add_url_rule("/<path:key>", "outcome", page)
    return blueprint


def _decorated(view: Callable[..., Any], decorators: Sequence[Callable[[Any], Any]]) -> Any:
    for decorator in decorators:
        view = decorator(view)
    return view


def idempotency_policy() -> Response:
    """The rules, as JSON."""
    return jsonify(_policy(app_state(current_app)))


def outcome(key: str | None = None) -> Response:
    """The outcome of an operation, as JSON; a 404 problem if the operation is not known."""
    retry_after: int | None = None
    try:
        members, retry_after = _outcome(app_state(current_app), key)
        return jsonify(members)
    except Problem as problem:
        retry_after = problem.retry_after
        raise
    finally:
        after_this_request(lambda response: _mark(response, retry_after))


def _mark(response: Response, retry_after: int | None) -> Response:
    response.headers.setdefault("Cache-Control", "no-store")
    if retry_after is not None:
        response.headers.setdefault("Retry-After", str(retry_after))
    return response


def _outcome(state: AppState, key: str | None) -> tuple[dict[str, Any], int | None]:
    """The members of the response, and in how many seconds to ask again. Raises a :class:`Problem`."""
    key = _read_key(state, key)
    route = _route(state)
    operation = new_operation(state, route, current_scope(route.scope), key)
    state = state.of_bind(operation.bind_key)
    try:
        record = state.engine.look(operation.hashed_key())
    except StoreUnavailable as error:
        event = Event(operation.name, id=operation.id, error=error)
        tell_failure(state.app, event, *unavailable(error))
        raise
    how = situation(record)
    if record is None or how is Situation.EXPIRED:
        raise OutcomeUnknown
    operation.attempt = record.attempt
    if route.authorize_replay and not route.authorize_replay(operation):
        raise ReplayForbidden
    word = _word(how, record, route)
    members: dict[str, Any] = {"operation": route.name, "state": word, "attempt": record.attempt}
    members["detail"] = _says(word, route, record)
    if record.response is not None:
        members["answer"] = _pointers(record.response)
        if record.response.body is None:
            members["detail"] = ResponseNotKept().detail
    if word != "in_progress":
        return members, None
    guess = max(1, math.ceil(state.typical_seconds[route.name]))
    left = record.lease_left
    return members, guess if left is None or left <= 0 else min(guess, math.ceil(left))


def _read_key(state: AppState, key: str | None) -> str:
    settings = state.settings
    if key is not None:
        key = natural_key(key, settings.max_key_length)
    elif (value := request.headers.get(settings.header)) is not None:
        key = parse_key(value, settings.max_key_length)
    else:
        raise KeyRequired("Give the key as the last part of the path, or in its header.")
    return key.lower() if settings.profile.folds_case else key


def _route(state: AppState) -> Route:
    """The route of the operation that the query names, or of the only one there is."""
    routes = {found.route.name: found.route for found in reversed([*protected_routes(state)])}
    name = request.args.get("operation") or (next(iter(routes)) if len(routes) == 1 else None)
    if name in routes:
        return routes[name]
    current_scope(state.scope)  # an unauthenticated caller does not learn which operations exist
    if name is None:
        raise OutcomeUnknown("Say which operation it was: ?operation=<its name>.")
    raise OutcomeUnknown("There is no operation of this name.")


def _word(how: Situation, record: Record, route: Route) -> str:
    if how is Situation.COMPLETED:
        return "failed" if record.state is State.FAILED else "completed"
    if record.released is not None and resumes(record, route.on_interrupted, route.ttl):
        return "in_progress"
    return "interrupted" if how is Situation.INTERRUPTED else "in_progress"


def _says(word: str, route: Route, record: Record) -> str:
    if word != "interrupted":
        return _SAYS[word]
    is_spent = route.max_attempts is not None and record.begun >= route.max_attempts
    held = is_spent or not resumes(record, route.on_interrupted, route.ttl)
    return _SAYS[word] + (" An operator must decide." if held else " Send the same request again.")


def _pointers(stored: StoredResponse) -> dict[str, Any]:
    """The status, and the headers that say where the result is. Never the body."""
    members: dict[str, Any] = {"status": stored.status}
    for name, value in stored.headers or ():
        if name.lower() in POINTERS:
            member = name.lower().replace("-", "_")
            members[member] = f"{members[member]}, {value}" if member in members else value
    return members


def _policy(state: AppState) -> dict[str, Any]:
    """Build what draft-ietf-httpapi-idempotency-key-header, section 2, wants a server to publish.

    That is: whether a key is required, its syntax, how long it lives, what makes two requests the same,
    and which problems to expect.
    """
    settings, profile = state.settings, state.settings.profile
    return {
        "profile": profile.name,
        "header": {
            "name": settings.header,
            "syntax": key_syntax(settings.max_key_length, settings.min_key_length),
            "min_length": settings.min_key_length,
            "max_length": settings.max_key_length,
        },
        "form_field": settings.form_field,
        "replayed_header": {"name": settings.replayed_header, "value": "true"},
        "required": settings.required,
        "retention_seconds": _seconds(settings.ttl),
        "scope": _scope(state.scope),
        "problems": [
            {
                "status": profile.status_of(kind),
                **profile.named(kind, settings.problem_base),
                "title": kind.title,
            }
            for kind in PROBLEMS
        ],
        "operations": [_operation(each) for each in protected_routes(state) if each.route.enforce],
    }


def _operation(protected: ProtectedRoute) -> dict[str, Any]:
    route = protected.route
    return {
        "operation": route.name,
        "method": protected.method,
        "path": protected.rule,
        "required": route.required,
        "key": _plain(route.key),
        "fingerprint": _plain(route.fingerprint),
        "compared_without": [each.text for each in route.exclude],
        "retention_seconds": _seconds(route.ttl),
        "refuse_old_keys": route.refuse_old_keys,
        "scope": _scope(route.scope),
    }


def _plain(option: Any) -> str | list[str]:
    """Return the option ``key`` or ``fingerprint`` as it is published."""
    match option:
        case None:
            return "header"
        case tuple():
            return [each.text for each in option]
        case Pointer(text):
            return f"json:{text}"
        case Named():
            return option.text
        case str():
            return option
        case _:
            return "computed"


def _scope(scope_of: ScopeCallable | None) -> str:
    return "one tenant" if scope_of is None else "per account"


def _seconds(value: float) -> int | float:
    return int(value) if value.is_integer() else value
