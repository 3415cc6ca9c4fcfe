"""Which views are protected, and with which options."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from flask.views import http_method_funcs

from .errors import ConfigurationError
from .options import Route
from .state import AppState, states

ROUTE = "__idempotency_route__"
"""The attribute that tells a protected view from others."""

EXEMPT = "__idempotency_exempt__"
"""The attribute that leaves a view out of ``protect``."""

_DECORATED = "__idempotency_decorated__"
"""The attribute of a view that ``@idempotent`` was put around: its own ``id``, which a copy has not."""


@dataclass(frozen=True)
class ProtectedRoute:
    """One method of one URL rule; ``operation`` is the name that its records have."""

    operation: str
    endpoint: str
    method: str
    rule: str
    route: Route


def protected_routes(state: AppState) -> Iterator[ProtectedRoute]:
    """Everything that is protected, in the order of the application's URL map."""
    for rule in state.app.url_map.iter_rules():
        for method in sorted(rule.methods or ()):
            route = route_of(state, rule.endpoint, method)
            if route is not None:
                name = route.name or rule.endpoint
                yield ProtectedRoute(name, rule.endpoint, method, rule.rule, route)


def route_of(state: AppState, endpoint: str, method: str) -> Route | None:
    """The options that this method of an endpoint is protected with, or None."""
    view = state.app.view_functions.get(endpoint)
    if view is None:
        return None
    own = (getattr(facet, ROUTE, None) for facet in facets(view, method))
    route = next((route for route in own if route and route.applies_to(method)), None)
    if route is not None or hasattr(view, ROUTE):
        return route
    covering = covering_route(state, endpoint)
    if covering is not None and covering.applies_to(method) and is_open(view, method):
        return covering
    return None


def covering_route(state: AppState, endpoint: str) -> Route | None:
    """The options of the ``protect`` call that covers an endpoint, whatever its view says."""
    names = [endpoint]
    while (parent := names[-1].rpartition(".")[0]) != "":
        names.append(parent)
    return state.protection(names[1:])


def refuse_shared_name(state: AppState, covering: Route) -> None:
    """Raise ``ConfigurationError`` if the name that ``protect`` was given would cover several views."""
    if covering.name is None:
        return
    endpoints = {each.endpoint for each in protected_routes(state) if each.route is covering}
    if len(endpoints) > 1:
        raise ConfigurationError(
            f"protect() was given name={covering.name!r}, which would make one operation of"
            f" {', '.join(sorted(endpoints))}: a key used for one would count as used for the others."
            " Give each a name with @idempotent(name=...), or none"
        )


def is_open(view: Any, method: str) -> bool:
    """Whether ``protect`` has to see to this method: it is neither exempt nor protected by itself."""
    return not any(hasattr(facet, ROUTE) or hasattr(facet, EXEMPT) for facet in facets(view, method))


def facets(view: Any, *methods: str) -> tuple[Any, ...]:
    """The view function, and for a class-based view its class and the methods' functions."""
    view_class = getattr(view, "view_class", None)
    if view_class is None:
        return (view,)
    return view, view_class, *(getattr(view_class, method.lower(), None) for method in methods)


def note_decorated(view: Any) -> None:
    """Remember that ``@idempotent`` was put around a view, for :func:`refuse_misplaced`."""
    for each in chain(view):
        with suppress(AttributeError, TypeError):  # a bound method takes no attributes
            setattr(each, _DECORATED, id(each))


def note_registered(view: Any) -> None:
    """Forget it where what stands around the view was registered: it protects."""
    for facet in facets(view, *http_method_funcs):
        below = list(chain(facet))
        if any(map(_has_own_protection, below)):
            for each in below:
                if _is_decorated(each):
                    setattr(each, _DECORATED, None)


def refuse_misplaced(state: AppState, endpoint: str) -> None:
    """Raise ``ConfigurationError`` for an endpoint whose ``@idempotent`` stands above its route.

    Then the view is registered as it is, and what protects it is registered nowhere. (If that is
    registered too, the other one is plain on purpose.)
    """
    view = state.app.view_functions[endpoint]
    if is_exempt(view) or not any(map(_is_decorated, chain(view))):
        return
    for other in states():
        for registered in list(other.app.view_functions.values()):
            note_registered(registered)
    if any(map(_is_decorated, chain(view))):
        raise ConfigurationError(
            f"{name_of(view)}, the view of the endpoint {endpoint!r}, is not protected: @idempotent"
            " stands above the decorator that registers it, and comes too late. Put @idempotent below"
            " the route"
        )


def is_exempt(view: Any) -> bool:
    """Whether ``exempt`` was given the view, or what its decorators were put around."""
    return any(hasattr(each, EXEMPT) for each in chain(view))


def _has_own_protection(view: Any) -> bool:
    route = getattr(view, ROUTE, None)
    return isinstance(route, Route) and route.methods is None  # not that of protect()


def _is_decorated(view: Any) -> bool:
    return getattr(view, _DECORATED, None) == id(view)


def name_of(function: Any) -> str:
    """A function as a developer finds it."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{function.__module__}.{name}"


def chain(view: Any) -> Iterator[Any]:
    """The view, and what its decorators were put around, as far as that can be seen."""
    pending, seen = [view], set()
    while pending:
        view = pending.pop()
        if id(view) not in seen:
            seen.add(id(view))
            yield view
            pending += _below(view)


def _below(view: Any) -> list[Any]:
    if (wrapped := getattr(view, "__wrapped__", None)) is not None:
        return [wrapped]
    if isinstance(view, partial):
        return [view.func]
    flags = getattr(getattr(view, "__code__", None), "co_flags", 0)
    if not (flags & inspect.CO_VARARGS and flags & inspect.CO_VARKEYWORDS):
        return []
    # Without functools.wraps: what takes anything, to hand it on, closes over what it hands it to.
    return [value for value in _closure(view) if inspect.isroutine(value) or isinstance(value, partial)]


def _closure(function: Any) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a variable that has no value yet
            yield cell.cell_contents
