"""The options of a route: what ``@idempotent``, ``protect`` and ``run`` accept.

:class:`RouteOptions` says what callers may write; :class:`Route` has each option's default and check.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any, Literal, TypedDict, cast
from uuid import UUID

from flask import Request, Response

from flask_idempotency.core.errors import ConfigurationError
from flask_idempotency.core.fingerprint import parse_pointer
from flask_idempotency.core.storable import is_stored_by_default
from flask_idempotency.session.operation import Operation

from .settings import SETTINGS, Settings, boolean, checked, integer, optional, row, value_that

Skip = Callable[[Request], object]
"""Whether a request passes as if its view were not protected."""

ScopeCallable = Callable[[], Any]
"""Gives ``str | int | UUID``; ``None`` or ``""`` for "nobody is signed in"."""


class _NotGiven:
    def __repr__(self) -> str:
        return "NOT_GIVEN"


NOT_GIVEN: Any = _NotGiven()
"""The default of an argument for which None means something, and of an option that a setting gives."""


class RunOptions(TypedDict, total=False):
    """The options of :meth:`Idempotency.run`: those that need no request."""

    ttl: float | timedelta
    namespace: str
    name: str
    wait: float | timedelta
    other_binds: Sequence[str | None]
    atomic: bool
    max_attempts: int | None
    refuse_old_keys: bool | Literal["require"]
    lease: float | timedelta
    on_interrupted: Literal["hold", "retry"] | Callable[[Operation], Any]


class RouteOptions(RunOptions, total=False):
    """The keyword arguments of ``@idempotent`` and ``protect``; all are optional.

    * ``required``: a request without a key gets 400; ``False`` lets it through unprotected.
    * ``ttl``: seconds or ``timedelta``; how long a finished record replays.
    * ``wait``: seconds that a concurrent duplicate waits for the first to finish before its 409.
    * ``key``: callable returning the key (``str``, ``int`` or ``UUID``), in place of the header.
      ``None``, ``""`` and a ``KeyError`` are a missing key.
    * ``scope``: callable, or ``None`` for one tenant, in place of the application's.
    * ``fingerprint``: what two requests with one key must have in common. ``"request"``: method, path,
      query, media type and body. ``"json"``: the same, but white space and the order of members in a
      JSON body do not matter. A list of JSON pointers: only these fields of a JSON body, besides
      method, path and query. A callable: only the bytes that it returns.
    * ``max_request_bytes``: how long a body may be, in place of the application's limits: of any body,
      and of what is compared as JSON or as fields of a form. A longer one gets 413. ``None``: theirs.
    * ``store``: predicate ``(response) -> bool``; which responses are stored. If one is not, an atomic
      view's writes are rolled back, and the key is free.
    * ``namespace``: version of the route's meaning; keys of two namespaces never meet.
    * ``authorize_replay``: callable ``(operation) -> bool``, asked before a replay; ``False``: 403.
    * ``name``: stands for the route in records and in the key's hash. If it is set, renaming the view
      forgets no keys.
    * ``other_binds``: bind keys that the view may write to, outside the operation's transaction.
    * ``enforce``: ``False`` only observes: clients notice nothing, and logs and signals say what would
      have happened.
    * ``atomic``: ``False`` for a view with effects outside the database: no transaction is held.
    * ``max_attempts``: how often an operation may be begun. Then it is held, whatever
      ``on_interrupted`` says, until an operator releases it. ``None``: as often as it is retried.
    * ``refuse_old_keys``: ``True``: a key without a record that is older than ``ttl`` gets 409, as its
      operation may have been done and forgotten. A key says its age as a UUID of version 7, or in a
      form's field. One without an age passes, or with ``"require"`` gets 400.

    Only with ``atomic=False``:

    * ``lease``: seconds or ``timedelta`` without a renewal after which the operation counts as
      interrupted.
    * ``on_interrupted``: what the next request gets after an interruption, when nobody knows whether
      the effect happened. ``"hold"``: 409, until an operator decides. ``"retry"``: the view runs again,
      except for its finished steps; once it began more than ``ttl`` ago, 409 as well. A callable
      ``(operation)``, asked once the lease has ended: the response that it returns; None runs the view
      again.
    """

    required: bool
    key: Callable[[], str | int | UUID | None]
    scope: ScopeCallable | None
    fingerprint: str | Sequence[str] | Callable[[], bytes]
    max_request_bytes: int | None
    store: Callable[[Response], bool]
    authorize_replay: Callable[[Operation], bool]
    enforce: bool


REQUIRED = "require"
"""The option ``refuse_old_keys`` where every key must say when it was made."""

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""The methods that change nothing (RFC 9110 section 9.2.1)."""

PROTECTED_METHODS = ("POST", "PATCH")
"""What ``protect`` covers by default: the methods that are not idempotent by themselves (RFC 9110
section 9.2.2, and RFC 5789 for PATCH)."""


_callable = value_that(callable)


def _taking_one(value: Any) -> Any:
    """A callable of one argument; where its signature cannot be had, any. Raises TypeError."""
    if not callable(value):
        raise TypeError
    with suppress(ValueError):
        inspect.signature(value).bind(None)
    return value


def _methods(value: Any) -> frozenset[str]:
    if isinstance(value, (str, bytes)):
        raise ValueError
    methods = frozenset(str(name).upper() for name in value)
    if not methods or methods - {"DELETE", "PATCH", "POST", "PUT"}:
        raise ValueError
    return methods


def _fingerprint(value: Any) -> Any:
    if value in ("request", "json") or callable(value):
        return value
    if isinstance(value, str) or not value:
        raise ValueError
    return tuple(parse_pointer(each) for each in value)


NAMES = "a string of 1 to 255 characters, without NUL and lone surrogates"
_NOT_IN_NAMES = re.compile("[\0\ud800-\udfff]")


def is_name(value: object) -> bool:
    """Return True if every store can keep ``value`` as a name: see :data:`NAMES`."""
    if not isinstance(value, str) or not 1 <= len(value) <= 255:
        return False
    return _NOT_IN_NAMES.search(value) is None


def _binds(value: Any) -> tuple[str | None, ...]:
    if isinstance(value, str):
        raise ValueError
    return tuple(value)


def _policy(value: Any) -> Any:
    if inspect.iscoroutinefunction(value):  # nobody would await it
        raise TypeError
    return value if value in ("hold", "retry") else _taking_one(value)


def _as_setting(name: str) -> Any:
    setting = next(each for each in SETTINGS if each.name == name.upper())
    return row(NOT_GIVEN, setting.read, setting.allowed)


@dataclass(frozen=True)
class Route:
    """The checked options of one route; what is ``NOT_GIVEN`` is the application's to say."""

    required: bool = _as_setting("required")
    ttl: float = _as_setting("ttl")
    wait: float = _as_setting("wait")
    key: Callable[[], str | int | UUID | None] | None = row(
        None, _callable, "a callable that gives the key"
    )
    scope: ScopeCallable | None = row(
        NOT_GIVEN, optional(_callable), "a callable, or None for an API with one tenant"
    )
    fingerprint: str | tuple[str, ...] | Callable[[], bytes] = row(
        "request",
        _fingerprint,
        "'request', 'json', a list of JSON pointers, or a callable giving bytes",
    )
    max_request_bytes: int | None = row(
        None, optional(integer(0, 1024**3)), "an integer from 0 to 1 GiB, or None"
    )
    store: Callable[[Response], bool] | None = row(
        None, _taking_one, "a callable that takes the response and gives True or False"
    )
    namespace: str = _as_setting("namespace")
    authorize_replay: Callable[[Operation], bool] | None = row(
        None, _taking_one, "a callable that takes the operation and gives True or False"
    )
    name: str = row(NOT_GIVEN, value_that(is_name), NAMES)
    other_binds: tuple[str | None, ...] = row((), _binds, "a list of bind keys")
    enforce: bool = _as_setting("enforce")
    atomic: bool = row(True, boolean, "True or False")
    max_attempts: int | None = row(
        None, optional(integer(1, 10_000)), "an integer from 1 to 10000, or None"
    )
    refuse_old_keys: bool | str = _as_setting("refuse_old_keys")
    lease: float = _as_setting("lease")
    on_interrupted: str | Callable[[Operation], Any] = row(
        "hold", _policy, "'hold', 'retry', or a callable, not async, that takes the operation"
    )
    methods: frozenset[str] | None = row(
        None, _methods, "one or more of DELETE, PATCH, POST, PUT, in a list"
    )
    skip: Skip | None = row(None, optional(_callable), "a callable that takes the request, or None")
    given: Route | None = field(default=None, repr=False, compare=False)

    def resolved(self, settings: Settings, scope: ScopeCallable | None, endpoint: str = "") -> Route:
        """The same for one endpoint, with nothing left open; ``given`` is the route itself."""
        defaults = {**vars(settings), "scope": scope, "name": endpoint}
        left_open = {name: defaults[name] for name in vars(self) if getattr(self, name) is NOT_GIVEN}
        return replace(self, **left_open, given=self)

    def is_stored(self, response: Response) -> bool:
        """Return True if the response is stored: so says the option ``store``, or else its status."""
        if self.store is None:
            return is_stored_by_default(response.status_code, self.atomic)
        return bool(self.store(response))

    def applies_to(self, method: str) -> bool:
        """Return True if a request with this HTTP method is protected."""
        return method not in SAFE_METHODS if self.methods is None else method in self.methods


CHECKS = {
    each.name: (each.metadata["read"], each.metadata["allowed"])
    for each in fields(Route)
    if each.metadata
}
"""How each option is read, and what is allowed."""

OPTIONS = tuple(name for name in CHECKS if name in RouteOptions.__annotations__)
"""Those of ``@idempotent``, in order."""


def read_protection(methods: Collection[str], skip: Skip | None, options: RouteOptions) -> Route:
    """Check what ``protect`` was given. Raises ``ConfigurationError`` naming the first wrong one."""
    return replace(read_options(options), **_read({"methods": methods, "skip": skip}))


def read_options(options: RouteOptions) -> Route:
    """Check the options of a route. Raises ``ConfigurationError`` naming the first wrong one."""
    if unknown := options.keys() - set(OPTIONS):
        raise ConfigurationError(
            f"{min(unknown)} is not an option of an idempotent route; there are: {', '.join(OPTIONS)}"
        )
    for name in ("lease", "on_interrupted"):
        if name in options and options.get("atomic", True):
            raise ConfigurationError(
                f"{name} is an option for atomic=False; an atomic operation needs none: when its worker"
                " dies, the database rolls it back at once"
            )
    return Route(**_read(options))


def read_lease(seconds: Any) -> float:
    """The seconds of a lease. Raises ``ConfigurationError`` as the option ``lease`` does."""
    return cast("float", _read({"lease": seconds})["lease"])


def _read(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: checked(name, value, *CHECKS[name]) for name, value in values.items()}
