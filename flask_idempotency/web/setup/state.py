"""What the extension knows about one application: ``app.extensions["idempotency"]``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from flask import Blueprint, Flask, current_app
from flask.blueprints import BlueprintSetupState
from sqlalchemy import Engine

from flask_idempotency.core.engine import Engine as IdempotencyEngine
from flask_idempotency.core.errors import ConfigurationError, shown
from flask_idempotency.core.ports import Lock, Records, Sealer
from flask_idempotency.core.records import StoredResponse
from flask_idempotency.session.databases import Databases
from flask_idempotency.web.purge import Purge

from .options import Route, ScopeCallable
from .settings import Settings


@dataclass(eq=False)
class Protections:
    """The targets of ``protect`` and ``exempt``, for all applications of one extension."""

    routes: WeakKeyDictionary[Flask | Blueprint, Route] = field(default_factory=WeakKeyDictionary)
    exempt: WeakSet[Any] = field(default_factory=WeakSet)
    exempt_endpoints: set[str] = field(default_factory=set)
    _awaited: set[Blueprint] = field(default_factory=set)

    def await_registration(self, blueprint: Blueprint) -> None:
        """Keep a blueprint until it is registered, so that `check` can report one that never was."""
        self._awaited.add(blueprint)
        if self._registered not in blueprint.deferred_functions:
            blueprint.deferred_functions.append(self._registered)

    def _registered(self, setup: BlueprintSetupState) -> None:
        self._awaited.discard(setup.blueprint)

    def refuse_foreign(self) -> None:
        """Raise ``ConfigurationError`` before each request to an application without ``init_app``."""
        state = current_app.extensions.get("idempotency")
        if state is None or state.protections is not self:
            raise ConfigurationError(
                f"protect() was given the application {current_app.name}, on which this Idempotency was"
                " never set up: call init_app() for it"
            )


class Tracing(Protocol):
    """What the signals do not reach: ``integrations.opentelemetry`` provides it, if it is set up."""

    def sign(self, stored: StoredResponse) -> StoredResponse:
        """The response with a line that names the present trace."""

    def link(self, stored: StoredResponse) -> None:
        """Link the present trace to the one that a stored response names."""

    def step(
        self, operation: str, name: str, recorded: bytes | None, run: Callable[[], bytes]
    ) -> bytes:
        """The result of a step: what is ``recorded``, or else what ``run`` returns."""


@dataclass(eq=False, repr=False)
class AppState(Databases):
    """Everything the extension knows about one application, and one database of its records.

    ``binds`` has that of each such database, by its bind key; the first stands for the application.
    """

    scope: ScopeCallable | None
    settings: Settings
    lock: Lock
    engine: IdempotencyEngine
    sealer: Sealer
    protections: Protections
    own_records: Records  # the same, for threads of ours: past the pool of the application
    own_engine: Engine
    observed_records: Records  # the same, for requests that are only observed: briefly
    observer: IdempotencyEngine  # on these
    purge: Purge | None
    unobserved_until: float = 0.0  # by time.monotonic(), after a failure
    has_served: bool = False
    # By endpoint and method: the view, and the options that protect it. Of this process alone.
    known: dict[tuple[str, str], tuple[Any, Route | None]] = field(default_factory=dict)
    # How long each operation took here, by its name: what a duplicate is told to wait.
    last_seconds: dict[str, float] = field(default_factory=dict)
    tracing: Tracing | None = None
    binds: Mapping[str | None, AppState] = field(default_factory=dict)

    def hashed_bind(self) -> str | None:
        """Return what the hash of a key has of this database: nothing of the default one.

        So keys of two databases differ where what they are for meets again, as at a provider, and an
        application that grows further ones forgets none of those that it has.
        """
        is_usual = self.settings.binds is None or self.bind_key == self.sessions.usual
        return None if is_usual else self.bind_key

    def of_bind(self, bind_key: str | Callable[[], str | None] | None) -> AppState:
        """That of the database which ``bind_key`` means, or returns.

        Raises ``ConfigurationError`` if there are no records.
        """
        found = bind_key() if callable(bind_key) else bind_key
        key = self.sessions.usual if found is None else found
        if isinstance(key, str | None) and key in self.binds:
            return self.binds[key]
        what = "the callable bind_key returned" if callable(bind_key) else "bind_key is"
        raise ConfigurationError(
            f"{what} {shown(found)}; the databases with records are {', '.join(map(shown, self.binds))}"
            " (IDEMPOTENCY_BINDS)"
        )


def engine_on(
    state: AppState, records: Records, lock: Lock, kind: type[IdempotencyEngine] | None = None
) -> IdempotencyEngine:
    """An engine like an application's own on other ports, such as some that stand before its own."""
    make = kind or type(state.engine)
    return make(records, lock, state.sealer, time, state.engine.max_waiters)


_states: WeakSet[AppState] = WeakSet()


def states() -> list[AppState]:
    """The states of all applications of this process, the first of each."""
    return list(_states)


def set_state(app: Flask, state: AppState) -> None:
    """Make :func:`app_state` and :func:`states` return it."""
    app.extensions["idempotency"] = state
    _states.add(state)


def app_state(app: Flask) -> AppState:
    """The state of an application. Raises ``ConfigurationError`` if it has none."""
    state: AppState | None = app.extensions.get("idempotency")
    if state is None:
        raise ConfigurationError(
            "this application has no Idempotency: call idempotency.init_app(app, db, scope=...)"
        )
    return state


def one_state(app: Flask, what: str, how: str, bind_key: str | None = None) -> AppState:
    """The state of the one database that ``what`` works with.

    Raises ``ConfigurationError``, with ``how`` to choose one, if several have records.
    """
    state = app_state(app)
    if bind_key is not None:
        return state.of_bind(bind_key)
    if len(state.binds) > 1:
        raise ConfigurationError(
            f"{what} works with one database of records, and this application has"
            f" {', '.join(map(shown, state.binds))}: {how}"
        )
    return state
