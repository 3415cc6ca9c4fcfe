"""``@idempotent``: the protection around a view."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from flask import views

from flask_idempotency.core.errors import ConfigurationError
from flask_idempotency.session.operation import in_thread

from .attempt import Attempt
from .options import Route, RouteOptions, read_options
from .protection import enter
from .routes import ROUTE, note_decorated

if TYPE_CHECKING:
    from typing_extensions import Unpack

View = TypeVar("View", bound=Callable[..., Any])

BARE = Route()
"""``@idempotent`` without options."""


@overload
def idempotent(view: View, /) -> View: ...


@overload
def idempotent(**options: Unpack[RouteOptions]) -> Callable[[View], View]: ...


def idempotent(view: Any = None, /, **options: Any) -> Any:
    """Make a view safe to retry: it runs once for each key, and every retry gets the same response.

    Works bare or with options (those of :class:`RouteOptions`), on function views, blueprint views,
    ``MethodView`` classes (``decorators = [idempotent]``) and their methods, and ``async def`` views.
    GET, HEAD and OPTIONS pass through untouched. It returns a response, so a decorator that works with
    the view's return value, such as ``marshal_with``, belongs below it.

    Raises ``ConfigurationError`` for a wrong option.
    """
    if view is not None and not callable(view):
        raise ConfigurationError("@idempotent takes a view, or options by name")
    route = read_options(cast("RouteOptions", options)) if options else BARE
    if view is not None:
        return _decorated(view, route)
    decorator = partial(_decorated, route=route)
    setattr(decorator, ROUTE, route)
    return decorator


# For Flask-RESTful's method_decorators, which decorate a method when it is called.
setattr(idempotent, ROUTE, BARE)


def _decorated(view: View, route: Route) -> View:
    if isinstance(view, type) and issubclass(view, views.View):
        raise ConfigurationError(
            f"@idempotent stands above the class {view.__qualname__}: put it into the class, as"
            " decorators = [idempotent], or above one of its methods"
        )
    note_decorated(view)
    return protected(view, route)


def protected(view: View, route: Route) -> View:
    """The view with the protection of ``route`` around it."""
    if inspect.iscoroutinefunction(view):

        @wraps(view)
        async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
            entered = enter(route, view)
            if not isinstance(entered, Attempt):
                return await view(*args, **kwargs) if entered is None else entered
            with entered:
                try:
                    result = await view(*args, **kwargs)
                except Exception as error:
                    if entered.hand_up():
                        raise
                    # An error handler may be async too, and cannot run in this thread's event loop.
                    return await in_thread(entered.fail, error)
                return await in_thread(entered.respond, result)

        wrapper: Callable[..., Any] = async_wrapper
    else:

        @wraps(view)
        def sync_wrapper(*args: Any, **kwargs: Any) -> Any:
            entered = enter(route, view)
            if not isinstance(entered, Attempt):
                return view(*args, **kwargs) if entered is None else entered
            with entered:
                try:
                    result = view(*args, **kwargs)
                except Exception as error:
                    if entered.hand_up():
                        raise
                    return entered.fail(error)
                return entered.respond(result)

        wrapper = sync_wrapper
    setattr(wrapper, ROUTE, route)
    return cast("View", wrapper)
