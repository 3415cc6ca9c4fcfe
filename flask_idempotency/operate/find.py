"""From what an operator knows of operations to their records."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from uuid import UUID

from flask_idempotency.core.errors import KeyMalformed, UnknownRecord
from flask_idempotency.core.keys import Scope, hash_key, observed_namespace, parse_key, scope_tail
from flask_idempotency.core.records import State
from flask_idempotency.stores.admin import Line
from flask_idempotency.stores.sql_admin import SqlAdmin
from flask_idempotency.web.routes import AppState, protected_routes
from flask_idempotency.web.settings import NAMES, is_name

STATES = (*(state.value for state in State), "interrupted", "released", "observed")


def admin(state: AppState) -> SqlAdmin:
    """Return the operator's side of the application's store: that of Redis has the same methods."""
    return state.records.admin()  # type: ignore[no-any-return]


def find(state: AppState, digits: str) -> Line:
    """Return the record whose key's hash begins with these 8 or 16 digits, as an operator typed them.

    Raises ``UnknownRecord`` if they are none, or if there is no such record, or more than one.
    """
    if not re.fullmatch("[0-9a-f]{8}|[0-9a-f]{16}", digits.lower(), re.ASCII):
        raise UnknownRecord(  # not repeated: it may be a client's key
            "DIGITS are the 8 digits, 0 to 9 and a to f, that `flask idempotency list` shows, not the"
            " client's key; to find the digits of a key, run"
            " `flask idempotency list --key KEY --operation NAME --scope SCOPE`"
        )
    found = admin(state).lines(2, start=bytes.fromhex(digits))
    if len(found) != 1:
        text = f"there is {'more than one' if found else 'no'} record whose digits are {digits.lower()}"
        longer = ": give all 16 digits, such as " + " or ".join(sorted(line.key for line in found))
        raise UnknownRecord(text + (longer if found else ""))
    return found[0]


@dataclass(frozen=True, slots=True)
class Sought:
    """What a client sent, whose it is, and the name of its operation: whatever is known of these.

    A key may have been copied from its header with the quotes. A scope may be a ``str``, an ``int`` or
    a ``UUID``, or say which of these: ``int:7``. Where no namespace is given, it is the application's
    or that of the operation's route. What was only observed is found, too. Raises ``UnknownRecord``
    for an operation that none can be.
    """

    operation: str | None = None
    key: str | None = None
    scope: str | None = None
    namespace: str | None = None

    def __post_init__(self) -> None:
        if self.operation is not None and not is_name(self.operation):
            raise UnknownRecord(f"no operation is named so: a name is {NAMES}")

    def lines(self, state: AppState, in_state: str | None, limit: int) -> list[Line]:
        """Return the ``limit`` newest records, the newest first: of a key, of a scope, or of all.

        Raises ``UnknownRecord`` for a key without its operation, and for a namespace without a key.
        """
        store = admin(state)
        if self.key is not None and self.operation is not None:
            found = [line for line in self.by_key(state).values() if in_state in (None, line.state)]
        elif self.key is not None or self.namespace is not None:
            raise UnknownRecord("a record is found by its key and operation, with their scope")
        else:
            tails = [b""] if self.scope is None else map(scope_tail, _scopes(self.scope))
            lines = partial(store.lines, limit, name=self.operation, state=in_state)
            found = [line for tail in tails for line in lines(tail=tail)]
        return sorted(found, key=lambda line: str(line.created), reverse=True)[:limit]

    def by_key(self, state: AppState) -> dict[bytes, Line]:
        """Return the records of all that the key may stand for, by its hash: mostly one, or none."""
        store, name = admin(state), self.operation or ""
        routes = [route for *_, route in protected_routes(state) if route.name == name]
        places = {state.settings.namespace, *(route.namespace for route in routes)}
        hashes = [
            hash_key(place, name, whose, text)
            for named in sorted(places if self.namespace is None else {self.namespace})
            for place in (named, observed_namespace(named))
            for whose in _scopes(self.scope)
            for text in _keys(self.key or "")
        ]
        return {each: line for each in hashes for line in store.lines(1, start=each)}

    def refuse_two_scopes(self, state: AppState) -> None:
        """Raise ``UnknownRecord`` if there are records of two scopes that are written so: 1 and "1"."""
        typed = [f"{type(scope).__name__}:{scope}" for scope in _scopes(self.scope)]
        found = [text for text in typed if replace(self, scope=text).lines(state, None, 1)]
        if len(found) > 1:
            raise UnknownRecord("these are two scopes: give --scope " + " or --scope ".join(found))

    def nothing_found(self, state: AppState) -> str:
        """Return the sentence for no record at all, with what may be wrong; it repeats no key."""
        if self.key is None and self.scope is None:
            return "no records"
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
    return sorted({route.name for *_, route in protected_routes(state)})


def _scopes(text: str | None) -> list[Scope]:
    if text is None:
        return [None]
    scopes: list[Scope] = [text]
    kinds: tuple[Callable[[str], Scope], ...] = (str, int, UUID)
    for kind in kinds:
        written = text.removeprefix(f"{kind.__name__}:")
        with suppress(ValueError):
            scope = kind(written)
            # Python also reads 0_7, and digits of other scripts, as 7.
            if scope not in scopes and str(scope) in (written, written.lower()):
                scopes.append(scope)
    return scopes


def _keys(text: str) -> set[str]:
    try:
        return {text, parse_key(text)}
    except KeyMalformed:
        return {text}
