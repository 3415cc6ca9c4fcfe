"""From what an operator knows of an operation to the hash that its record is found by."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from uuid import UUID

from flask_idempotency.core.errors import KeyMalformed, UnknownRecord
from flask_idempotency.core.keys import Scope, hash_key, observed_namespace, parse_key, scope_tail
from flask_idempotency.stores.admin import Admin, Line
from flask_idempotency.web.setup.options import NAMES, is_name
from flask_idempotency.web.setup.routes import protected_routes
from flask_idempotency.web.setup.state import AppState

from .group import require


def possible_hashes(
    state: AppState, key: str, operation: str, scope: str | None, namespace: str | None
) -> list[bytes]:
    """The hashes of all that these texts may stand for.

    A key may have been copied from its header with the quotes. A scope may be a ``str``, an ``int`` or
    a ``UUID``. Where no namespace is given, it is the application's or that of the operation's route.
    What was only observed is found, too.
    """
    return [
        hash_key(place, operation, whose, text, state.hashed_bind())
        for named in sorted(_namespaces(state, operation) if namespace is None else {namespace})
        for place in (named, observed_namespace(named))
        for whose in _scopes(scope)
        for text in _keys(
            key.lower() if state.settings.profile.folds_case else key, state.settings.max_key_length
        )
    ]


def find_by_key(
    state: AppState, store: Admin, key: str, operation: str, scope: str | None, namespace: str | None
) -> dict[bytes, Line]:
    """The records of :func:`possible_hashes`, each by its own: mostly one, or none."""
    hashes = possible_hashes(state, key, operation, scope, namespace)
    return {each: line for each in hashes for line in store.starting(each)}


def scope_tails(text: str) -> list[bytes]:
    """How the hashes of all scopes end that this text may stand for."""
    return [scope_tail(scope) for scope in _scopes(text)]


def find_of_scope(
    store: Admin, scope: str, operation: str | None, state: str | None, limit: int
) -> list[Line]:
    """The newest records of a scope, of all that :func:`scope_tails` finds."""
    require(store, "of_scope")
    tails = scope_tails(scope)
    found = [line for tail in tails for line in store.of_scope(tail, operation, state, limit)]
    return sorted(found, key=lambda line: str(line.created), reverse=True)[:limit]


def operation_name(text: str | None) -> str | None:
    """The name of an operation as an operator gave it. Raises ``UnknownRecord`` for what names none."""
    if text is not None and not is_name(text):
        raise UnknownRecord(f"no operation is named so: a name is {NAMES}")
    return text


def nothing_found(state: AppState, key: str | None, operation: str | None, scope: str | None) -> str:
    """The sentence for no record at all, with what may be wrong in the options."""
    text = "no record of this scope"
    if key is not None:
        text = "no record of this key, operation, scope and namespace"
        if scope is None and state.scope is not None:
            text += "; this application has scopes: give --scope"
    if operation and operation not in {found.route.name for found in protected_routes(state)}:
        text += f"; no protected route is named {operation!r}: `flask idempotency stats` lists names"
    return text


def _namespaces(state: AppState, operation: str) -> set[str]:
    routes = [found.route for found in protected_routes(state) if found.route.name == operation]
    return {state.settings.namespace, *(route.namespace for route in routes)}


def _scopes(text: str | None) -> list[Scope]:
    if text is None:
        return [None]
    scopes: list[Scope] = [text]
    kinds: tuple[Callable[[str], Scope], ...] = (int, UUID)
    for kind in kinds:
        with suppress(ValueError):
            scope = kind(text)
            if str(scope) == text.lower():  # Python also reads 0_7, and digits of other scripts, as 7
                scopes.append(scope)
    return scopes


def _keys(text: str, longest: int) -> set[str]:
    try:
        return {text, parse_key(text, longest)}
    except KeyMalformed:
        return {text}
