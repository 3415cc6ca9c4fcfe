"""What a server has to publish about its idempotency keys, from its code and settings.

The draft (draft-ietf-httpapi-idempotency-key-header, section 2, Responsibilities of the resource) wants
clients to be able to find out: whether a key is required, how it must look, how long it lives, what
makes two requests the same, and which answers to expect.
"""

from __future__ import annotations

from typing import Any

from flask_idempotency.core.errors import (
    BodyIncomplete,
    BodyMalformed,
    KeyMalformed,
    KeyRequired,
    KeyReused,
    OperationInterrupted,
    Problem,
    ReplayForbidden,
    RequestInProgress,
    ResponseNotKept,
    ScopeUnknown,
    StoreUnavailable,
    TransactionConflict,
)
from flask_idempotency.core.fingerprint import Pointer
from flask_idempotency.web.setup.options import FormField, Route
from flask_idempotency.web.setup.routes import ProtectedRoute, protected_routes
from flask_idempotency.web.setup.state import AppState

PROBLEMS: tuple[type[Problem], ...] = (
    KeyRequired,
    KeyMalformed,
    BodyIncomplete,
    BodyMalformed,
    ScopeUnknown,
    ReplayForbidden,
    RequestInProgress,
    OperationInterrupted,
    ResponseNotKept,
    KeyReused,
    StoreUnavailable,
    TransactionConflict,
)
"""What a client may meet, by rising status."""


def policy(state: AppState) -> dict[str, Any]:
    """The rules of an application, as JSON. Names of options and settings are the library's own."""
    settings = state.settings
    return {
        "header": {
            "name": settings.header,
            "syntax": key_syntax(state),
            "min_length": settings.min_key_length,
            "max_length": settings.max_key_length,
        },
        "form_field": settings.form_field,
        "replayed_header": {"name": settings.replayed_header, "value": "true"},
        "required": settings.required,
        "retention_seconds": _seconds(settings.ttl),
        "scope": _scope(state, Route()),
        "problems": [
            {"status": kind.status, "type": settings.problem_base + kind.type, "title": kind.title}
            for kind in PROBLEMS
        ],
        "operations": [_operation(state, protected) for protected in protected_routes(state)],
    }


def key_syntax(state: AppState) -> str:
    """How a key must look, in words."""
    settings = state.settings
    return (
        f"{settings.min_key_length} to {settings.max_key_length} characters: printable ASCII in double"
        " quotes (a string of RFC 8941), or without quotes visible ASCII except comma, semicolon,"
        " double quote and backslash"
    )


def key_schema(state: AppState) -> dict[str, Any]:
    """The same as a JSON schema, of the header's value as it is sent: bare, or quoted and escaped."""
    shortest, longest = state.settings.min_key_length, state.settings.max_key_length
    times = f"{{{shortest},{longest}}}"
    bare, quoted = rf"[!#-+\--:<-\[\]-~]{times}", rf'"([ !#-\[\]-~]|\\["\\]){times}"'
    return {
        "type": "string",
        "minLength": shortest,
        "maxLength": 2 * longest + 2,
        "pattern": f"^({bare}|{quoted})$",
    }


def _operation(state: AppState, protected: ProtectedRoute) -> dict[str, Any]:
    route, settings = protected.route, state.settings
    return {
        "operation": protected.operation,
        "method": protected.method,
        "path": protected.rule,
        "required": route.is_required(settings),
        "key": _key(route),
        "fingerprint": _fingerprint(route),
        "retention_seconds": _seconds(settings.ttl if route.ttl is None else route.ttl),
        "scope": _scope(state, route),
    }


def _key(route: Route) -> str:
    match route.key:
        case None:
            return "header"
        case Pointer(text):
            return f"json:{text}"
        case FormField(name):
            return f"form:{name}"
        case _:
            return "computed"


def _fingerprint(route: Route) -> str | list[str]:
    if callable(route.fingerprint):
        return "computed"
    if isinstance(route.fingerprint, str):
        return route.fingerprint
    return [pointer.text for pointer in route.fingerprint]


def _scope(state: AppState, route: Route) -> str:
    scope = route.scope if route.has_scope else state.scope
    return "one tenant" if scope is None else "per account"


def _seconds(value: float) -> int | float:
    return int(value) if value.is_integer() else value
