"""Settings that end with a transaction: the SQL that asks for them, and puts them back at a commit.

Inside an operation a commit of the view is a RELEASE, which ends no setting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


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
