"""The SQL about what a transaction leaves behind: settings, the role, deferred constraints, locks.

Inside an operation, a ``COMMIT`` of the view is a RELEASE, which ends none of these. So statements of
our own, sent in front of the view's, put them right. The names of settings are read from the statements
that change them: the server takes half a millisecond to list its own settings, and does not list an
application's (``app.tenant``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

STRICT = ("repeatable read", "serializable")
"""Levels of isolation at which a transaction keeps seeing what it saw first."""

CHECK = "SET CONSTRAINTS ALL IMMEDIATE"
"""Every deferred check now, as in a COMMIT."""

_SETS_IN_FUNCTIONS = """(SELECT array_agg(DISTINCT lower(found[1])) FROM (
           SELECT regexp_matches(prosrc,
                    '(?:set_config\\s*\\(\\s*''|\\mset\\s+(?:local\\s+|session\\s+)?)([\\w.]+)',
                    'gi') AS found
             FROM pg_proc JOIN pg_language ON pg_language.oid = prolang
            WHERE lanname NOT IN ('internal', 'c')
              AND pronamespace NOT IN (SELECT oid FROM pg_namespace
                                        WHERE nspname IN ('pg_catalog', 'information_schema'))
              AND prosrc ~* '\\mset') AS functions
         WHERE found[1] ~ '[.]\\w+$' OR lower(found[1]) IN (SELECT lower(name) FROM pg_settings)
            OR lower(found[1]) = 'role')"""

FUNCTIONS = f"SELECT {_SETS_IN_FUNCTIONS}"
"""The settings that the application's functions change, as far as their texts name them."""

FACTS = f"""SELECT current_setting('synchronous_commit'),
       current_setting('client_connection_check_interval', true),
       ARRAY(SELECT format('%I.%I', nspname, conname) FROM pg_constraint
               JOIN pg_namespace AS place ON place.oid = connamespace
              WHERE condeferrable AND condeferred AND has_schema_privilege(place.oid, 'USAGE')),
       EXISTS (SELECT FROM pg_constraint WHERE condeferrable AND NOT condeferred),
       {_SETS_IN_FUNCTIONS}"""
"""Asked once for each engine: two settings, the constraints that are checked at COMMIT by default,
whether there are other deferrable ones, and which settings functions change."""

WHERE_TABLE_IS = """SELECT set_config('search_path', (SELECT reset_val FROM pg_settings
         WHERE name = 'search_path'), true), current_setting('search_path');
SELECT (SELECT format('%%I', nspname) FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
         WHERE pg_class.oid = to_regclass(%(table)s))"""
"""The schema of the table on the initial path of a connection, whatever a request left on it."""

WHERE_TABLE_IS_NOW = """SELECT (SELECT format('%%I', nspname) FROM pg_class
          JOIN pg_namespace ON pg_namespace.oid = relnamespace
         WHERE pg_class.oid = to_regclass(%(table)s))"""
"""The same on the present path: a listener may have set it when the connection was opened."""

EARLIER = """SELECT txid_current_if_assigned() IS NOT NULL,
       current_setting('transaction_isolation'),
       'on' IN (current_setting('transaction_read_only'), current_setting('transaction_deferrable')),
       EXISTS (SELECT FROM pg_cursors),
       EXISTS (SELECT FROM pg_locks WHERE pid = pg_backend_pid() AND granted
                  AND (locktype = 'advisory' OR locktype = 'relation' AND mode <> 'AccessShareLock'))"""
"""What a transaction that started before the view contains besides reads."""

HAS_WRITTEN = "SELECT txid_current_if_assigned() IS NOT NULL"

DID_MORE_THAN_READ = """SELECT count(*) > 1 FROM pg_locks
 WHERE pid = pg_backend_pid() AND locktype = 'transactionid' AND mode = 'ExclusiveLock'"""
"""Whether the open unit has written or locked a row. A subtransaction that did either has its own
number, and holds the lock on it until it ends (Postgres manual, "Subtransactions")."""


def literal(text: str) -> str:
    """The text as an SQL literal, however the server treats backslashes."""
    quoted = text.replace("'", "''")
    if "\\" not in quoted:
        return f"'{quoted}'"
    return "E'" + quoted.replace("\\", "\\\\") + "'"


def _memory(name: str) -> str:
    """The setting that keeps another one's value until the end of the unit."""
    return literal("idempotency.was_" + name.replace(".", "__"))


def remember(names: Iterable[str]) -> str:
    """A statement that saves settings before a statement of the view changes them."""
    calls = [
        f"set_config({_memory(name)}, '=' || coalesce(current_setting({literal(name)}, true), ''),"
        " true)"
        for name in sorted(names)
    ]
    return "SELECT " + ", ".join(calls)


def settings_back(names: Iterable[str]) -> str:
    """A statement that restores them. The role first: it may forbid the others.

    A savepoint that was rolled back has lost both what was saved and what was set in it.
    """
    calls = [
        f"set_config({literal(name)}, CASE WHEN current_setting({_memory(name)}, true) LIKE '=%'"
        f" THEN substr(current_setting({_memory(name)}), 2) ELSE current_setting({literal(name)}, true)"
        " END, true)"
        for name in sorted(names, key=lambda name: (name != "role", name))
    ]
    return "SELECT " + ", ".join(calls)


def constraints_back(deferred: tuple[str, ...], *, others: bool) -> list[str]:
    """Statements after :data:`CHECK`, for each constraint to be checked when its definition says."""
    if not deferred:
        return []
    return [f"SET CONSTRAINTS {', '.join(deferred) if others else 'ALL'} DEFERRED"]


def current_settings(names: Iterable[str]) -> str:
    """A statement that asks for the values of settings, in the order of the sorted names."""
    return "SELECT " + ", ".join(
        f"coalesce(current_setting({literal(name)}, true), '')" for name in sorted(names)
    )


@dataclass(frozen=True)
class Carried:
    """The settings of another transaction: values by name, and which are for the connection."""

    settings: Mapping[str, str]
    for_connection: frozenset[str]

    @property
    def for_transaction(self) -> frozenset[str]:
        """The others."""
        return frozenset(self.settings) - self.for_connection

    @property
    def everything(self) -> str:
        """A statement that sets all of it."""
        return carried(self.settings, self.for_connection)

    @property
    def lasting(self) -> str:
        """A statement that sets what outlives a commit; empty if nothing does."""
        left = {name: self.settings[name] for name in self.settings if name in self.for_connection}
        return carried(left, self.for_connection) if left else ""


def carried(settings: Mapping[str, str], for_connection: frozenset[str]) -> str:
    """A statement that sets what another transaction had set; the role last: it may forbid others."""
    calls = [
        f"set_config({literal(name)}, {literal(value)}, {str(name not in for_connection).lower()})"
        for name, value in sorted(settings.items(), key=lambda item: (item[0] == "role", item))
    ]
    return "SELECT " + ", ".join(calls)
