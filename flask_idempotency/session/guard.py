"""What a statement does to the operation's transaction, read from its text before it is sent.

A text that begins or ends a transaction is refused, by ``OperationTransaction.before``: it would split
the operation from its record. What a function on the server does, no text tells; what the driver's own
cursors send does not pass here.
"""

from __future__ import annotations

import re
from functools import lru_cache, partial
from typing import NamedTuple

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

_READS = _sql(r"[\s(]*(?:SELECT|VALUES|TABLE|SHOW|PRAGMA)\b|\Z")
HARMLESS = (
    "all and any array as avg between by case cast char coalesce count current_setting date distinct"
    " else exists extract filter from greatest group having in interval is join least length like limit"
    " lower max min not now nullif numeric on or order over partition round row select set some sum"
    " then union upper using values varchar when where with"
)
"""Keywords that precede a parenthesis, types, and functions that only read."""

_MAY_WRITE = _sql(
    r"\b(?:INTO|FOR\s+(?:UPDATE|NO\s+KEY|SHARE|KEY\s+SHARE))\b|\.\s*\w+\s*\("
    rf"|(?<![\w$])(?!(?:{HARMLESS.replace(' ', '|')})\b)[\w$]+\s*\("
)

REFUSED = (
    "the view sent a statement that begins, ends or isolates a transaction, a savepoint whose name"
    " begins as ours or SQLAlchemy's, a temporary table ON COMMIT DELETE ROWS, a comment inside a"
    " comment, or what is no str: inside an atomic operation use db.session.commit(), rollback() or"
    " begin_nested(), a DELETE, and the engine's options"
)

_REFUSED = _sql(
    r"(?:COMMIT|END|ABORT|BEGIN|START\s+TRANSACTION|PREPARE\s+TRANSACTION"
    r"|ROLLBACK(?!\s+(?:(?:WORK|TRANSACTION)\s+)?TO\b))\b|.*/\*"
    r"|(?:SAVEPOINT|RELEASE|ROLLBACK)\b.*\b(?:idempotency_|sa_savepoint_)"
    r"|SET\s+(?:LOCAL\s+|SESSION\s+)?(?:TRANSACTION\b|CHARACTERISTICS\b|transaction_(?!timeout\b)\w+)"
    r"|CREATE\b.*\bON\s+COMMIT\s+DELETE\s+ROWS\b"
)


class Traits(NamedTuple):
    """What a text does: whether it may not be sent.

    ``writes`` is False if it is certainly a plain read: what changes a setting is none, as a rollback
    undoes it. ``unprepares`` says that it forgets prepared statements, and ``ends`` that it may end a
    savepoint of SQLAlchemy's, as one of its own was around that.
    """

    is_refused: bool
    writes: bool
    unprepares: bool
    ends: bool


def traits_of(text: str) -> Traits:
    """Return what a text does."""
    return _remembered(text) if len(text) < LONG else _remembered.__wrapped__(text)


@lru_cache(512)
def _remembered(text: str) -> Traits:
    statements, other = (_statements(text, noise) for noise in _NOISES)
    return Traits(
        any(map(_REFUSED.match, statements + other)),
        not all(_READS.match(each) and not _MAY_WRITE.search(each) for each in statements),
        any(each[:10].upper() == "DEALLOCATE" for each in statements),
        any(each[:8].upper() in ("ROLLBACK", "RELEASE ") for each in statements),
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
