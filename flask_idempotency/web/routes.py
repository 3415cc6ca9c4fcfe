"""What the extension knows about one application, and which of its views are protected, with what.

``app.extensions["idempotency"]`` is the :class:`AppState`. What contradicts itself is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import FunctionType
from typing import Any
from weakref import WeakSet

from flask import Flask, views
from werkzeug.routing import Rule

from flask_idempotency.core.engine import DecisionEngine
from flask_idempotency.core.errors import ConfigurationError
from flask_idempotency.core.ports import Lock, Records
from flask_idempotency.core.records import Sealer
from flask_idempotency.session.databases import Databases

from .purging import Purge
from .settings import NAMES, NOT_GIVEN, Route, ScopeCallable, Settings, is_name

ROUTE = "__idempotency_route__"
"""The attribute of what is protected, which has the options: a view, a blueprint, an application. None
leaves a view or a blueprint out of ``protect``."""

states: WeakSet[AppState] = WeakSet()
"""Those of all applications of this process."""


@dataclass(eq=False, repr=False)
class AppState(Databases):
    """Everything the extension knows about one application."""

    scope: ScopeCallable | None
    settings: Settings
    exempt_endpoints: set[str]  # of all applications of one extension
    lock: Lock
    sealer: Sealer
    engine: DecisionEngine
    in_test: Callable[[Any], Any] | None  # makes records in a test's transaction
    unobserved_until: float = 0.0  # by time.monotonic(), after a failure
    # By endpoint and method: the view, and the options that protect it. Of this process alone.
    known: dict[tuple[str, str], tuple[Any, Route | None]] = field(default_factory=dict)
    tracing: Any = None  # integrations.opentelemetry.Tracing, if that is set up
    mistakes: set[tuple[str, type]] = field(default_factory=set)  # those that were logged

    def __post_init__(self) -> None:
        """Add what follows from the rest."""
        states.add(self)
        self.header = "HTTP_" + self.settings.header.upper().replace("-", "_")  # as WSGI names it
        self.observer = self._engine(self.records.briefly())  # for requests that are only observed
        purges = self.settings.purge and self.records.atomic  # Redis forgets by itself
        self.purge = Purge(self.records) if purges else None
        # Whether the database's encoding has all characters of a name: asked once for each.
        self.can_hold = lru_cache(self.records.can_hold)

    def of_test(self) -> DecisionEngine | None:
        """The engine for a test whose connection, in a transaction, ``db.session`` works on."""
        if self.in_test is None or (connection := self.connection_of_test()) is None:
            return None
        return self._engine(self.in_test(connection))

    def _engine(self, records: Records) -> DecisionEngine:
        return DecisionEngine(records, Lock(), self.sealer, time)


def app_state(app: Flask) -> AppState:
    """The state of an application. Raises ``ConfigurationError`` if it has none."""
    state: AppState | None = app.extensions.get("idempotency")
    if state is None:
        raise ConfigurationError(
            "this application has no Idempotency: call idempotency.init_app(app, db, scope=...)"
        )
    return state


def resolved(state: AppState, route: Route, endpoint: str = "") -> Route:
    """The options of a route for one endpoint, with nothing left open."""
    defaults = {**vars(state.settings), "scope": state.scope, "name": endpoint}
    left_open = {name: defaults[name] for name, value in vars(route).items() if value is NOT_GIVEN}
    return replace(route, **left_open, given=route)


def protected_routes(state: AppState) -> Iterator[tuple[Rule, str, Route]]:
    """Every method of a URL rule that is protected, in the order of the URL map, with its options."""
    for rule in state.app.url_map.iter_rules():
        for method in sorted(rule.methods or ()):
            if (route := route_of(state, rule.endpoint, method)) is not None:
                yield rule, method, resolved(state, route, rule.endpoint)


def route_of(state: AppState, endpoint: str, method: str) -> Route | None:
    """The options that this method of an endpoint is protected with, or None.

    Those of the view itself, or else of the nearest ``protect`` that covers it: a blueprint comes
    before the one around it, and that before the application.
    """
    view, name, covering = state.app.view_functions.get(endpoint), endpoint, None
    own = [getattr(each, ROUTE) for each in parts(view, method) if hasattr(each, ROUTE)]
    if view is None or own or endpoint in state.exempt_endpoints:
        return next((route for route in own if route and route.applies_to(method)), None)
    while name := name.rpartition(".")[0]:
        if hasattr(blueprint := state.app.blueprints.get(name), ROUTE):
            covering = getattr(blueprint, ROUTE)
            break
    else:
        covering = getattr(state.app, ROUTE, None)
    return covering if covering and covering.applies_to(method) else None


# What is refused, in the first request and by ``flask idempotency check``.


def supported(state: AppState, route: Route) -> Route:
    """The route, which is resolved. Raises ``ConfigurationError`` for what the store cannot hold."""
    if not is_name(route.name):
        raise ConfigurationError(
            f"the endpoint {route.name[:40]}... cannot name its operation: give that a name=...,"
            f" which is {NAMES}"
        )
    if route.atomic and not state.records.atomic:
        raise ConfigurationError(
            f"{route.name} is atomic, which the store {state.settings.store!r} cannot be: use"
            " @idempotent(atomic=False), and read what that means, or another store"
        )
    return route


_decorated: WeakSet[FunctionType] = WeakSet()


def note_decorated(view: Any) -> None:
    """Remember that ``@idempotent`` stands above a view, for :func:`refuse_misplaced`."""
    _decorated.update(each for each in parts(view) if isinstance(each, FunctionType))


def refuse_misplaced(state: AppState, endpoint: str) -> None:
    """Raise ``ConfigurationError`` for an endpoint whose ``@idempotent`` stands above its route.

    Then the plain view is registered, and the protected one is not. (If the protected one is registered
    too, the other is plain on purpose.)
    """
    view: Any = state.app.view_functions[endpoint]
    if getattr(view, ROUTE, None):  # around it by protect()
        view = view.__wrapped__
    if not isinstance(view, FunctionType) or view not in _decorated or hasattr(view, ROUTE):
        return
    for other in list(states):
        for registered in list(other.app.view_functions.values()):
            inner = list(parts(registered, *views.http_method_funcs))
            routes = (getattr(each, ROUTE, None) for each in inner)
            if view in inner and any(route and not route.methods for route in routes):
                return
    raise ConfigurationError(
        f"{name_of(view)}, the view of the endpoint {endpoint!r}, is not protected by its @idempotent:"
        " that stands above the decorator that registers it. Put @idempotent below the route"
    )


def parts(view: Any, *methods: str) -> Iterator[Any]:
    """The view, of a class-based one its class and these methods, and what decorators are around.

    Those that use ``functools.wraps``, and those that Flask-RESTful and Flask-RESTX put around a method
    when it is called.
    """
    found, view_class = [view], getattr(view, "view_class", None)
    if view_class is not None:
        names = ("dispatch_request", *map(str.lower, methods))
        decorators = getattr(view_class, "method_decorators", ())
        if isinstance(decorators, Mapping):
            decorators = [each for name in names for each in decorators.get(name, ())]
        found += [view_class, *(getattr(view_class, name, None) for name in names), *decorators]
    for each in found:
        below = each
        while below is not None:
            yield below
            below = below.func if isinstance(below, partial) else getattr(below, "__wrapped__", None)


def name_of(function: Any) -> str:
    """A function's module and name."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{function.__module__}.{name}"
