"""Every setting and every option, once: its name, type, default and what is allowed.

:class:`Settings` has the application's, :class:`Route` what ``@idempotent``, ``protect`` and ``run``
accept. What they mean stands on the page "Settings and options"; a test compares its tables with these.
A wrong value is a ``ConfigurationError`` in ``init_app`` (a setting) or where the view is decorated (an
option), never in the first request.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any, Literal, TypeAlias, TypedDict, cast
from uuid import UUID

from flask import Request, Response
from sqlalchemy import Engine, SingletonThreadPool, StaticPool
from werkzeug.local import LocalProxy

from flask_idempotency.core.errors import AUTOCOMMIT, ConfigurationError, ScopeUnknown, shown
from flask_idempotency.core.fingerprint import parse_pointer
from flask_idempotency.core.keys import Scope
from flask_idempotency.core.records import is_stored_by_default
from flask_idempotency.private import behind
from flask_idempotency.session.operation import Operation
from flask_idempotency.session.sessions import Sessions

PREFIX = "IDEMPOTENCY_"

SECRET = frozenset({"IDEMPOTENCY_ENCRYPTION_KEYS", "IDEMPOTENCY_REDIS_URL"})
"""Settings whose values no message may show."""

REQUIRED = "require"
"""The option ``refuse_old_keys`` where every key must say when it was made."""

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""The methods that change nothing (RFC 9110 section 9.2.1)."""

PROTECTED_METHODS = ("POST", "PATCH")
"""What ``protect`` covers by default: the methods that are not idempotent by themselves (RFC 9110
section 9.2.2, and RFC 5789 for PATCH)."""

Skip = Callable[[Request], object]
"""Whether a request passes as if its view were not protected."""

ScopeCallable = Callable[[], Any]
"""Gives ``str | int | UUID``; ``None`` or ``""`` for "nobody is signed in"."""


NOT_GIVEN: Any = ...
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
    * ``ttl``: seconds or ``timedelta``; how long the key is remembered, from the first request on.
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


# What a value may be: what a message says of it, and how it is read.


Kind: TypeAlias = tuple[Any, ...]
"""What a message says that is allowed, whether a value is, and how it is used: see :func:`_row`."""


def _one_of(*values: Any) -> Kind:
    *others, last = map(repr, values)
    known = {(type(value), value) for value in values}  # 1 is not True
    return f"{', '.join(others)} or {last}", lambda value: (type(value), value) in known


def _integer(low: int, high: int, allowed: str) -> Kind:
    return allowed, lambda value: type(value) is int and low <= value <= high


def _in_seconds(value: Any) -> Any:
    return value.total_seconds() if isinstance(value, timedelta) else value


def _seconds(low: float, high: float, range_shown: str) -> Kind:
    return (
        f"seconds (int, float) or a timedelta, from {range_shown}",
        lambda value: type(value) is not bool and low <= _in_seconds(value) <= high,  # and no NaN
        lambda value: float(_in_seconds(value)),
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))  # a set has another order in each process


def _is_fingerprint(value: Any) -> bool:
    if _is_list(value):
        return list(map(parse_pointer, value)) != []
    return value in ("request", "json") or callable(value)


def _is_policy(value: Any) -> bool:
    is_async = inspect.iscoroutinefunction(value)  # nobody would await it
    return value in ("hold", "retry") or (callable(value) and not is_async)


NAMES = "a string of 1 to 255 characters, without NUL and lone surrogates"


def is_name(value: object) -> bool:
    """Return True if every store can keep ``value`` as a name: see :data:`NAMES`."""
    return isinstance(value, str) and bool(re.fullmatch("[^\0\ud800-\udfff]{1,255}", value))


_BOOLEAN = _one_of(True, False)
_BYTES = _integer(0, 1024**3, "an integer from 0 to 1 GiB")


def _row(
    default: Any,
    allowed: str,
    is_allowed: Callable[[Any], object],
    as_used: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """A setting or an option. Where None is the default, it may be given, too.

    ``is_allowed`` may raise Python's errors about a wrong value; ``as_used`` turns a right one.
    """
    checks = {"allowed": allowed, "is_allowed": is_allowed, "as_used": as_used}
    return field(default=default, metadata=checks)


@dataclass(frozen=True, repr=False)  # error reports show it, and it holds passwords
class Settings:
    """The settings of one application."""

    store: str = _row(None, *_one_of("hybrid", "postgres", "redis", "sql"))
    redis_url: str | None = _row(None, "a URL; None or empty for none", re.compile(r"(?s).*").fullmatch)
    redis_prefix: str | None = _row(
        None, "1 to 100 visible ASCII characters", re.compile(r"[\x21-\x7e]{1,100}").fullmatch
    )
    header: str = _row(
        "Idempotency-Key",  # RFC 9110 section 5.6.2
        "a header name",
        re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+").fullmatch,
    )
    required: bool = _row(True, *_BOOLEAN)
    ttl: float = _row(86400.0, *_seconds(1, 10 * 366 * 86400, "1 second to 10 years"))
    refuse_old_keys: bool | str = _row(False, *_one_of(True, False, REQUIRED))
    lease: float = _row(60.0, *_seconds(1, 86400, "1 second to 1 day"))
    wait: float = _row(0.0, *_seconds(0, 300, "0 to 300 seconds"))
    max_request_bytes: int = _row(16 * 1024 * 1024, *_BYTES)
    max_response_bytes: int = _row(8 * 1024 * 1024, *_BYTES)
    table: str = _row(
        "idempotency_record",
        "an SQL name of up to 50 ASCII letters, digits and underscores",
        re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,49}").fullmatch,
    )
    bind_key: str | None = _row(None, "a bind key, or None", re.compile(r"(?s).+").fullmatch)
    namespace: str = _row(
        "", "up to 64 visible ASCII characters", re.compile(r"[\x21-\x7e]{0,64}").fullmatch
    )
    problem_base: str = _row(
        "urn:flask-idempotency:problem:", "a URI prefix", re.compile(r"[\x21-\x7e]*").fullmatch
    )
    purge: bool = _row(True, *_BOOLEAN)
    encryption_keys: tuple[bytes | str, ...] = _row((), "a list of keys, newest first", _is_list, tuple)
    accept_unsealed: bool = _row(False, *_BOOLEAN)
    on_store_error: str = _row("reject", *_one_of("reject", "allow"))
    enforce: bool = _row(True, *_BOOLEAN)
    enabled: bool = _row(True, *_BOOLEAN)


def _setting(name: str) -> Any:
    """An option that is the setting of the same name if it is not given."""
    return field(default=NOT_GIVEN, metadata=Settings.__dataclass_fields__[name].metadata)


@dataclass(frozen=True)
class Route:
    """The checked options of one route; what is ``NOT_GIVEN`` is the application's to say.

    ``given`` are the options themselves, of one that :func:`.routes.resolved` has made. Only
    ``protect`` gives ``methods``.
    """

    required: bool = _setting("required")
    ttl: float = _setting("ttl")
    wait: float = _setting("wait")
    key: Callable[[], str | int | UUID | None] | None = _row(
        None, "a callable that gives the key", callable
    )
    scope: ScopeCallable | None = _row(
        NOT_GIVEN,
        "a callable, or None for an API with one tenant",
        lambda value: value is None or callable(value),
    )
    fingerprint: str | tuple[str, ...] | Callable[[], bytes] = _row(
        "request",
        "'request', 'json', a list of JSON pointers, or a callable giving bytes",
        _is_fingerprint,
        lambda value: tuple(value) if _is_list(value) else value,
    )
    max_request_bytes: int | None = _row(None, *_BYTES)
    store: Callable[[Response], bool] | None = _row(
        None, "a callable that takes the response and gives True or False", callable
    )
    namespace: str = _setting("namespace")
    authorize_replay: Callable[[Operation], bool] | None = _row(
        None, "a callable that takes the operation and gives True or False", callable
    )
    name: str = _row(NOT_GIVEN, NAMES, is_name)
    other_binds: tuple[str | None, ...] = _row((), "a list of bind keys", _is_list, tuple)
    enforce: bool = _setting("enforce")
    atomic: bool = _row(True, *_BOOLEAN)
    max_attempts: int | None = _row(None, *_integer(1, 10_000, "an integer from 1 to 10000, or None"))
    refuse_old_keys: bool | str = _setting("refuse_old_keys")
    lease: float = _setting("lease")
    on_interrupted: str | Callable[[Operation], Any] = _row(
        "hold", "'hold', 'retry', or a callable, not async, that takes the operation", _is_policy
    )
    methods: Collection[str] = _row(
        (),
        "one or more of DELETE, PATCH, POST, PUT, in a list",
        lambda value: bool(value) and set(value) <= {"DELETE", "PATCH", "POST", "PUT"},
    )
    skip: Skip | None = _row(None, "a callable that takes the request, or None", callable)
    given: Route | None = field(default=None, repr=False, compare=False)

    def current_scope(self, *, required: bool = True) -> Scope:
        """Whose key the present request has.

        Raises ``ScopeUnknown`` if nobody is signed in, unless that is not ``required``. Errors of the
        callable are the application's.
        """
        if self.scope is None:
            return None
        scope: Any = self.scope()
        if isinstance(scope, LocalProxy):  # "is None" tells nothing of it
            scope = behind(scope)
        if required and (scope is None or scope == ""):
            raise ScopeUnknown
        return cast("Scope", scope)

    def is_stored(self, response: Response, error: object = None) -> bool:
        """Return True if the response is stored: so says the option ``store``, or else its status.

        A 5xx that became of an ``error`` is not, where it can be undone, whatever ``store`` says.
        """
        if self.store is None or (error is not None and self.atomic and response.status_code >= 500):
            return is_stored_by_default(response.status_code, self.atomic)
        return bool(self.store(response))

    def applies_to(self, method: str) -> bool:
        """Return True if a request with this HTTP method is protected."""
        return method in self.methods if self.methods else method not in SAFE_METHODS


SETTINGS = {PREFIX + each.name.upper(): each for each in fields(Settings)}
"""Each setting."""

OPTIONS = {each.name: each for each in fields(Route) if each.name in RouteOptions.__annotations__}
"""Each option of ``@idempotent``, in order."""

PROTECT_OPTIONS = (*(name for name in OPTIONS if name != "name"), "methods", "skip")
"""The options of ``protect``. One name would make one operation of all views that it covers."""


def checked(name: str, value: Any, row: Any) -> Any:
    """``value`` as it is used; raises ``ConfigurationError`` with name, value and what is allowed.

    ``row`` is of ``SETTINGS`` or ``OPTIONS``.
    """
    if value is None and row.default is None:
        return None
    checks, what = row.metadata, "(not shown)" if name in SECRET else shown(value)
    with suppress(TypeError):
        try:
            if checks["is_allowed"](value):
                return checks["as_used"](value)
        except ConfigurationError as error:  # says what is wrong inside the value
            raise ConfigurationError(f"{name} is {what}: {error}") from None
    raise ConfigurationError(f"{name} is {what}; allowed: {checks['allowed']}")


def read_settings(config: Mapping[str, Any], *, redis_given: bool) -> Settings:
    """The settings in an application's configuration.

    ``redis_given`` says that ``init_app`` got a client. Raises ``ConfigurationError`` for a wrong value
    and for an unknown name.
    """
    given = [name for name in config if isinstance(name, str) and name.startswith(PREFIX)]
    for name in given:
        if name not in SETTINGS:
            raise ConfigurationError(f"{name} is not a setting; there are: {', '.join(SETTINGS)}")
    rows = {name: SETTINGS[name] for name in given}
    settings = Settings(**{row.name: checked(name, config[name], row) for name, row in rows.items()})
    redis_given = redis_given or bool(settings.redis_url)
    store = settings.store or ("hybrid" if redis_given else "postgres")
    if store in ("hybrid", "redis") and not redis_given:
        raise ConfigurationError(
            f"IDEMPOTENCY_STORE is {store!r}, which needs a Redis: set IDEMPOTENCY_REDIS_URL,"
            " or pass a client to init_app(redis=...), or use 'postgres'"
        )
    if store == "redis" and settings.redis_prefix is None:
        raise ConfigurationError(
            "IDEMPOTENCY_STORE is 'redis', where applications with one prefix get each other's"
            " responses: set IDEMPOTENCY_REDIS_PREFIX to a name that no other application on this Redis"
            " has"
        )
    return replace(settings, store=store)


def read_options(options: Mapping[str, Any], known: Collection[str] = OPTIONS) -> Route:
    """Check the options of a route. Raises ``ConfigurationError`` naming the first wrong one.

    ``known`` are those that there are.
    """
    if unknown := options.keys() - set(known):
        raise ConfigurationError(f"{min(unknown)} is not an option; there are: {', '.join(known)}")
    for name in ("lease", "on_interrupted"):
        if name in options and options.get("atomic", True):
            raise ConfigurationError(
                f"{name} is an option for atomic=False; an atomic operation needs none: when its worker"
                " dies, the database rolls it back at once"
            )
    rows = Route.__dataclass_fields__
    return Route(**{name: checked(name, value, rows[name]) for name, value in options.items()})


# The database that the settings choose.


def checked_bind(sessions: Sessions, settings: Settings, options: Mapping[str, Any]) -> str | None:
    """The bind whose database has the records.

    ``options`` are those that the default engine was made with, as far as they are known. Raises
    ``ConfigurationError``, with the fix, for a bind that the application does not have, and for a
    database that the store does not support.
    """
    key = sessions.usual if settings.bind_key is None else settings.bind_key
    if key not in sessions.engines:
        known = ", ".join(map(shown, sessions.engines)) or "none, as no engine is synchronous"
        raise ConfigurationError(f"IDEMPOTENCY_BIND_KEY is {shown(key)}; allowed: {known}")
    engine, store, where = sessions.engines[key], settings.store, "the URL of the records' database"
    if store == "redis":
        return key
    if isinstance(engine.pool, (SingletonThreadPool, StaticPool)):
        raise ConfigurationError(
            f"the engine of the records' database has a {type(engine.pool).__name__}, which hands one"
            " connection to everyone, so requests would write in each other's transactions: use"
            " QueuePool or NullPool, and for SQLite a file, not a database in memory"
        )
    is_sqlite = (store, engine.dialect.name) == ("sql", "sqlite")
    if not is_sqlite and (engine.dialect.name != "postgresql" or engine.dialect.is_async):
        raise ConfigurationError(
            f"{where} begins with {engine.url.drivername}://; the store {store!r} needs PostgreSQL, and"
            " a driver that is not for asyncio: postgresql+psycopg2://user:password@host/database. For"
            " development, IDEMPOTENCY_STORE = 'sql' works on a SQLite file"
        )
    level = {**(options if key is None else {}), **engine.get_execution_options()}
    if str(level.get("isolation_level")).upper() == "AUTOCOMMIT":
        raise ConfigurationError(AUTOCOMMIT)
    return key


def redis_prefix(settings: Settings, engine: Engine) -> str:
    """What names in Redis begin with: by default, it tells databases and tables apart.

    Two databases that it cannot tell apart share the lock of ``hybrid``. That costs at most a 409 for
    the other's request, as a key's hash must be the same, too.
    """
    url = engine.url
    place = "\n".join(map(str, (url.host, url.port, url.database, settings.table)))
    digest = hashlib.sha256(place.encode()).hexdigest()[:12]
    return settings.redis_prefix or f"idempotency:{digest}:"
