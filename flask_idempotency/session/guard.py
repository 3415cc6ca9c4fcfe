"""What a statement does to the operation's transaction, read from its text before it is sent.

A text that begins or ends a transaction is refused: it would split the operation from its record. What
a function on the server does, no text tells; what the driver's own cursors send does not pass here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

LONG = 10_000
"""Characters of a text that is not worth remembering: it holds its values, so it comes but once."""

_sql = partial(re.compile, flags=re.IGNORECASE | re.DOTALL)
_ESCAPED = r"'(?:[^'\\]|\\.|'')*(?:'|\Z)"
_NOISE = (
    r"""--[^\n\r]*|/\*(?:(?!/\*).)*?(?:\*/|\Z)|{}|"[^"]*(?:"|\Z)"""
    r"|(?<![\w$])\$(?P<tag>[A-Za-z_]\w*|)\$.*?(?:\$(?P=tag)\$|\Z)"
)
_NOISES = [_sql(_NOISE.format(rf"\bE{_ESCAPED}|'[^']*(?:'|\Z)")), _sql(_NOISE.format(_ESCAPED))]
"""Comments, literals and quoted names: by default, and where a backslash escapes in each literal."""

_READS = _sql(r"[\s(]*(?:SELECT|VALUES|TABLE|SHOW|SET|RESET|PRAGMA)\b|\Z")
_SET = _sql(
    r"(?:SET\s+(?P<local>LOCAL\s+)?(?:SESSION\s+(?!AUTHORIZATION))?|RESET\s+)"
    r"(?P<name>TIME\s+ZONE\b|SESSION\s+AUTHORIZATION\b|[\w$]+(?:\s*\.\s*[\w$]+)*)"
)
_SET_CONFIG = _sql(r"\bset_config\s*\(")
_ARGUMENTS = _sql(
    r"\bset_config\s*\(\s*'(?P<name>[^']+)'(?:::\w+)?\s*,"
    r"(?:E?'(?:[^']|'')*'|[^'])*?,\s*'?(?P<local>[a-z01]+)'?(?:::\w+)?\s*\)"
)
_OTHER_NAMES = {
    "time zone": "timezone",
    "session authorization": "session_authorization",
    "schema": "search_path",
    "names": "client_encoding",
    "xml": "xmloption",
}
_FALSE = frozenset({"f", "false", "n", "no", "off", "0"})

HARMLESS = (
    "all and any array as avg between by case cast char coalesce count current_setting date distinct"
    " else exists extract filter from greatest group having in interval is join least length like limit"
    " lower max min not now nullif numeric on or order over partition round row select set some sum"
    " then union upper using values varchar when where with"
)
"""Keywords that precede a parenthesis, types, and functions that only read."""

_MAY_WRITE = _sql(
    r"\b(?:INTO|FOR\s+(?:UPDATE|NO\s+KEY|SHARE|KEY\s+SHARE))\b|\.\s*\w+\s*\("
    rf"|(?<![\w$])(?!(?:{HARMLESS.replace(' ', '|')})\b)[a-z_][\w$]*\s*\("
)

CHOSEN = (
    "the view chose how its transaction is isolated, or that it only reads, and it has begun already:"
    " choose it on the engine (SQLALCHEMY_ENGINE_OPTIONS)"
)
EMPTIED = (
    "the view made a temporary table ON COMMIT DELETE ROWS, which its commit would not empty: delete"
    " its rows by a statement"
)
ENDED = (
    "the view sent a statement that begins or ends a transaction, or that has a comment inside a"
    " comment: inside an atomic operation use db.session.commit(), rollback() or begin_nested()"
)
NAMED_AS_OURS = (
    "the view sent a savepoint as text, with a name that begins as the operation's or SQLAlchemy's own"
    " do, and a rollback could end the wrong one: choose another, or use db.session.begin_nested()"
)
NAMELESS = (
    "the view changes a setting whose name can be read neither from the statement nor from its values,"
    " or changes one several times in one text: write the name into it, and send one statement each"
)


_REFUSED = {
    ENDED: _sql(
        r"(?:COMMIT|END|ABORT|BEGIN|START\s+TRANSACTION|PREPARE\s+TRANSACTION"
        r"|ROLLBACK(?!\s+(?:(?:WORK|TRANSACTION)\s+)?TO\b))\b|.*/\*"
    ),
    CHOSEN: _sql(r"SET\s+(?:LOCAL\s+|SESSION\s+)?(?:TRANSACTION\b|CHARACTERISTICS\b|transaction_\w+)"),
    NAMED_AS_OURS: _sql(r"(?:SAVEPOINT|RELEASE|ROLLBACK)\b.*\b(?:idempotency_|sa_savepoint_)"),
    EMPTIED: _sql(r"CREATE\b.*\bON\s+COMMIT\s+DELETE\s+ROWS\b"),
}


class Traits(NamedTuple):
    """What a text does: ``refused`` is why it may not be sent; ``sets`` says that it changes a setting.

    ``writes`` is False if it is certainly a plain read, and ``unprepares`` says that it forgets
    prepared statements.
    """

    refused: str | None
    writes: bool
    sets: bool
    unprepares: bool


def traits_of(text: str) -> Traits:
    """Return what a text does."""
    return _remembered(text) if len(text) < LONG else _remembered.__wrapped__(text)


@lru_cache(512)
def _remembered(text: str) -> Traits:
    statements, other = (_statements(text, noise) for noise in _NOISES)
    refused = (why for why, pattern in _REFUSED.items() if any(map(pattern.match, statements + other)))
    return Traits(
        next(refused, None),
        not all(_READS.match(each) and not _MAY_WRITE.search(each) for each in statements),
        any(_SET.match(each) or _SET_CONFIG.search(each) for each in statements),
        any(each[:10].upper() == "DEALLOCATE" for each in statements),
    )


def _statements(text: str, noise: re.Pattern[str]) -> list[str]:
    """The statements without comments and literals; of quoted names only what is harmless.

    In PostgreSQL comments nest. Of one that does, the beginning is left.
    """
    kept = noise.sub(
        lambda found: " " if found[0][0] != '"' else " " + re.sub(r"[^\w.]", "_", found[0][1:-1]) + " ",
        text,
    )
    return [each.strip() for each in kept.split(";")]


def settings_of(text: str, values: Any) -> dict[str, bool] | None:
    """The settings that a text changes, by name: True for the transaction, False for the connection.

    None if a name cannot be read, or has several values in one text.
    """
    found: dict[str, bool] = {}
    for each in filter(None, map(_SET.match, _statements(text, _NOISES[0]))):
        name = ".".join(part.strip() for part in each["name"].lower().split("."))
        name = _OTHER_NAMES.get(" ".join(name.split()), name)
        if name in found:
            return None
        found[name] = each["local"] is not None
    if isinstance(values, Mapping):
        text %= {name: literal(str(value)) for name, value in values.items()}
    elif isinstance(values, tuple):
        text %= tuple(literal(str(value)) for value in values)
    calls = list(_ARGUMENTS.finditer(text))
    names = {call["name"].lower() for call in calls}
    if len(names - found.keys()) < len(_SET_CONFIG.findall(text)):
        return None
    return found | {call["name"].lower(): call["local"].lower() not in _FALSE for call in calls}


# Settings that end with a transaction: inside an operation a commit of the view is a RELEASE, and ends
# none. So they are asked for before they change, and put back.


def literal(text: str) -> str:
    """The text as an SQL literal, however the server treats backslashes."""
    quoted = text.replace("'", "''")
    return f"'{quoted}'" if "\\" not in quoted else "E'" + quoted.replace("\\", "\\\\") + "'"


def ask(names: Iterable[str]) -> str:
    """A statement that returns what settings are, before a statement of the view changes them."""
    return "SELECT " + ", ".join(
        f"coalesce(current_setting({literal(name)}, true), '')" for name in names
    )


def put_back(saved: Mapping[str, str]) -> str:
    """A statement that restores them, the last first: a role that was set later may forbid the rest."""
    calls = [f"set_config({literal(name)}, {literal(was)}, true)" for name, was in saved.items()]
    return "SELECT " + ", ".join(reversed(calls))
