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

from flask_idempotency.core.errors import (
    ConfigurationError,
    KeyReused,
    shown,
)
from flask_idempotency.core.fingerprint import Named, Pointer, parse_pointer
from flask_idempotency.session.operation import Operation

from .settings import SETTINGS, Settings, boolean, checked, integer, optional, row, value_that

Skip = Callable[[Request], object]
"""Whether a request passes as if its view were not protected."""

ScopeCallable = Callable[[], Any]
"""Gives ``str | int | UUID``; ``None`` or ``""`` for "nobody is signed in"."""

"""One class of exceptions, or several."""


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
    bind_key: str | Callable[[], str | None] | None
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
    * ``key``: callable returning the key (``str``, ``int``, ``UUID``; ``None`` for no key), or
      ``"json:/pointer"`` or ``"form:name"`` for a natural key in the request, in place of the header.
      ``"request"``: the request itself is the key: an equal one within ``ttl`` seconds, which must be
      given and at most an hour, is its duplicate.
    * ``scope``: callable, or ``None`` for one tenant, in place of the application's.
    * ``fingerprint``: what two requests with one key must have in common. ``"request"``: method, path,
      query, media type and body. ``"json"``: the same, but white space and the order of members in a
      JSON body do not matter. ``"json-values"``: nor how a number is written; 1 and 1.0 are equal. A
      list of JSON pointers: only these fields of a JSON body, besides method, path and query.
      ``"header:Name"`` in the list compares a header, too, and the pointer ``""`` the whole body. A
      callable: only the bytes that it returns.
    * ``exclude``: what of the request is not compared, in a list: ``"query:name"`` and ``"form:name"``;
      with ``fingerprint="json"`` or ``"json-values"`` also JSON pointers, such as ``"/sent_at"``. Names
      that are not in a request do no harm.
    * ``store``: predicate ``(response) -> bool``; which responses are stored. If one is not, an atomic
      view's writes are rolled back, and the key is free.
    * ``namespace``: version of the route's meaning; keys of two namespaces never meet.
    * ``authorize_replay``: callable ``(operation) -> bool``, asked before a replay; ``False``: 403.
    * ``name``: stands for the route in records and in the key's hash. If it is set, renaming the view
      forgets no keys.
    * ``bind_key``: the bind whose database the operation belongs to, one of ``IDEMPOTENCY_BINDS``; or
      a callable that returns it, asked in each request after ``scope``. A retry must find the same one.
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
    key: str | Callable[[], str | int | UUID | None]
    scope: ScopeCallable | None
    fingerprint: str | Sequence[str] | Callable[[], bytes]
    exclude: Sequence[str]
    store: Callable[[Response], bool]
    authorize_replay: Callable[[Operation], bool]
    enforce: bool


THE_REQUEST = "request"
"""The option ``key`` where the request itself is the key."""

LONGEST_OF_REQUESTS = 3600.0
"""Seconds for which an equal request may count as a duplicate. A double click and a proxy's retry come
within a minute; much later, an equal order is a second order."""

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


def _key(value: Any) -> Any:
    if not isinstance(value, str):
        return _callable(value)
    if value == THE_REQUEST:
        return THE_REQUEST
    kind, _, where = value.partition(":")
    if kind == "json":
        return parse_pointer(where)
    if kind == "form" and where:
        return Named(kind, where)
    raise ValueError


def _fingerprint(value: Any) -> Any:
    if value in ("request", "json", "json-values") or callable(value):
        return value
    if isinstance(value, str) or not value:
        raise ValueError
    fields = tuple(_named(each, "header") for each in value)
    if not any(isinstance(each, Pointer) for each in fields):
        raise ConfigurationError(
            "headers alone would leave the whole body out; add '' for a whole JSON body, or pointers to"
            " fields of it"
        )
    return fields


def _named(text: Any, *kinds: str) -> Pointer | Named:
    """Read one name of a list: of something of a kind, or a pointer into a JSON body."""
    kind, _, name = str(text).partition(":")
    if kind not in ("header", "query", "form"):
        return parse_pointer(text)
    if kind not in kinds or not name:
        raise ValueError
    if kind != "header":
        return Named(kind, name)
    name = name.title()  # case does not count (RFC 9110 section 5.1)
    if not re.fullmatch(r"[-!#$%&'*+.^_`|~0-9A-Za-z]+", name):
        raise ValueError
    if name == "Idempotency-Key":
        raise ConfigurationError("the header of the key need not be compared: every retry has the same")
    return Named(kind, name)


def _exclude(value: Any) -> tuple[Pointer | Named, ...]:
    if isinstance(value, str):
        raise ValueError
    excluded = tuple(_named(each, "query", "form") for each in value)
    if any(each.text == "" for each in excluded):
        raise ConfigurationError("'' is the whole body; a callable as fingerprint can leave that out")
    return excluded


def _refuse_useless(route: Route) -> None:
    """Raise ``ConfigurationError`` if ``exclude`` and ``fingerprint`` do not go together."""
    if route.exclude and callable(route.fingerprint):
        raise ConfigurationError(
            "exclude is no option beside a callable fingerprint, whose bytes alone are compared: leave"
            " out there what does not count"
        )
    pointer = next((each for each in route.exclude if isinstance(each, Pointer)), None)
    if pointer and route.fingerprint not in ("json", "json-values"):
        raise ConfigurationError(
            f"exclude has the JSON pointer {shown(pointer.text)}, which needs fingerprint='json' or"
            " 'json-values'; otherwise only 'query:name' and 'form:name' are allowed"
        )


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
    key: Callable[[], str | int | UUID | None] | Pointer | Named | str | None = row(
        None, _key, "a callable, 'json:/pointer', 'form:name' or 'request'"
    )
    scope: ScopeCallable | None = row(
        NOT_GIVEN, optional(_callable), "a callable, or None for an API with one tenant"
    )
    fingerprint: str | tuple[Pointer | Named, ...] | Callable[[], bytes] = row(
        NOT_GIVEN,
        _fingerprint,
        "'request', 'json', 'json-values', a list of JSON pointers and 'header:Name', or a callable"
        " giving bytes",
    )
    exclude: tuple[Pointer | Named, ...] = row(
        (), _exclude, "a list of JSON pointers, 'query:name' and 'form:name'"
    )
    store: Callable[[Response], bool] | None = row(
        None, _taking_one, "a callable that takes the response and gives True or False"
    )
    namespace: str = _as_setting("namespace")
    authorize_replay: Callable[[Operation], bool] | None = row(
        None, _taking_one, "a callable that takes the operation and gives True or False"
    )
    name: str = row(NOT_GIVEN, value_that(is_name), NAMES)
    bind_key: str | Callable[[], str | None] | None = _as_setting("bind_key")
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
        compared = settings.profile.fingerprint
        defaults = {**vars(settings), "scope": scope, "name": endpoint, "fingerprint": compared}
        left_open = {name: defaults[name] for name in vars(self) if getattr(self, name) is NOT_GIVEN}
        return replace(self, **left_open, given=self)

    @property
    def compared_headers(self) -> list[Named]:
        """The headers that the option ``fingerprint`` names."""
        if not isinstance(self.fingerprint, tuple):
            return []
        return [each for each in self.fingerprint if isinstance(each, Named)]

    def reused(self) -> KeyReused:
        """The rejection of a request that is not the one which its key was used for."""
        if not self.exclude:
            return KeyReused()
        names = ", ".join(each.text for each in self.exclude)
        return KeyReused(
            f"This idempotency key was used for another request (compared without: {names}); find out"
            " first what became of that one."
        )

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
    route = Route(**_read(options))
    is_short = route.ttl is not NOT_GIVEN and route.ttl <= LONGEST_OF_REQUESTS
    if route.key is THE_REQUEST and not is_short:
        raise ConfigurationError(
            "key='request' needs the option ttl, from 1 second to 1 hour: for so long an equal request"
            " counts as a duplicate, even where somebody means to order the same thing twice"
        )
    _refuse_useless(route)
    refuse_ageless(route, "the route")
    return route


def refuse_ageless(route: Route, name: str) -> None:
    """Raise ``ConfigurationError`` if no key of the route could say when it was made, and it must."""
    if route.key is THE_REQUEST and route.refuse_old_keys == REQUIRED:
        raise ConfigurationError(
            f"{name} has key='request', and a request does not say when it was first sent: with it,"
            " refuse_old_keys may be True or False"
        )


def read_lease(seconds: Any) -> float:
    """The seconds of a lease. Raises ``ConfigurationError`` as the option ``lease`` does."""
    return cast("float", _read({"lease": seconds})["lease"])


def _read(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: checked(name, value, *CHECKS[name]) for name, value in values.items()}
