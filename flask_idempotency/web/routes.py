"""Which views are protected, with which options; what contradicts itself is refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import ref

from flask import Blueprint, views
from werkzeug.local import LocalProxy

from flask_idempotency.core.errors import ConfigurationError

from .app_state import AppState, states
from .settings import NOT_GIVEN, Route

ROUTE = "__idempotency_route__"
"""The attribute that marks a protected view, with its options."""

EXEMPT = "__idempotency_exempt__"
"""The attribute that leaves a view out of ``protect``."""

_decorated: dict[tuple[int, int], Any] = {}
"""The views below ``@idempotent`` by identity, with a reference to each, weak where possible."""


@dataclass(frozen=True)
class ProtectedRoute:
    """One method of one URL rule; the options are resolved."""

    endpoint: str
    method: str
    rule: str
    route: Route


def protected_routes(state: AppState) -> Iterator[ProtectedRoute]:
    """Everything that is protected, in the order of the URL map."""
    for rule in state.app.url_map.iter_rules():
        for method in sorted(rule.methods or ()):
            route = route_of(state, rule.endpoint, method)
            if route is not None:
                route = route.resolved(state.settings, state.scope, rule.endpoint)
                yield ProtectedRoute(rule.endpoint, method, rule.rule, route)


def route_of(state: AppState, endpoint: str, method: str) -> Route | None:
    """The options that this method of an endpoint is protected with, or None."""
    view = state.app.view_functions.get(endpoint)
    if view is None:
        return None
    own = (getattr(each, ROUTE, None) for each in view_objects(view, method))
    route = next((route for route in own if route and route.applies_to(method)), None)
    if route is not None or hasattr(view, ROUTE):
        return route
    covering = covering_route(state, endpoint)
    if covering is not None and covering.applies_to(method) and needs_protect(view, method):
        return covering
    return None


def hidden_route(state: AppState, endpoint: str, method: str) -> Route | None:
    """The options of a protection that a decorator hides from :func:`route_of`."""
    for each in _everything(state.app.view_functions.get(endpoint), method):
        route = getattr(each, ROUTE, None)
        if isinstance(route, Route) and route.applies_to(method):
            return route
    return None


def covering_route(state: AppState, endpoint: str) -> Route | None:
    """The options of the ``protect`` call that covers an endpoint, whatever its view says.

    The nearest one counts: a blueprint before the one around it, and that before the application.
    """
    protections, name = state.protections, endpoint
    if endpoint in protections.exempt_endpoints:
        return None
    while (name := name.rpartition(".")[0]) != "":
        blueprint: Any = state.app.blueprints.get(name)
        if hasattr(blueprint, EXEMPT):
            return None
        if blueprint is not None and blueprint in protections.routes:
            return protections.routes[blueprint]
    return protections.routes.get(state.app)


def refuse_shared_name(state: AppState, covering: Route) -> None:
    """Raise ``ConfigurationError`` if the option ``name`` of ``protect`` would cover several views."""
    if covering.name is NOT_GIVEN:
        return
    endpoints = {each.endpoint for each in protected_routes(state) if each.route.given is covering}
    if len(endpoints) > 1:
        raise ConfigurationError(
            f"protect(name={covering.name!r}) would make one operation of"
            f" {', '.join(sorted(endpoints))}: a key used for one would count as used for the others."
            " Give each a name with @idempotent(name=...), or none"
        )


def refuse_unsupported(state: AppState, route: Route, name: str) -> None:
    """Raise ``ConfigurationError`` if the store does not support an option of the route."""
    if route.atomic and not state.records.atomic:
        raise ConfigurationError(
            f"{name} is atomic, which the store {state.settings.store!r} cannot be: nothing commits"
            " together with its records. Use @idempotent(atomic=False), and read what that means, or"
            " another store"
        )


def needs_protect(view: Any, method: str) -> bool:
    """Return True if only ``protect`` protects this method, which is not exempt."""
    return not any(hasattr(each, ROUTE) or is_exempt(each) for each in view_objects(view, method))


def view_objects(view: Any, *methods: str) -> tuple[Any, ...]:
    """The view function, and for a class-based view its class and the functions of its methods."""
    view_class = getattr(view, "view_class", None)
    if view_class is None:
        return (view,)
    names = ("dispatch_request", *map(str.lower, methods))
    functions = (getattr(view_class, name, None) for name in names)
    return view, view_class, *functions, *_method_decorators(view_class, methods)


def _method_decorators(view_class: Any, methods: tuple[str, ...]) -> Iterator[Any]:
    """Those of Flask-RESTful and Flask-RESTX, which decorate a method when it is called."""
    decorators = getattr(view_class, "method_decorators", ())
    if not isinstance(decorators, Mapping):
        return iter(decorators)
    return (each for method in methods for each in decorators.get(method.lower(), ()))


def note_decorated(view: Any) -> None:
    """Remember that ``@idempotent`` stands above a view, for :func:`refuse_misplaced`.

    Not of a class such as ``dict``: another application may use it as it is.
    """
    if isinstance(view, type):
        return
    for each in chain(view, hidden=True):
        identity, owner = _identity(each), getattr(each, "__self__", each)
        try:
            _decorated[identity] = ref(owner, partial(_forget, identity))
        except TypeError:  # an object with slots
            _decorated[identity] = each


def _forget(identity: tuple[int, int], _: object = None) -> None:
    _decorated.pop(identity, None)


def _identity(view: Any) -> tuple[int, int]:
    """Return what tells a view from others; each access to a bound method makes a new object."""
    return id(getattr(view, "__self__", None)), id(getattr(view, "__func__", view))


def note_registered(view: Any) -> None:
    """Forget it if the protected view was registered."""
    for found in view_objects(view, *views.http_method_funcs):
        below = list(chain(found, hidden=True))
        if any(map(_has_own_protection, below)):
            for each in below:
                _forget(_identity(each))


def refuse_contradiction(state: AppState, endpoint: str) -> None:
    """Raise ``ConfigurationError`` if an endpoint is exempt and has ``@idempotent`` of its own."""
    view = state.app.view_functions[endpoint]
    is_named = endpoint in state.protections.exempt_endpoints
    is_protected = any(map(_has_own_protection, view_objects(view)))
    if is_protected and (is_named or any(map(is_exempt, view_objects(view)))):
        raise ConfigurationError(
            f"the endpoint {endpoint!r} is exempt, and has @idempotent of its own: remove one of them"
        )


def is_registered(state: AppState, target: Any) -> bool:
    """Return True if the application has the target of an ``exempt`` or ``protect``."""
    if isinstance(target, str):
        return target in state.app.view_functions
    if isinstance(target, Blueprint):
        return any(blueprint is target for blueprint in state.app.blueprints.values())
    return any(
        each is target or target in getattr(each, "__mro__", ())
        for view in list(state.app.view_functions.values())
        for each in view_objects(view, *views.http_method_funcs)
        for each in chain(each)
    )


def refuse_misplaced(state: AppState, endpoint: str) -> None:
    """Raise ``ConfigurationError`` for an endpoint whose ``@idempotent`` stands above its route.

    Then the plain view is registered, and the protected one is not. (If the protected one is registered
    too, or called by a registered one, the other is plain on purpose.)
    """
    view = state.app.view_functions[endpoint]
    if is_exempt(view) or not any(map(_is_decorated, chain(view, hidden=True))):
        return
    if any(map(_may_call_protected, chain(view, hidden=True))):
        return
    for other in states():
        for registered in list(other.app.view_functions.values()):
            note_registered(registered)
    if any(map(_is_decorated, chain(view, hidden=True))):
        raise ConfigurationError(
            f"{name_of(view)}, the view of the endpoint {endpoint!r}, is not protected by its"
            " @idempotent: that stands above the decorator that registers it. Put @idempotent below"
            " the route"
        )


def refuse_hidden(state: AppState, endpoint: str, method: str, covering: Route) -> None:
    """Raise ``ConfigurationError`` if ``protect`` covers a view whose own options a decorator hides."""
    covering = replace(covering, methods=None, skip=None)
    for each in _everything(state.app.view_functions[endpoint], method):
        if _has_own_protection(each) and getattr(each, ROUTE) != covering:
            raise ConfigurationError(
                f"the endpoint {endpoint!r} is covered by protect(), and a decorator hides an"
                " @idempotent with other options, which would not count: let the decorator use"
                " functools.wraps"
            )


def is_exempt(view: Any) -> bool:
    """Return True if ``exempt`` marked the view, or a function below its decorators."""
    return any(hasattr(each, EXEMPT) for each in chain(view))


def _has_own_protection(view: Any) -> bool:
    route = getattr(view, ROUTE, None)
    return isinstance(route, Route) and route.methods is None  # not that of protect()


def _is_decorated(view: Any) -> bool:
    return _identity(view) in _decorated


def _may_call_protected(function: Any) -> bool:
    """Return True if the function knows a protected one by a global or an enclosing variable.

    Before its first call, the names in its code are the only trace of the globals that it uses.
    """
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    variables = map(getattr(function, "__globals__", {}).get, names)
    # A proxy, such as current_operation, may be unbound here, and raises then.
    known = (each for each in (*_closure(function), *variables) if type(each) is not LocalProxy)
    return any(map(_has_own_protection, known))


def name_of(function: Any) -> str:
    """A function's module and name."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{function.__module__}.{name}"


def _everything(view: Any, method: str) -> Iterator[Any]:
    return (each for found in view_objects(view, method) for each in chain(found, hidden=True))


def chain(view: Any, *, hidden: bool = False) -> Iterator[Any]:
    """The view, and the functions below its decorators.

    ``hidden``: also those below decorators without ``functools.wraps``, as far as they can be guessed.
    """
    pending, seen = [view], set()
    while pending:
        view = pending.pop()
        if id(view) not in seen:
            seen.add(id(view))
            yield view
            pending += _wrapped(view) or (_enclosed(view) if hidden else [])


def _wrapped(view: Any) -> list[Any]:
    inner = view.func if isinstance(view, partial) else getattr(view, "__wrapped__", None)
    return [] if inner is None else [inner]


def _enclosed(view: Any) -> list[Any]:
    flags = getattr(getattr(view, "__code__", None), "co_flags", 0)
    if not (flags & inspect.CO_VARARGS and flags & inspect.CO_VARKEYWORDS):
        return []
    # A function that takes anything, to pass it on, closes over the one that it passes it to.
    return [each for each in _closure(view) if inspect.isroutine(each) or isinstance(each, partial)]


def _closure(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # a variable that has no value yet
            yield cell.cell_contents
