"""What a statement does, read from its text: enough to refuse what would break a promise.

A message may hold several statements. Literals, quoted names and comments are taken out first, in
one pass from left to right, so that nothing inside them is taken for a statement.
"""

from __future__ import annotations

import re

_NOISE = re.compile(
    r"--[^\n]*"
    r"|/\*.*?(?:\*/|\Z)"
    r"|\b[eE]'(?:[^'\\]|\\.|'')*(?:'|\Z)"
    r"|'[^']*(?:'|\Z)"
    r'|"[^"]*(?:"|\Z)'
    r"|\$(?P<tag>[A-Za-z_]\w*|)\$.*?(?:\$(?P=tag)\$|\Z)",
    re.DOTALL,
)
_SUSPECT = re.compile(r"\b(?:COMMIT|END|ABORT|ROLLBACK|BEGIN|START|PREPARE)\b", re.IGNORECASE)
_ENDS = re.compile(
    r"(?:COMMIT|END|ABORT|BEGIN|START\s+TRANSACTION|PREPARE\s+TRANSACTION"
    r"|ROLLBACK(?!\s+(?:(?:WORK|TRANSACTION)\s+)?TO\b))\b",
    re.IGNORECASE,
)
_READS = re.compile(
    r"[\s(]*(?:SELECT|SHOW|EXPLAIN|VALUES|TABLE|SET|RESET|DECLARE|FETCH|MOVE|CLOSE|PRAGMA"
    r"|SAVEPOINT|RELEASE|ROLLBACK|COMMIT|BEGIN|START|WITH(?!.*\b(?:INSERT|UPDATE|DELETE|MERGE)\b))\b",
    re.IGNORECASE | re.DOTALL,
)


def _statements(text: str) -> list[str]:
    return [part.strip() for part in _NOISE.sub(" ", text).split(";") if part.strip()]


def ends_transaction(text: str) -> bool:
    """Whether a statement of the message begins, ends or prepares a transaction.

    ``ROLLBACK TO`` a savepoint does not.
    """
    if _SUSPECT.search(text) is None:  # nearly always, and much cheaper
        return False
    return any(_ENDS.match(statement) for statement in _statements(text))


def may_write(text: str) -> bool:
    """Whether a statement of the message is any other than a plain read."""
    return not all(_READS.match(statement) for statement in _statements(text))
