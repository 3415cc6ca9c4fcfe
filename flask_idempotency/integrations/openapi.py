"""What an OpenAPI 3 document says about protected operations: the header, problems, replays.

:func:`add_idempotency` completes a finished document, whoever made it;
``flask_idempotency.integrations.apispec`` does the same while apispec makes one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from flask import Flask

from flask_idempotency.core.errors import PROBLEMS, ConfigurationError
from flask_idempotency.core.keys import key_syntax
from flask_idempotency.core.storable import is_stored_by_default
from flask_idempotency.web.request.body import FIRST_SENT
from flask_idempotency.web.setup.options import REQUIRED, Route
from flask_idempotency.web.setup.routes import protected_routes
from flask_idempotency.web.setup.state import AppState, app_state

PROBLEM = "IdempotencyProblem"
"""The name of the schema of problems among the document's components."""

PROBLEM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "A problem as in RFC 9457.",
    "properties": {
        "type": {"type": "string", "format": "uri-reference"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
    },
    "required": ["type", "title", "status", "detail"],
}

_ADDED = (400, 409, 422, 503)
_MAY_WAIT = (409, 503)

Shared = Mapping[str, Mapping[str, Any]]
"""The components that operations may refer to by name: ``responses`` and ``parameters``."""


def add_idempotency(document: dict[str, Any], app: Flask, *, prefix: str = "") -> dict[str, Any]:
    """Complete an OpenAPI 3 document with what ``app`` protects; returns the same document.

    Every operation of a protected route gets the header parameter (if its key comes in the header),
    the problem responses 400, 409, 422 and 503, and the replay header on responses that are stored.
    What the document already says stays. ``prefix`` is the part of the application's paths that the
    document has in its ``servers`` instead. May be called twice.

    Raises ``ConfigurationError`` for a document that is not OpenAPI 3.
    """
    if not str(document.get("openapi", "")).startswith("3."):
        raise ConfigurationError("add_idempotency() takes an OpenAPI 3 document, not an older one")
    state = app_state(app)
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).setdefault(PROBLEM, deepcopy(PROBLEM_SCHEMA))
    for path, operations in document.get("paths", {}).items():
        complete(state, prefix + path, operations, components)
    return document


def complete(state: AppState, path: str, operations: Mapping[str, Any], shared: Shared) -> None:
    """Complete the protected ones among the operations below a path."""
    for protected in protected_routes(state):
        operation = operations.get(protected.method.lower())
        if operation is None or _shape(protected.rule) != _shape(path) or not protected.route.enforce:
            continue
        if protected.route.key is None:
            _add_parameter(operation.setdefault("parameters", []), state, protected.route, shared)
        responses = operation.setdefault("responses", {})
        for code in list(responses):
            response = _own(responses, code, shared) if _is_stored(code) else None
            if response is not None and response.get("content") != _PROBLEM_CONTENT:
                headers = response.setdefault("headers", {})
                headers.setdefault(state.settings.replayed_header, deepcopy(_REPLAYED))
        if state.settings.www_authenticate is not None:
            _add_challenge(responses, shared)
        for status in _ADDED:
            _add_problems(responses, status, state, shared)


def _add_parameter(parameters: list[Any], state: AppState, route: Route, shared: Shared) -> None:
    settings = state.settings
    for parameter in parameters:
        known = _resolved(parameter, shared.get("parameters", {})) or {}
        if known.get("in") == "header" and known["name"].lower() == settings.header.lower():
            return
    added = {"name": settings.header, "in": "header", "required": route.required}
    shortest, longest = settings.min_key_length, settings.max_key_length
    said = f"New for each operation, the same for each retry. {key_syntax(longest, shortest)}."
    said += _AGES[route.refuse_old_keys].format(route.ttl)
    parameters.append({**added, "description": said, "schema": _key_schema(shortest, longest)})


def _key_schema(shortest: int, longest: int) -> dict[str, Any]:
    """How the header's value must look as it is sent: bare, or quoted and escaped."""
    times = f"{{{shortest},{longest}}}"
    bare, quoted = rf"[!#-+\--:<-\[\]-~]{times}", rf'"([ !#-\[\]-~]|\\["\\]){times}"'
    return {
        "type": "string",
        "minLength": shortest,
        "maxLength": 2 * longest + 2,
        "pattern": f"^({bare}|{quoted})$",
    }


def _add_problems(responses: dict[Any, Any], status: int, state: AppState, shared: Shared) -> None:
    """The response of this status, with our problems beside what the view responds."""
    code = next((code for code in responses if _code(code) == str(status)), str(status))
    kinds = [kind for kind in PROBLEMS if kind.status == status]
    said = "; ".join(f"{kind.title} (`{state.settings.problem_base}{kind.type}`)" for kind in kinds)
    responses.setdefault(code, {"description": f"{said}."})
    response = _own(responses, code, shared)
    if response is None:
        return
    for media_type, content in deepcopy(_PROBLEM_CONTENT).items():
        response.setdefault("content", {}).setdefault(media_type, content)
    if status in _MAY_WAIT:
        response.setdefault("headers", {}).setdefault("Retry-After", deepcopy(_RETRY_AFTER))


def _add_challenge(responses: dict[Any, Any], shared: Shared) -> None:
    """The header of the response 401, if the document has one."""
    code = next((code for code in responses if _code(code) == "401"), None)
    if code is not None and (response := _own(responses, code, shared)) is not None:
        response.setdefault("headers", {}).setdefault("WWW-Authenticate", deepcopy(_CHALLENGE))


_OLD = " A key made more than {:g} seconds ago, of which nothing is known, gets 409 `key-expired`."
_AGES = {
    False: "",
    True: _OLD,
    REQUIRED: f"{_OLD} It must say when it was made: as a UUID of version 7, or with the header"
    f" {FIRST_SENT}.",
}
"""What is said of old keys, by the option ``refuse_old_keys``."""

_PROBLEM_CONTENT = {"application/problem+json": {"schema": {"$ref": f"#/components/schemas/{PROBLEM}"}}}
_REPLAYED = {
    "description": "Present if the response is a replay.",
    "schema": {"type": "string", "enum": ["true"]},
}
_CHALLENGE = {"description": "How to sign in.", "schema": {"type": "string"}}
_RETRY_AFTER = {
    "description": "Seconds after which a retry with the same key makes sense.",
    "schema": {"type": "integer", "minimum": 1},
}


def _own(responses: dict[Any, Any], code: Any, shared: Shared) -> dict[str, Any] | None:
    """A response that is the operation's own: a copy of a shared one. None if it is not known."""
    response = _resolved(responses[code], shared.get("responses", {}))
    if response is not None and response is not responses[code]:
        responses[code] = response = deepcopy(response)
    return response


def _resolved(part: Any, shared: Mapping[str, Any]) -> dict[str, Any] | None:
    """The target of a reference (for apispec, a name is one), or the part itself; None if unknown."""
    name = part.get("$ref") if isinstance(part, dict) else part
    found = part if name is None else shared.get(str(name).rpartition("/")[2])
    return found if isinstance(found, dict) and "$ref" not in found else None


def _is_stored(code: Any) -> bool:
    text = _code(code)
    return text in {"2XX", "3XX"} or (text.isdecimal() and is_stored_by_default(int(text)))


def _code(code: Any) -> str:
    """A status code as text, whether it is text, a number or an ``HTTPStatus``."""
    return str(int(code)) if isinstance(code, int) else str(code)


def _shape(path: str) -> str:
    """A path or URL rule without the names of its variables."""
    return re.sub(r"<[^<>]*>|\{[^{}]*\}", "{}", path)
