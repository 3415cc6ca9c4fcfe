"""Which views are protected, and with which options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .errors import ConfigurationError
from .options import Route
from .state import AppState

ROUTE = "__idempotency_route__"
"""The attribute that tells a protected view from others."""

EXEMPT = "__idempotency_exempt__"
"""The attribute that leaves a view out of ``protect``."""


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


def facets(view: Any, method: str) -> tuple[Any, ...]:
    """The view function, and for a class-based view its class and the method's function."""
    view_class = getattr(view, "view_class", None)
    if view_class is None:
        return (view,)
    return view, view_class, getattr(view_class, method.lower(), None)
