"""Every setting, once: its name, type, default, what is allowed, and what it means.

The reference page repeats this table, and a test compares the two. A wrong value is a
``ConfigurationError`` in ``init_app`` (a setting) or where the view is decorated (an option), never
in the first request.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

from flask_idempotency.core.errors import ConfigurationError, shown
from flask_idempotency.core.storable import NEVER_STORED, POINTERS

PREFIX = "IDEMPOTENCY_"

SECRET = frozenset({"IDEMPOTENCY_ENCRYPTION_KEYS", "IDEMPOTENCY_REDIS_URL"})
"""Settings whose values no message may show."""


@dataclass(frozen=True)
class Setting:
    """One row of the table, and its name."""

    name: str
    default: Any
    read: Callable[[Any], Any]
    allowed: str
    meaning: str


def value_that(is_allowed: Callable[[Any], object]) -> Callable[[Any], Any]:
    """A reader that returns the value itself if it is allowed, and else raises ValueError."""

    def read(value: Any) -> Any:
        if not is_allowed(value):
            raise ValueError
        return value

    return read


boolean = value_that(lambda value: isinstance(value, bool))
_boolean_or_require = value_that(lambda value: isinstance(value, bool) or value == "require")


def _one_of(*values: str) -> Callable[[Any], str]:
    return value_that(lambda value: value in values)


def _matching(pattern: str) -> Callable[[Any], str]:
    return value_that(lambda value: isinstance(value, str) and re.fullmatch(pattern, value))


def _is_number(value: Any, low: float, high: float) -> bool:
    return not isinstance(value, bool) and low <= value <= high  # which also refuses NaN


def integer(low: int, high: int) -> Callable[[Any], int]:
    """A reader of integers from ``low`` to ``high``."""
    return value_that(lambda value: isinstance(value, int) and _is_number(value, low, high))


def _seconds(low: float, high: float) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        seconds = value.total_seconds() if isinstance(value, timedelta) else value
        if not isinstance(seconds, (int, float)) or not _is_number(seconds, low, high):
            raise ValueError
        return float(seconds)

    return read


def optional(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A reader that also lets None pass."""
    return lambda value: None if value is None else read(value)


def _list(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):  # a set has another order in each process
        raise ValueError
    return tuple(value)


_TOKEN = _matching(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110 section 5.6.2
_OTHER_HEADERS = NEVER_STORED | POINTERS | {
    "accept", "authorization", "cache-control", "content-encoding", "content-type", "cookie", "etag",
    "expect", "host", "origin", "retry-after", "vary", "www-authenticate",
}  # fmt: skip
"""Headers, in lower case, that HTTP or the extension uses for something else: as the key they would be
a credential, or the same in every request."""


def _header_name(value: Any) -> str:
    name = _TOKEN(value)
    if name.lower() in _OTHER_HEADERS:
        raise ConfigurationError("HTTP uses this header for something else; choose another name")
    return name


def row(default: Any, read: Callable[[Any], Any], allowed: str, meaning: str = "") -> Any:
    """A field of a table; ``read`` returns its value as used, or raises ValueError."""
    return field(default=default, metadata={"read": read, "allowed": allowed, "meaning": meaning})


_YEAR = 366 * 24 * 3600
_FIELD = "a header name that HTTP does not use for something else"
_DURATION = "seconds (int, float) or a timedelta, from {} to {}"


# fmt: off
@dataclass(frozen=True, repr=False)  # error reports show it, and it holds passwords
class Settings:
    """The settings of one application. Each row also says how its value is read, and why."""

    store: str = row(None, optional(_one_of("hybrid", "postgres", "redis", "sql")),
        "'hybrid', 'postgres', 'redis' or 'sql'",
        "Where claims and responses are stored. The default is `hybrid` if a Redis is configured,"
        " else `postgres`. `sql` is `postgres`, or for development and tests the application's"
        " SQLite file.")
    redis_url: str | None = row(None, optional(_matching(r"(?s).*")),
        "a URL; None or empty for none",
        "`redis://`, `rediss://` or `unix://`; for a cluster or Sentinels, give a ready client as"
        " `redis=`. Time-outs are 0.05 s unless the URL sets others"
        " (`?socket_timeout=0.2`): a request that waits longer would be faster without Redis.")
    redis_prefix: str | None = row(None, optional(_matching(r"[\x21-\x7e]{1,100}")),
        "1 to 100 visible ASCII characters",
        "What every key in Redis begins with. The default is `idempotency:` and a digest of"
        " database and table, so that applications may share one Redis. Where the URL does not say"
        " which database it is, `init_app` asks for [this setting](go-live.md#redis-prefix).")
    header: str = row("Idempotency-Key", _header_name, _FIELD,
        "The request header that carries the key. The default is that of the IETF draft; another is for"
        " an API whose clients already send one.")
    required: bool = row(True, boolean, "True or False",
        "Default of the option `required`: whether a request without a key gets 400. `True`, because"
        " such a request cannot be retried safely.")
    ttl: float = row(86400.0, _seconds(1, 10 * _YEAR), _DURATION.format("1 second", "10 years"),
        "Default of the option `ttl`: how long a finished record replays. A day outlives a"
        " client's retries over a night's outage.")
    refuse_old_keys: bool | str = row(False, _boolean_or_require, "True, False or 'require'",
        "Default of the option `refuse_old_keys`: whether a key that is older than `ttl`, and of which"
        " no record is left, gets [409](http.md#key-expired). Otherwise a client that comes back after"
        " the retention runs the operation again. With `\"require\"`, keys that do not say when they"
        " were made are rejected, too. `False`, because most clients' keys do not say it.")
    lease: float = row(60.0, _seconds(1, 86400), _DURATION.format("1 second", "1 day"),
        "Default of the option `lease`: how long an operation that is not atomic may go without"
        " renewing its lease before another request may judge it interrupted. Make it longer than"
        " the slowest step (without steps: the slowest view), and than the server's own time-out for a"
        " worker: the default is twice gunicorn's.")
    wait: float = row(0.0, _seconds(0, 300), _DURATION.format("0", "300 seconds"),
        "Default of the option `wait`: how long a duplicate waits for the first to finish. With 0 it"
        " gets its 409 at once, which occupies no thread and no connection.")
    max_request_bytes: int = row(16 * 1024 * 1024, integer(0, 1024**3),
        "an integer from 0 to 1 GiB",
        "The longest body of a request with a key, where the application sets no limit itself"
        " (`MAX_CONTENT_LENGTH`, or `request.max_content_length` in a `before_request` function). A"
        " longer one gets 413. A body is kept in memory while it is compared: with eight threads, the"
        " default bounds that at 144 MiB. JSON that is compared as JSON, and the fields of a form, may"
        " have 1 MiB of it; the option `max_request_bytes` replaces both limits.")
    max_response_bytes: int = row(8 * 1024 * 1024, integer(0, 1024**3),
        "an integer from 0 to 1 GiB",
        "The largest body that is stored. A larger one is sent in full the first time; a retry gets"
        " `response-not-kept`. A stored body travels as one value, and takes room until it expires; the"
        " default is far above what an API usually sends.")
    table: str = row("idempotency_record", _matching(r"[A-Za-z_][A-Za-z0-9_]{0,49}"),
        "an SQL name of up to 50 ASCII letters, digits and underscores",
        "The name of the table. The table of steps adds the suffix `_step`. No model of yours may have"
        " such a name. PostgreSQL's names have 63 characters at most, and those of the indexes add to"
        " this one. Applications with tables of their own do not share records.")
    bind_key: str | None = row(None, optional(_matching(r"(?s).+")), "a bind key, or None",
        "The bind whose database holds the records, and whose writes are atomic with them. `None` is"
        " the application's default database.")
    namespace: str = row("", _matching(r"[\x21-\x7e]{0,64}"), "up to 64 visible ASCII characters",
        "Default of the option `namespace`, which is part of every key: keys of two namespaces never"
        " meet. For applications that share a table, and for a new version of an API.")
    problem_base: str = row("urn:flask-idempotency:problem:", _matching(r"[\x21-\x7e]*"),
        "a URI prefix",
        "The `type` of a problem is this prefix and the problem's name. The default promises no page;"
        " set the URL of your own documentation, with its last `/` or `#`.")
    purge: bool = row(True, boolean, "True or False",
        "Whether some responses are followed by the deletion of a few expired records, when they have"
        " been sent. With `False`, run `flask idempotency purge` regularly.")
    encryption_keys: tuple[bytes | str, ...] = row((), _list, "a list of keys, newest first",
        "If set, responses are encrypted at rest (AES-256-GCM) with the first key and read with"
        " any. Each key is 32 bytes, or their URL-safe base64. There is no default: whoever loses a key"
        " loses the responses under it, so it must be one that you keep.")
    accept_unsealed: bool = row(False, boolean, "True or False",
        "With encryption keys set, nothing that is stored unencrypted is used, as anyone who can write"
        " to the table could have written it. `True` allows it, for one retention after turning"
        " encryption on.")
    on_store_error: str = row("reject", _one_of("reject", "allow"), "'reject' or 'allow'",
        "What happens if PostgreSQL cannot be reached before the view: `reject` responds with 503,"
        " `allow` runs the view unprotected (logged, and signalled as `operation_unprotected`). The"
        " default keeps the guarantees: an unprotected view runs again with each retry.")
    enforce: bool = row(True, boolean, "True or False",
        "Default of the option `enforce`. `False` only observes: clients notice nothing, and logs and"
        " signals say what would have happened. It applies to views, not to `run`.")
    enabled: bool = row(True, boolean, "True or False",
        "`False` turns the protection off; views run as if undecorated, and keys that come meanwhile"
        " are not remembered. For tests, and to rule the extension out when you look for a fault.")
# fmt: on

    @property
    def has_table(self) -> bool:
        """True if the records are in a table of ours, in the application's database."""
        return self.store in ("hybrid", "postgres", "sql")


SETTINGS = tuple(Setting(each.name.upper(), each.default, **each.metadata) for each in fields(Settings))
"""The rows of the table."""


def read_settings(config: Mapping[str, Any], *, redis_given: bool) -> Settings:
    """The settings in an application's configuration.

    ``redis_given`` says that ``init_app`` got a client. Raises ``ConfigurationError`` for a wrong value
    and for an unknown name.
    """
    known = {PREFIX + setting.name for setting in SETTINGS}
    for name in config:
        if isinstance(name, str) and name.startswith(PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigurationError(f"{name} is not a setting of Flask-Idempotency{hint}")
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        name = PREFIX + setting.name
        value = checked(name, config.get(name, setting.default), setting.read, setting.allowed)
        values[setting.name.lower()] = value
    redis_given = redis_given or bool(values["redis_url"])
    values["store"] = values["store"] or ("hybrid" if redis_given else "postgres")
    if values["store"] in ("hybrid", "redis") and not redis_given:
        raise ConfigurationError(
            f"IDEMPOTENCY_STORE is {values['store']!r}, which needs a Redis: set IDEMPOTENCY_REDIS_URL,"
            " or pass a client to init_app(redis=...), or use 'postgres'"
        )
    return Settings(**values)


def checked(name: str, value: Any, read: Callable[[Any], Any], allowed: str) -> Any:
    """``read(value)``; raises ``ConfigurationError`` with name, value and what is allowed."""
    what = "(not shown)" if name in SECRET else shown(value)
    try:
        return read(value)
    except ConfigurationError as error:  # says what is wrong inside the value
        raise ConfigurationError(f"{name} is {what}: {error}") from None
    except (ValueError, TypeError):
        raise ConfigurationError(f"{name} is {what}; allowed: {allowed}") from None
