"""From what an operator knows of operations to their records."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from uuid import UUID

from flask_idempotency.core.errors import KeyMalformed, UnknownRecord
from flask_idempotency.core.keys import Scope, hash_key, observed_namespace, parse_key, scope_tail
from flask_idempotency.core.records import State
from flask_idempotency.stores.admin import Admin, Line, Overview
from flask_idempotency.web.routes import AppState, protected_routes
from flask_idempotency.web.settings import NAMES, is_name

STATES = (*(state.value for state in State), "interrupted", "released", "observed")

DIGITS = re.compile("[0-9a-f]{8}|[0-9a-f]{16}", re.ASCII | re.IGNORECASE)
"""The first digits of a key's hash, which stand for a record."""


def admin(state: AppState) -> Admin:
    """Return the operator's side of the application's store."""
    store: Admin = state.records.admin()
    return store


def overview_of(state: AppState) -> Callable[[], Overview]:
    """Return what asks for an overview on connections of our own."""
    own: Admin = state.own_records.admin()
    return own.overview


def find(store: Admin, digits: str) -> Line:
    """Return the record whose key's hash begins with ``digits``.

    Raises ``UnknownRecord`` if there is none, or more than one.
    """
    found = store.starting(bytes.fromhex(digits))
    if len(found) != 1:
        text = f"there is {'more than one' if found else 'no'} record whose digits are {digits}"
        longer = ": give all 16 digits, such as " + " or ".join(sorted(line.key for line in found))
        raise UnknownRecord(text + (longer if found else ""))
    return found[0]


@dataclass(frozen=True, slots=True)
class Sought:
    """What a client sent, whose it is, and the name of its operation: whatever is known of these.

    A key may have been copied from its header with the quotes. A scope may be a ``str``, an ``int`` or
    a ``UUID``. Where no namespace is given, it is the application's or that of the operation's route.
    What was only observed is found, too.
    """

    operation: str | None = None
    key: str | None = None
    scope: str | None = None
    namespace: str | None = None

    def lines(self, state: AppState, in_state: str | None, limit: int) -> list[Line] | None:
        """Return the records, the newest first: those of a key, or the newest of a scope.

        None if it says too little of a key, and nothing else.
        """
        store = admin(state)
        if self.key is not None and self.operation is not None:
            found = [line for line in self.by_key(state).values() if in_state in (None, line.state)]
            limit = len(found)
        elif self.key is not None or self.namespace is not None or self.scope is None:
            return None
        else:
            tails = scope_tails(self.scope)
            each = (store.of_scope(tail, self.operation, in_state, limit) for tail in tails)
            found = [line for lines in each for line in lines]
        return sorted(found, key=lambda line: str(line.created), reverse=True)[:limit]

    def by_key(self, state: AppState) -> dict[bytes, Line]:
        """Return the records of all that the key may stand for, by its hash: mostly one, or none."""
        store = admin(state)
        return {each: line for each in self._hashes(state) for line in store.starting(each)}

    def _hashes(self, state: AppState) -> list[bytes]:
        key, name = self.key or "", self.operation or ""
        routes = [found.route for found in protected_routes(state) if found.route.name == name]
        places = {state.settings.namespace, *(route.namespace for route in routes)}
        return [
            hash_key(place, name, whose, text)
            for named in sorted(places if self.namespace is None else {self.namespace})
            for place in (named, observed_namespace(named))
            for whose in _scopes(self.scope)
            for text in _keys(key)
        ]

    def nothing_found(self, state: AppState) -> str:
        """Return the sentence for no record at all, with what may be wrong in the options."""
        text = "no record of this scope"
        if self.key is not None:
            text = "no record of this key, operation, scope and namespace"
            if self.scope is None and state.scope is not None:
                text += "; this application has scopes: give --scope"
        if self.operation and self.operation not in operations(state):
            names = ", ".join(operations(state)) or "none"
            text += f"; no protected route is named {self.operation!r}: there are {names}"
        return text


def operations(state: AppState) -> list[str]:
    """Return the names of the protected routes' operations."""
    return sorted({found.route.name for found in protected_routes(state)})


def operation_name(text: str | None) -> str | None:
    """Return an operation's name as an operator gave it. Raises ``UnknownRecord`` for what is none."""
    if text is not None and not is_name(text):
        raise UnknownRecord(f"no operation is named so: a name is {NAMES}")
    return text


def scope_tails(text: str) -> list[bytes]:
    """Return how the hashes of all scopes end that this text may stand for."""
    return [scope_tail(scope) for scope in _scopes(text)]


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


def _keys(text: str) -> set[str]:
    try:
        return {text, parse_key(text)}
    except KeyMalformed:
        return {text}
