"""Settings that end with a transaction: the SQL that saves them, and puts them back at a commit.

Inside an operation a commit of the view is a RELEASE, which ends no setting.
"""

from __future__ import annotations

from collections.abc import Iterable


def literal(text: str) -> str:
    """The text as an SQL literal, however the server treats backslashes."""
    quoted = text.replace("'", "''")
    return f"'{quoted}'" if "\\" not in quoted else "E'" + quoted.replace("\\", "\\\\") + "'"


def _memory(name: str) -> str:
    return literal("idempotency.was_" + name.replace(".", "__"))


def _present(name: str) -> str:
    return f"coalesce(current_setting({literal(name)}, true), '')"


def save(names: Iterable[str]) -> str:
    """A statement that saves settings before a statement of the view changes them."""
    calls = [f"set_config({_memory(name)}, '=' || {_present(name)}, true)" for name in sorted(names)]
    return "SELECT " + ", ".join(calls)


def put_back(names: Iterable[str]) -> str:
    """A statement that restores them, the role first: it may forbid the others.

    One is set only if it has changed: what nobody may set has not. A savepoint that was rolled back has
    lost both what was saved and what was set in it.
    """
    calls = []
    for name in sorted(names, key=lambda name: (name != "role", name)):
        was = f"current_setting({_memory(name)}, true)"
        calls.append(
            f"CASE WHEN {was} LIKE '=%' AND {was} <> '=' || {_present(name)}"
            f" THEN set_config({literal(name)}, substr({was}, 2), true) END"
        )
    return "SELECT " + ", ".join(calls)
