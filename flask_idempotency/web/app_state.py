"""What the extension knows about one application: ``app.extensions["idempotency"]``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from flask import Blueprint, Flask, current_app
from flask.blueprints import BlueprintSetupState

from flask_idempotency.core.engine import DecisionEngine
from flask_idempotency.core.errors import ConfigurationError
from flask_idempotency.core.ports import Lock, Records, Sealer
from flask_idempotency.core.records import StoredResponse
from flask_idempotency.session.databases import Databases

from .purging import Purge
from .settings import Route, ScopeCallable, Settings


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
    """Everything the extension knows about one application."""

    scope: ScopeCallable | None
    settings: Settings
    lock: Lock
    engine: DecisionEngine
    sealer: Sealer
    protections: Protections
    own_records: Records  # the same, for what no request waits for: past the application's pool
    observed_records: Records  # the same, for requests that are only observed: briefly
    observer: DecisionEngine  # on these
    purge: Purge | None
    in_test: Callable[[Any], Records] | None  # the same in the transaction of a test's connection
    unobserved_until: float = 0.0  # by time.monotonic(), after a failure
    has_served: bool = False
    # By endpoint and method: the view, and the options that protect it. Of this process alone.
    known: dict[tuple[str, str], tuple[Any, Route | None]] = field(default_factory=dict)
    # How long each operation took here, by its name: what a duplicate is told to wait.
    last_seconds: dict[str, float] = field(default_factory=dict)
    tracing: Tracing | None = None
    mistakes: set[tuple[str, type]] = field(default_factory=set)  # those that were logged


_states: WeakSet[AppState] = WeakSet()


def states() -> list[AppState]:
    """The states of all applications of this process."""
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
