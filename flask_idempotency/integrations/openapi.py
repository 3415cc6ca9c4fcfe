"""What an OpenAPI 3 document says about protected operations: the header, problems, replays.

:func:`add_idempotency` completes a finished document, whoever made it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from flask import Flask

from flask_idempotency.core.errors import PROBLEMS, ConfigurationError, OperationFailed, Retryable
from flask_idempotency.core.keys import KEY_SYNTAX, MAX_LENGTH
from flask_idempotency.core.records import REPLAYED, is_stored_by_default
from flask_idempotency.web.response import MEDIA_TYPE
from flask_idempotency.web.routes import AppState, app_state, protected_routes
from flask_idempotency.web.settings import REQUIRED, Route

PROBLEM = "IdempotencyProblem"
"""The name of the schema of problems among the document's components."""

_PROBLEM_SCHEMA = {
    "type": "object",
    "description": "A problem as in RFC 9457.",
    "properties": {
        "type": {"type": "string", "format": "uri-reference"},
        **{name: {"type": "string"} for name in ("title", "detail")},
        "status": {"type": "integer"},
    },
    "required": ["type", "title", "status", "detail"],
}

_NOT_ADDED = (401, 403)
_MAY_WAIT = (409, 503)


def add_idempotency(document: dict[str, Any], app: Flask, *, prefix: str = "") -> dict[str, Any]:
    """Complete an OpenAPI 3 document with the header, problems and replays of ``app``; return it.

    What the document already says stays. ``prefix`` is the part of the application's paths that the
    document has in its ``servers`` instead. May be called twice. Raises ``ConfigurationError`` for a
    document that is not OpenAPI 3.
    """
    if not str(document.get("openapi", "")).startswith("3."):
        raise ConfigurationError("add_idempotency() takes an OpenAPI 3 document, not an older one")
    state = app_state(app)
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).setdefault(PROBLEM, deepcopy(_PROBLEM_SCHEMA))
    for path, operations in document.get("paths", {}).items():
        _complete(state, prefix + path, operations, components)
    return document


def _complete(
    state: AppState, path: str, operations: Mapping[str, Any], shared: Mapping[str, Any]
) -> None:
    """Complete the protected ones among the operations below a path."""
    problem = {MEDIA_TYPE: _PROBLEM}
    for rule, method, route in protected_routes(state):
        operation = operations.get(method.lower())
        if operation is None or _shape(rule.rule) != _shape(path) or not route.enforce:
            continue
        if route.key is None:
            _add_parameter(operation.setdefault("parameters", []), state, route, shared)
        responses = operation.setdefault("responses", {})
        for code in filter(_is_stored, list(responses)):
            response = _own(responses, code, shared)
            if response is not None and response.get("content") != problem:
                response.setdefault("headers", {}).setdefault(REPLAYED, deepcopy(_REPLAYED))
        kinds = (*PROBLEMS, *(() if route.atomic else (OperationFailed, Retryable)))
        for status in sorted({kind.status for kind in kinds}.difference(_NOT_ADDED)):
            said = "; ".join(
                f"{kind.title} (`{state.settings.problem_base}{kind.type}`)"
                for kind in kinds
                if kind.status == status
            )
            _add_problems(responses, status, f"{said}.", shared)


def _add_parameter(
    parameters: list[Any], state: AppState, route: Route, shared: Mapping[str, Any]
) -> None:
    settings = state.settings
    resolved = [_resolved(each, shared.get("parameters", {})) or {} for each in parameters]
    said = {each["name"].lower() for each in resolved if each.get("in") == "header"}
    if settings.header.lower() in said:
        return
    added = {"name": settings.header, "in": "header", "required": route.required}
    described = f"New for each operation, the same for each retry. {KEY_SYNTAX}."
    if route.refuse_old_keys:
        kind = "It must be" if route.refuse_old_keys == REQUIRED else "It may be"
        old = f"one made more than {route.ttl:g} seconds ago, of which nothing is known,"
        described += f" {kind} a UUID of version 7: {old} gets 409 `key-expired`."
    parameters.append({**added, "description": described, "schema": deepcopy(_KEY_SCHEMA)})


def _add_problems(responses: dict[Any, Any], status: int, said: str, shared: Mapping[str, Any]) -> None:
    """Add problems of this status beside what the view responds."""
    code = next((code for code in responses if str(code) == str(status)), str(status))
    responses.setdefault(code, {"description": said})
    response = _own(responses, code, shared)
    if response is None:
        return
    response.setdefault("content", {}).setdefault(MEDIA_TYPE, deepcopy(_PROBLEM))
    if status in _MAY_WAIT:
        response.setdefault("headers", {}).setdefault("Retry-After", deepcopy(_RETRY_AFTER))


_TIMES = f"{{1,{MAX_LENGTH}}}"
_KEY_SCHEMA = {
    "type": "string",
    "minLength": 1,
    "maxLength": 2 * MAX_LENGTH + 2,
    "pattern": rf'^([!#-+\--:<-\[\]-~]{_TIMES}|"([ !#-\[\]-~]|\\["\\]){_TIMES}")$',
}
"""How the header's value must look as it is sent: bare, or quoted and escaped."""

_PROBLEM = {"schema": {"$ref": f"#/components/schemas/{PROBLEM}"}}
_REPLAYED = {
    "description": "Present if the response is a replay.",
    "schema": {"type": "string", "enum": ["true"]},
}
_RETRY_AFTER = {
    "description": "Seconds after which a retry with the same key makes sense.",
    "schema": {"type": "integer", "minimum": 1},
}


def _own(responses: dict[Any, Any], code: Any, shared: Mapping[str, Any]) -> dict[str, Any] | None:
    """A response that is the operation's own: a copy of a shared one. None if it is not known."""
    response = _resolved(responses[code], shared.get("responses", {}))
    if response is not None and response is not responses[code]:
        responses[code] = response = deepcopy(response)
    return response


def _resolved(part: Any, shared: Mapping[str, Any]) -> dict[str, Any] | None:
    """The target of a reference, or the part itself; None if unknown."""
    name = part.get("$ref")
    found = part if name is None else shared.get(str(name).rpartition("/")[2])
    return found if isinstance(found, dict) and "$ref" not in found else None


def _is_stored(code: Any) -> bool:
    text = str(code)  # YAML gives numbers
    return text in {"2XX", "3XX"} or (text.isdecimal() and is_stored_by_default(int(text)))


def _shape(path: str) -> str:
    """A path or URL rule without the names of its variables."""
    return re.sub(r"<[^<>]*>|\{[^{}]*\}", "{}", path)
