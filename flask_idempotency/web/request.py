"""One request, or one call of :meth:`Idempotency.run`, and ``current_operation``."""

from __future__ import annotations

import asyncio
import time
from threading import get_ident
from typing import Any, cast

from werkzeug.local import LocalProxy

from flask_idempotency.core.errors import ScopeUnknown
from flask_idempotency.core.keys import Scope
from flask_idempotency.flask_context import behind, needed_app, present_context, present_request
from flask_idempotency.session.operation import Operation, running_operation

from .routes import AppState, app_state
from .settings import Route, ScopeCallable
from .signals import Subject


class Request(Subject):
    """What the extension knows about one request, or one call of :meth:`Idempotency.run`.

    It is about one operation at most. ``route`` has the options of that, ``dispatched`` those of the
    endpoint that Flask has called.
    """

    route: Route
    dispatched: Route | None = None
    skipped = False  # so says protect(skip=...)
    may_be_inside = False  # the request itself may hold the key, where it wins over the header
    key: str | None = None
    field: str | None = None  # that of a form which has the key
    refusal: Exception | None = None  # what is wrong with the key
    body: Any = None  # a :class:`~.body.Body`, from when it is known that it may be needed
    open_attempt: Any = None  # until it is over
    observation: Any = None  # until it is told
    is_replay = False  # the response is a stored one
    home: tuple[int, int] | None = None  # which application context it has, and which thread

    def __init__(self, state: AppState) -> None:
        self.state, self.make_response = state, state.app.make_response

    def begin(self, route: Route) -> None:
        """From now on this is about an operation of ``route``."""
        self.route, self.name, self.began, self.has_outcome = route, route.name, time.monotonic(), False
        self.skipped, self.may_be_inside = False, False
        self.key = self.field = self.refusal = None

    @property
    def is_dispatched(self) -> bool:
        """True if Flask calls its view, and our hooks at its end."""
        return self.home is not None

    def end_observation(self, response: Any, error: BaseException | None) -> None:
        """Tell what would have happened, as that was to be observed."""
        observation, self.observation = self.observation, None
        observation.finish(response, error)


_OUTERMOST = "_flask_idempotency_request"


def begin_request(request: Any, state: AppState) -> Request:
    """The state of a request that begins.

    The application context remembers the first: a view's own requests share it.
    """
    context = present_context()
    context.__dict__.setdefault(_OUTERMOST, request)
    ours = request._flask_idempotency = Request(state)  # noqa: SLF001
    ours.home = id(context), get_ident()
    return ours


def is_home(ours: Request) -> bool:
    """Return True if the context is the request's own: not a copy of it, nor another thread."""
    return ours.home == (id(present_context()), get_ident())


def this_request() -> Request:
    """Ours of the present request, or one for this call alone if the hooks have not seen it."""
    ours: Request | None = getattr(present_request(), "_flask_idempotency", None)
    return ours or Request(app_state(needed_app()))


def existing_request() -> Request | None:
    """Ours of the present request, if the extension has had to do with it."""
    ours: Request | None = getattr(present_request(), "_flask_idempotency", None)
    return ours


def current_scope(scope_of: ScopeCallable | None, *, required: bool = True) -> Scope:
    """Whose key the present request has; ``scope_of`` is the option ``scope`` of its route.

    Raises ``ScopeUnknown`` if nobody is signed in, unless that is not ``required``. Errors of
    ``scope_of`` are the application's.
    """
    # "is None" tells nothing of a proxy.
    scope: Scope = None if scope_of is None else behind(scope_of())
    if required and scope_of is not None and (scope is None or scope == ""):
        raise ScopeUnknown
    return scope


def is_outermost_request() -> bool:
    """Return True if the session of the present request is not that of a view that made it."""
    return present_context().get(_OUTERMOST) is present_request()


def is_in_thread_of_request() -> bool:
    """Return True if another thread than the request's runs this in the request's own context.

    An async view is not: its event loop may be in a thread of its own, but the request waits for it.
    """
    ours = existing_request()
    if ours is None or ours.home is None or is_home(ours) or ours.home[0] != id(present_context()):
        return False
    return asyncio._get_running_loop() is None  # noqa: SLF001 -- in asyncio's own __all__


def present_operation() -> Operation | None:
    """The operation that runs in this request, atomic or not."""
    running = running_operation()
    return None if running is None else running.operation


def _current() -> Operation:
    operation = present_operation()
    if operation is None:
        raise RuntimeError(
            "current_operation is only there while a view protected by @idempotent runs for a request"
            " with a key, or a function in Idempotency.run(): not in a view that is only observed"
            " (IDEMPOTENCY_ENFORCE or enforce=False), nor in a process that was forked in a view"
        )
    return operation


current_operation = cast("Operation", LocalProxy(_current))
"""A proxy to the operation that is being executed."""
