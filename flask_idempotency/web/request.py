"""What the extension knows about one request, and ``current_operation``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import get_ident
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, cast

from flask import Response, current_app
from werkzeug.local import LocalProxy

from flask_idempotency.core.errors import ConfigurationError, Problem, ScopeUnknown
from flask_idempotency.core.keys import Scope
from flask_idempotency.core.machine import Phase
from flask_idempotency.flask_context import present_context, present_request
from flask_idempotency.session.operation import Operation, running_operation

from .options import Route, ScopeCallable
from .routes import name_of
from .signals import Told

if TYPE_CHECKING:
    from .body import Body


class Observation(Protocol):
    """What would have happened to a request that is only observed."""

    error: BaseException | None
    """What left its view."""

    def finish(self, response: Response | None) -> None:
        """The request has its ``response``, or ends without one. Never raises an ``Exception``."""


@dataclass(frozen=True)
class FormKey:
    """What a form's field says, its first signature checked: the key, and the second signature.

    ``made`` is when the form was rendered, in seconds since 1970.
    """

    key: str = field(repr=False)
    owner: str = field(repr=False)
    made: float


class Begun(Protocol):
    """An attempt that is not over."""

    phase: Phase

    def complete(self) -> None:
        """Store the response that waited."""

    def respond_to(self, error: Exception) -> Response:
        """The error of the view, above all decorators."""

    def abandon(self) -> None:
        """Undo all of it."""

    def has_committed(self) -> bool:
        """Return True if the view has committed something that would be undone."""


class PresentedKey:
    """The key that a request presents, as the options of one route look for it."""

    options: Route | None = None  # these; None: nobody has looked
    skipped = False  # so says protect(skip=...)
    may_be_inside = False  # the request itself may hold it, where it wins over the header
    key: str | None = None
    field: FormKey | None = None  # if the key comes from a form
    refusal: Exception | None = None  # what is wrong with it


class RequestState:
    """What the extension knows about one request, or one call of :meth:`Idempotency.run`.

    Most requests change little of it, and have the rest from the class.
    """

    route: Route | None = None  # its endpoint's, resolved
    body: Body | None = None  # from when it is known that it may be needed
    entered: Mapping[tuple[str, str], object] = MappingProxyType({})  # by name and key, the function
    is_dispatched = False  # Flask has called its view, and will call the hook after it
    attempt: Begun | None = None  # until it is over
    response: Response | None = None  # the view's, which is stored
    problem: Problem | None = None
    observation: Observation | None = None  # until it is told
    is_replay = False  # the response is a stored one

    def __init__(self) -> None:
        self.told, self.presented = Told(), PresentedKey()  # told of its latest operation

    def abandon(self, *phases: Phase) -> None:
        """Abandon the attempt, if it is in one of these phases."""
        if self.attempt is not None and self.attempt.phase in phases:
            self.attempt.abandon()

    def end_observation(self, response: Response | None) -> None:
        """Tell what would have happened, if that was to be observed."""
        observation, self.observation = self.observation, None
        if observation is not None:
            observation.finish(response)


_OUTERMOST = "_flask_idempotency_request"


def begin_request(request: Any) -> RequestState:
    """The state of a request that begins.

    The application context remembers the first: a view's own requests share it.
    """
    present_context().setdefault(_OUTERMOST, (request, get_ident()))
    state = request._flask_idempotency = RequestState()  # noqa: SLF001
    return state


def this_request() -> RequestState:
    """The state of the present request, or outside of one, of the present application context."""
    home = present_request() or present_context()
    try:
        state: RequestState = home._flask_idempotency  # noqa: SLF001
    except AttributeError:
        state = home._flask_idempotency = RequestState()  # noqa: SLF001
    return state


def existing_request() -> RequestState | None:
    """The state of the present request, if the extension has had to do with it."""
    home = present_request() or present_context()
    state: RequestState | None = getattr(home, "_flask_idempotency", None)
    return state


ASKED_TOO_EARLY = (AttributeError, KeyError, RuntimeError, TypeError)
"""What a scope callable raises that relies on what has not run: of ``g``, ``session``,
``get_jwt_identity`` or ``None``. Not what is derived from these: the application may have a response to
that, such as the 400 of ``request.form``. Others, such as the database's, may be of the moment."""


def current_scope(scope_of: ScopeCallable | None, *, required: bool = True) -> Scope:
    """Whose key the present request has; ``scope_of`` is the option ``scope`` of its route.

    Raises ``ScopeUnknown`` if nobody is signed in, unless that is not ``required``, and
    ``ConfigurationError`` if it looks for something that is not there yet; but the error itself if the
    application has a handler for it, as for any other of ``scope_of``.
    """
    if scope_of is None:
        return None
    try:
        scope: Scope = scope_of()
    except ASKED_TOO_EARLY as error:
        if type(error) not in ASKED_TOO_EARLY:
            raise
        mistake = ConfigurationError(
            f"the scope callable {name_of(scope_of)} raised {type(error).__name__}. It is asked after"
            " your before_request functions, but before the decorators below @idempotent or protect(),"
            " such as @jwt_required(). Let it find the caller itself, with verify_jwt_in_request("
            "optional=True) first, or return what a before_request function has found; None if that is"
            " nobody. 'Whose key it is' on the page 'Protect views' has code for JWT and sessions"
        )
        if _is_handled(error):  # whoever logs it there sees ours as its cause
            raise error from (error.__cause__ or mistake)
        raise mistake from error
    if required and (scope is None or scope == ""):
        raise ScopeUnknown
    return scope


def _is_handled(error: Exception) -> bool:
    """Return True if the application has a handler for such an error, or for all."""
    blueprints = getattr(present_request(), "blueprints", ())
    handlers = [current_app.error_handler_spec[name][None] for name in (*blueprints, None)]
    return any(kind in each for each in handlers for kind in type(error).__mro__)


def is_outermost_request() -> bool:
    """Return True if the session of the present request is not that of a view that made it."""
    outermost, _thread = present_context().get(_OUTERMOST, (None, None))
    return outermost is present_request()


def is_in_thread_of_request() -> bool:
    """Return True if another thread than the request's runs this in the request's own context.

    An async view is not: its event loop may be in a thread of its own, but the request waits for it.
    """
    outermost, thread = present_context().get(_OUTERMOST, (None, None))
    if outermost is None or outermost is not present_request() or thread == get_ident():
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
