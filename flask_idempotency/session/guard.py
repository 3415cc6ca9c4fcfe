"""What a statement does to the operation's transaction, read from its text before it is sent.

A text that begins or ends a transaction is refused: it would split the operation from its record. What
a function on the server does, no text tells; what the driver's own cursors send does not pass here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

LONG = 10_000
"""Characters of a text that is not worth remembering: it holds its values, so it comes but once."""

_sql = partial(re.compile, flags=re.IGNORECASE | re.DOTALL)
_QUOTED = r"""|"[^"]*(?:"|\Z)|(?<![\w$])\$(?P<tag>[A-Za-z_]\w*|)\$.*?(?:\$(?P=tag)\$|\Z)"""
_ESCAPED = r"'(?:[^'\\]|\\.|'')*(?:'|\Z)"
_NOISE = re.compile(rf"--[^\n\r]*|/\*|\b[eE]{_ESCAPED}|'[^']*(?:'|\Z)" + _QUOTED, re.DOTALL)
_NOISE_WITH_BACKSLASHES = re.compile(rf"--[^\n\r]*|/\*|{_ESCAPED}" + _QUOTED, re.DOTALL)
_COMMENT = re.compile(r"/\*.*?\*/|--[^\n\r]*", re.DOTALL)
_COMMENT_EDGE = re.compile(r"/\*|\*/")
_ENDS = _sql(
    r"(?:COMMIT|END|ABORT|BEGIN|START\s+TRANSACTION|PREPARE\s+TRANSACTION"
    r"|ROLLBACK(?!\s+(?:(?:WORK|TRANSACTION)\s+)?TO\b))\b"
)
_ISOLATES = _sql(r"SET\s+(?:LOCAL\s+|SESSION\s+)?(?:TRANSACTION\b|CHARACTERISTICS\b|transaction_\w+)")
_EMPTIES = _sql(r"CREATE\b.*\bON\s+COMMIT\s+DELETE\s+ROWS\b")
_CONSTRAINTS = _sql(r"SET\s+CONSTRAINTS\b|.*\bDEFERR(?:ABLE|ED)\b")
_READS = _sql(r"[\s(]*(?:SELECT|VALUES|TABLE|SHOW|SET|RESET|PRAGMA)\b")
_MAY_WRITE = _sql(r"\b(?:INTO|FOR\s+(?:UPDATE|NO\s+KEY|SHARE|KEY\s+SHARE))\b")
_CALL = re.compile(r"(?P<qualified>\.\s*)?\b(?P<name>[A-Za-z_][\w$]*)\s*\(")
_PLACE = re.compile(r"%\(\w+\)s")
_NAME = r'(?:[\w$]+|"[^"]+")'
_SET = _sql(
    r"(?:SET\s+(?P<local>LOCAL\s+)?(?:SESSION\s+(?!AUTHORIZATION))?|RESET\s+)"
    r"(?P<name>TIME\s+ZONE\b|SESSION\s+AUTHORIZATION\b"
    rf"|{_NAME}(?:\s*\.\s*{_NAME})*)"
)
_SET_CONFIG = _sql(r"\bset_config\s*\(")
_BOUND = r"%\((?P<{0}_key>\w+)\)s|(?P<{0}_next>%s)"
_ARGUMENTS = _sql(
    rf"\bset_config\s*\(\s*(?:'(?P<name>[^']+)'|{_BOUND.format('name')})(?:::\w+)?\s*,"
    rf".*?,\s*(?:'?(?P<local>[a-z01]+)'?|{_BOUND.format('local')})(?:::\w+)?\s*\)"
)
_OTHER_NAMES = {
    "time zone": "timezone",
    "session authorization": "session_authorization",
    "schema": "search_path",
    "names": "client_encoding",
    "xml": "xmloption",
}
_FALSE = frozenset({"f", "false", "n", "no", "off", "0"})

# Keywords that precede a parenthesis, types, and functions that only read.
HARMLESS = frozenset(
    [
        "all",
        "and",
        "any",
        "array",
        "as",
        "avg",
        "between",
        "by",
        "case",
        "cast",
        "char",
        "coalesce",
        "count",
        "current_setting",
        "date",
        "distinct",
        "else",
        "exists",
        "extract",
        "filter",
        "from",
        "greatest",
        "group",
        "having",
        "in",
        "interval",
        "is",
        "join",
        "least",
        "length",
        "like",
        "limit",
        "lower",
        "max",
        "min",
        "not",
        "now",
        "nullif",
        "numeric",
        "on",
        "or",
        "order",
        "over",
        "partition",
        "round",
        "row",
        "select",
        "set",
        "some",
        "sum",
        "then",
        "union",
        "upper",
        "using",
        "values",
        "varchar",
        "when",
        "where",
        "with",
    ]
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
    "the view sent a statement that begins or ends a transaction: inside an atomic operation use"
    " db.session.commit(), rollback() or begin_nested()"
)
NAMELESS = (
    "the view changes a setting whose name can be read neither from the statement nor from its values,"
    " or changes one several times in one text: write the name into it, and send one statement each"
)


class Traits(NamedTuple):
    """What a text does: ``refused`` is why it may not be sent; ``sets`` says that it changes a setting.

    ``writes`` is False if it is certainly a plain read, ``defers`` says that it decides when
    constraints are checked, and ``plain`` that it is one of the usual verbs, which prepared statements
    outlive.
    """

    refused: str | None
    writes: bool
    sets: bool
    defers: bool
    plain: bool


def traits_of(text: str) -> Traits:
    """Return what a text does."""
    return _remembered(text) if len(text) < LONG else _remembered.__wrapped__(text)


@lru_cache(512)
def _remembered(text: str) -> Traits:
    statements = _statements(text, _NOISE)
    parts = statements if "\\" not in text else statements + _statements(text, _NOISE_WITH_BACKSLASHES)
    refused = None
    for part in parts:
        if _ENDS.match(part):
            refused = ENDED
        elif _ISOLATES.match(part):
            refused = CHOSEN
        elif _EMPTIES.match(part):
            refused = EMPTIED
    return Traits(
        refused,
        not all(map(_only_reads, statements)),
        any(part[:3].lower() in ("set", "res") or _SET_CONFIG.search(part) for part in statements),
        any(_CONSTRAINTS.match(part) for part in statements),
        text.lstrip()[:6].upper() in ("SELECT", "INSERT", "UPDATE", "DELETE"),
    )


def _only_reads(statement: str) -> bool:
    if not _READS.match(statement) or _MAY_WRITE.search(statement):
        return False
    calls = _CALL.finditer(_PLACE.sub("?", statement))
    return all(not call["qualified"] and call["name"].lower() in HARMLESS for call in calls)


def _statements(text: str, noise: re.Pattern[str]) -> list[str]:
    """The statements without comments (which nest in PostgreSQL), literals and quoted names."""
    kept, place = [], 0
    while (found := noise.search(text, place)) is not None:
        kept.append(text[place : found.start()])
        place = found.end()
        if found.group()[0] == '"':
            kept.append("quoted_")
        elif found.group() == "/*":
            depth = 1
            while depth and (edge := _COMMENT_EDGE.search(text, place)) is not None:
                depth += 1 if edge.group() == "/*" else -1
                place = edge.end()
            place = len(text) if depth else place
    kept.append(text[place:])
    return [part.strip() for part in " ".join(kept).split(";") if part.strip()]


def settings_of(text: str, values: Any) -> dict[str, bool] | None:
    """The settings that a text changes, by name: True for the transaction, False for the connection.

    None if a name cannot be read, or has several values in one text.
    """
    found: dict[str, bool] = {}
    text = _COMMENT.sub(" ", text)
    for statement in text.split(";"):
        if (each := _SET.match(statement.strip())) is not None:
            name = ".".join(part.strip(' \t\r\n"') for part in each["name"].lower().split("."))
            name = _OTHER_NAMES.get(" ".join(name.split()), name)
            if name in found:
                return None
            found[name] = each["local"] is not None
    calls = list(_ARGUMENTS.finditer(text))
    if len(calls) < len(_SET_CONFIG.findall(text)):
        return None
    for call in calls:
        name = call["name"] or _value(text, call, "name", values)
        local = call["local"] or _value(text, call, "local", values)
        if not isinstance(name, str) or name.lower() in found:
            return None
        found[name.lower()] = str(local).lower() not in _FALSE
    return found


def _value(text: str, call: re.Match[str], which: str, values: Any) -> Any:
    """A bound argument."""
    if isinstance(values, Mapping):
        return values.get(call[f"{which}_key"])
    place = text[: call.start(f"{which}_next")].count("%s")
    return values[place] if isinstance(values, tuple) and place < len(values) else None
