"""One request, or one call of :meth:`Idempotency.run`, and ``current_operation``."""

from __future__ import annotations

import asyncio
import time
from threading import get_ident
from typing import Any, cast

from flask import Flask
from werkzeug.local import LocalProxy

from flask_idempotency.core.errors import ConfigurationError, ScopeUnknown
from flask_idempotency.core.keys import Scope
from flask_idempotency.core.machine import Phase
from flask_idempotency.flask_context import behind, needed_app, present_context, present_request
from flask_idempotency.session.operation import Operation, running_operation

from .routes import AppState, app_state, name_of
from .settings import Route, ScopeCallable
from .signals import Subject


class Request(Subject):
    """What the extension knows about one request, or one call of :meth:`Idempotency.run`.

    Most requests change little of it, and have the rest from the class. ``dispatched`` are the options
    of the endpoint that Flask has called, ``route`` those of the present operation, and the key was
    looked for with those of ``looked_for``.
    """

    state: AppState
    route: Route
    dispatched: Route | None = None
    looked_for: Route | None = None
    skipped = False  # so says protect(skip=...)
    may_be_inside = False  # the request itself may hold the key, where it wins over the header
    key: str | None = None
    field: str | None = None  # that of a form which has the key
    refusal: Exception | None = None  # what is wrong with the key
    body: Any = None  # a :class:`~.body.Body`, from when it is known that it may be needed
    open_attempt: Any = None  # until it is over
    observation: Any = None  # until it is told
    is_replay = False  # the response is a stored one
    is_dispatched = False  # Flask calls its view, and the hooks at its end
    home: tuple[int, int] | None = None  # which application context it has, and which thread
    entered: dict[tuple[str, str], object] | None = None  # by name and key, the function

    def begin(self, route: Route) -> bool:
        """From now on this is about an operation of ``route``; False if that is so already."""
        is_known = self.looked_for is route.given
        if is_known and self.claim is None and not self.has_outcome:
            return False
        self.name, self.began, self.has_outcome = route.name, time.monotonic(), False
        self.claim = self.attempt = None
        if is_known:
            return False
        self.looked_for, self.skipped, self.may_be_inside = route.given, False, False
        self.key = self.field = self.refusal = None
        return True

    def note_function(self, operation: Operation, function: object) -> None:
        """Remember whose operation this is.

        Raises ``ConfigurationError`` if it is another function's: a name of its own is missing.
        """
        self.entered = self.entered or {}
        if self.entered.setdefault((operation.name, operation.key), function) != function:
            raise ConfigurationError(
                f"two idempotent functions of one request are both the operation {operation.name!r}, so"
                " the second would get the first one's response: give one of them a name of its own,"
                " @idempotent(name=...)"
            )

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
    ours = request._flask_idempotency = Request()  # noqa: SLF001
    ours.state, ours.is_dispatched, ours.home = state, True, (id(context), get_ident())
    return ours


def is_home(ours: Request) -> bool:
    """Return True if the context is the request's own: not a copy of it, nor another thread."""
    return ours.home == (id(present_context()), get_ident())


def this_request() -> Request:
    """Ours of the present request, or outside of one, of the present application context.

    Raises Flask's ``RuntimeError`` outside of that, too, and ``ConfigurationError`` if the application
    has no :class:`Idempotency`.
    """
    home = present_request() or present_context()
    try:
        ours: Request = home._flask_idempotency  # noqa: SLF001
    except AttributeError:
        state = app_state(needed_app())
        ours = home._flask_idempotency = Request()  # noqa: SLF001
        ours.state = state
    return ours


def existing_request() -> Request | None:
    """The same, if the extension has had to do with it."""
    home = present_request() or present_context()
    ours: Request | None = getattr(home, "_flask_idempotency", None)
    return ours


ASKED_TOO_EARLY = (AttributeError, KeyError, RuntimeError, TypeError)
"""What a scope callable raises that relies on what has not run: of ``g``, ``session``,
``get_jwt_identity`` or ``None``. Not what is derived from these: the application may have a response to
that, such as the 400 of ``request.form``. Others, such as the database's, may be of the moment."""


def current_scope(scope_of: ScopeCallable | None, *, required: bool = True) -> Scope:
    """Whose key the present request has; ``scope_of`` is the option ``scope`` of its route.

    Raises ``ScopeUnknown`` if nobody is signed in, unless that is not ``required``, and
    ``ConfigurationError`` if it looks for something that is not there yet. Other errors of ``scope_of``
    are the application's.
    """
    if scope_of is None:
        return None
    try:
        scope: Scope = behind(scope_of())  # "is None" tells nothing of a proxy
    except ASKED_TOO_EARLY as error:
        if type(error) not in ASKED_TOO_EARLY:
            raise
        raise ConfigurationError(
            f"the scope callable {name_of(scope_of)} raised {type(error).__name__}. It is asked after"
            " your before_request functions, but before the decorators below @idempotent or protect(),"
            " such as @jwt_required(). Let it find the caller itself, with verify_jwt_in_request("
            "optional=True) first, or return what a before_request function has found; None if that is"
            " nobody. 'Whose key it is' on the page 'Protect views' has code for JWT and sessions"
        ) from error
    if required and (scope is None or scope == ""):
        raise ScopeUnknown
    return scope


def abandon_struck() -> None:
    """Abandon an attempt that an exit has struck before its own context, or at its end."""
    current = existing_request()
    attempt = None if current is None else current.open_attempt
    if attempt is not None and attempt.phase is Phase.OPEN:
        attempt.abandon()


def watch_end(app: Flask) -> None:
    """Let the end of each request be watched, from the first on that leaves something open until then.

    Not before: most applications have none, and Flask asks a lot about each function it calls.
    """
    functions = app.teardown_request_funcs
    if _end not in functions.get(None, ()):
        functions[None] = [_end, *functions.get(None, ())]  # a thread may be in the list itself


def _end(error: BaseException | None) -> None:
    """End what the request leaves open, and tell what was only observed.

    A copy of its context, in a thread that the view started, ends nothing.
    """
    current = existing_request()
    if current is None or not is_home(current):
        return
    if current.open_attempt is not None:
        current.open_attempt.unanswered(error)
    if current.observation is not None:
        current.end_observation(None, error)


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
            "current_operation is only there while a view protected by @idempotent runs for a"
            " request that carries an idempotency key, or a function in Idempotency.run(). A view"
            " that is only observed (IDEMPOTENCY_ENFORCE or enforce=False) has none, nor has a process"
            " that was forked in a view"
        )
    return operation


current_operation = cast("Operation", LocalProxy(_current))
"""A proxy to the operation that is being executed."""
