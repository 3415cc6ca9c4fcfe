"""The SQL about what a transaction leaves behind: settings, the role, deferred constraints, locks.

Inside an operation, a ``COMMIT`` of the view is a RELEASE, which ends none of these. So statements of
our own, sent in front of the view's, put them right. The names of settings are read from the statements
that change them: the server takes half a millisecond to list its own settings, and does not list an
application's (``app.tenant``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flask_idempotency.drivers.sqltext import HARMLESS

STRICT = ("repeatable read", "serializable")
"""Levels of isolation at which a transaction keeps seeing what it saw first."""

CLOSE_CURSORS = """DO $idempotency$ BEGIN EXECUTE (
SELECT coalesce(string_agg(format('CLOSE %I', name), ';'), 'SELECT') FROM pg_cursors
 WHERE NOT is_holdable AND name <> ''); END $idempotency$"""
"""What a COMMIT does to open cursors: it keeps those WITH HOLD. That without a name is a driver's."""

_TEXTS = """(SELECT CASE prosrc WHEN '' THEN pg_get_functiondef(pg_proc.oid) ELSE prosrc END AS source
             FROM pg_proc JOIN pg_language ON pg_language.oid = prolang
            WHERE lanname NOT IN ('internal', 'c')
              AND pronamespace NOT IN (SELECT oid FROM pg_namespace
                           WHERE nspname IN ('pg_catalog', 'information_schema'))) AS texts"""
"""Those of the application's functions. A body in standard SQL is no text, and printed."""


def _set_in_functions(pattern: str) -> str:
    return f"""(SELECT array_agg(DISTINCT lower(found[1])) FROM (
           SELECT regexp_matches(source, '{pattern}', 'gi') AS found
             FROM {_TEXTS} WHERE source ~* '\\mset') AS functions
         WHERE found[1] ~ '^[[:alpha:]_]\\w*([.][[:alpha:]_]\\w*)+$' OR lower(found[1]) = 'role'
            OR lower(found[1]) IN (SELECT lower(name) FROM pg_settings
                                    WHERE context IN ('user', 'superuser')))"""


_CALL = "set_config\\s*\\(\\s*''"
_LASTING_CALL = "[\\w.]+''(?:::text)?\\s*,[^;()]*,\\s*false\\s*\\)"
_SET_LOCALLY = _set_in_functions(f"(?:{_CALL}(?!{_LASTING_CALL})|\\mset\\s+local\\s+)([\\w.]+)")
_SET_FOR_CONNECTION = _set_in_functions(
    f"(?:{_CALL}(?={_LASTING_CALL})"
    "|\\mset\\s+(?:session\\s+)?(?!local\\M|session\\M|role\\s*=))([\\w.]+)"
)

FUNCTIONS = f"SELECT {_SET_LOCALLY}, {_SET_FOR_CONNECTION}"
"""The settings that the application's functions change, as far as their texts name them: for the
transaction, or in a way that does not tell; and for the connection. A name may be none all the same,
such as one in a comment: nothing is set that has not changed."""

_ENDED_IN_FUNCTIONS = f"""(SELECT array_agg(DISTINCT
             CASE lower(found[2]) WHEN 'drop' THEN 'DROP TABLE' ELSE 'TRUNCATE' END
             || ' pg_temp.' || found[1])
           FROM (SELECT regexp_matches(source,
                    'create\\s+temp(?:orary)?\\s+table\\s+(?:if\\s+not\\s+exists\\s+)?'
                    '(?:pg_temp\\s*[.]\\s*)?(\\w+|"[^"]+")[^;]*'
                    '\\mon\\s+commit\\s+(drop|delete)', 'gi') AS found
             FROM {_TEXTS} WHERE source ~* '\\mon\\s+commit\\s+(drop|delete)') AS functions)"""

_DEFER_IN_FUNCTIONS = f"EXISTS (SELECT FROM {_TEXTS} WHERE source ~* '\\mset\\s+constraints\\M')"

_READS_MAY_WRITE = f"""EXISTS (SELECT FROM pg_proc
         WHERE provolatile = 'v' AND pronamespace NOT IN (SELECT oid FROM pg_namespace
                 WHERE nspname IN ('pg_catalog', 'information_schema') OR nspname ~ '^pg_temp')
           AND NOT EXISTS (SELECT FROM pg_depend AS part WHERE part.classid = 'pg_proc'::regclass
                              AND part.objid = pg_proc.oid AND part.deptype = 'e')
           AND (proname = ANY (string_to_array('{" ".join(sorted(HARMLESS))}', ' '))
             OR pronargs = 1 AND proargtypes[0] IN (SELECT oid FROM pg_type WHERE typtype = 'c')
             OR EXISTS (SELECT FROM pg_depend AS used
                         WHERE used.refclassid = 'pg_proc'::regclass AND used.refobjid = pg_proc.oid
                           AND used.classid IN ('pg_rewrite'::regclass, 'pg_operator'::regclass,
                 'pg_cast'::regclass, 'pg_constraint'::regclass, 'pg_policy'::regclass))))"""
"""Whether a function of the application's that may write is called by what looks like a read: by its
own name, if the server has one that only reads; as if it were a column (``row.function``); or by a
view, an operator, a cast, the check of a domain, or a policy."""

FACTS = f"""SELECT EXISTS (SELECT FROM pg_constraint WHERE condeferrable AND condeferred),
       EXISTS (SELECT FROM pg_constraint WHERE condeferrable AND NOT condeferred),
       current_setting('synchronous_commit'),
       current_setting('client_connection_check_interval', true),
       {_SET_LOCALLY}, {_SET_FOR_CONNECTION},
       {_READS_MAY_WRITE},
       {_ENDED_IN_FUNCTIONS}, {_DEFER_IN_FUNCTIONS}"""
"""Asked once for each engine: whether there are constraints that are checked at COMMIT by default, and
others that can be; two settings; which settings functions change; whether reads may write; what a
commit does to temporary tables of functions; and whether one chooses when constraints are checked."""

WHERE_TABLE_IS = """SELECT set_config('search_path', (SELECT reset_val FROM pg_settings
         WHERE name = 'search_path'), true), current_setting('search_path');
SELECT (SELECT format('%%I', nspname) FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
         WHERE pg_class.oid = to_regclass(%(table)s))"""
"""The schema of the table on the initial path of a connection, whatever a request left on it."""

WHERE_TABLE_IS_NOW = """SELECT (SELECT format('%%I', nspname) FROM pg_class
          JOIN pg_namespace ON pg_namespace.oid = relnamespace
         WHERE pg_class.oid = to_regclass(%(table)s))"""
"""The same on the present path: a listener may have set it when the connection was opened."""

_LOCKED = """EXISTS (SELECT FROM pg_locks LEFT JOIN pg_class ON pg_class.oid = relation
       WHERE pid = pg_backend_pid() AND granted AND (locktype = 'advisory'
          OR locktype = 'relation' AND mode <> 'AccessShareLock' AND relkind IS DISTINCT FROM 'S'))"""

EARLIER = f"""SELECT txid_current_if_assigned() IS NOT NULL,
       current_setting('transaction_isolation'),
       'on' IN (current_setting('transaction_read_only'), current_setting('transaction_deferrable')),
       EXISTS (SELECT FROM pg_cursors
                WHERE name <> '' AND (NOT is_holdable OR creation_time >= now())),
       {_LOCKED}"""
"""What a transaction that started before the view contains besides reads."""

HAS_WRITTEN = "SELECT txid_current_if_assigned() IS NOT NULL"
HAS_LOCKED = f"SELECT {_LOCKED}"
"""Whether a transaction that rolled back to a savepoint has changed or locked a row all the same.

It keeps the number that it was given for what was undone, and what it drew from sequences; but of the
locks, which each table that is written to has until the end, those are gone (Postgres manual,
"Explicit Locking").
"""


def did_more_than_read(*, above: int) -> str:
    """A question: whether the open unit has written or locked a row.

    A subtransaction that did either has its own number, as have all ``above`` it, and holds the lock
    on it until it ends (Postgres manual, "Subtransactions").
    """
    return (
        f"SELECT count(*) > {above} FROM pg_locks"
        " WHERE pid = pg_backend_pid() AND locktype = 'transactionid' AND mode = 'ExclusiveLock'"
    )


_HAS_LOCKS = """EXISTS (SELECT FROM pg_locks WHERE pid = pg_backend_pid() AND granted
    AND (locktype = 'advisory' OR locktype = 'relation'
         AND mode NOT IN ('AccessShareLock', 'RowShareLock', 'RowExclusiveLock')))"""


def would_lose(remembered: Iterable[str], *, locks: bool, above: int) -> str:
    """A question: whether the open unit has changed more than its savepoint's rollback may undo.

    That is a row, one of the settings that were ``remembered``, or (``locks``) a lock on a table or an
    advisory one; those that earlier units took count as well.
    """
    parts = [f"({did_more_than_read(above=above)})"]
    if locks:
        parts.append(_HAS_LOCKS)
    parts += map(_has_changed, sorted(remembered))
    return "SELECT " + " OR ".join(parts)


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
    calls = [f"set_config({_memory(name)}, '=' || {_present(name)}, true)" for name in sorted(names)]
    return "SELECT " + ", ".join(calls)


def settings_back(names: Iterable[str]) -> str:
    """A statement that restores them. The role first: it may forbid the others."""
    return "SELECT " + ", ".join(map(_back, sorted(names, key=lambda name: (name != "role", name))))


def _back(name: str) -> str:
    """Sets one only if it has changed: what nobody may set has not.

    A savepoint that was rolled back has lost both what was saved and what was set in it.
    """
    was = f"current_setting({_memory(name)}, true)"
    return (
        f"CASE WHEN {was} LIKE '=%' AND {was} <> '=' || {_present(name)}"
        f" THEN set_config({literal(name)}, substr({was}, 2), true) END"
    )


def _present(name: str) -> str:
    return f"coalesce(current_setting({literal(name)}, true), '')"


def end_temporary(endings: Iterable[str]) -> str:
    """A statement that does what a commit does to temporary tables, if they are there.

    Each is ``DROP TABLE`` or ``TRUNCATE``, and the table in ``pg_temp``. It is done in the name of the
    table's owner: a commit asks nobody's rights.
    """
    listed = ", ".join(map(literal, endings))
    return f"""DO $idempotency$ DECLARE ending text; made oid; role text := current_setting('role');
BEGIN FOREACH ending IN ARRAY ARRAY[{listed}] LOOP
  made := to_regclass(substring(ending from 'pg_temp.*'));
  IF made IS NOT NULL THEN
    PERFORM set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = made;
    EXECUTE ending;
    PERFORM set_config('role', role, true);
  END IF;
END LOOP; END $idempotency$"""


def have_changed(names: Iterable[str]) -> str:
    """A question: whether one of these settings is not what was remembered."""
    return "SELECT " + " OR ".join(map(_has_changed, sorted(names)))


def _has_changed(name: str) -> str:
    return f"current_setting({_memory(name)}, true) IS DISTINCT FROM '=' || {_present(name)}"


CHECK = ["SET CONSTRAINTS ALL IMMEDIATE"]
"""Every deferred check now, as in a COMMIT. All are then made at once from now on."""

CHECK_ALL_DEFERRED = [*CHECK, "SET CONSTRAINTS ALL DEFERRED"]
"""The same where all deferrable constraints are deferred by definition, and stay so."""

CHECK_ALONE = [
    "SAVEPOINT idempotency_check",
    *CHECK,
    "ROLLBACK TO idempotency_check",
    "RELEASE idempotency_check",
]
"""The same, and who is checked when is as before, which the server restores: no name can go stale, or
be out of a role's sight. The checks are made once more at COMMIT, and so is what triggers write."""


def current_settings(names: Iterable[str]) -> str:
    """A statement that asks for the values of settings, in the order of the sorted names."""
    return "SELECT " + ", ".join(map(_present, sorted(names)))


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
        return self._set(self.settings)

    @property
    def lasting(self) -> str:
        """A statement that sets what outlives a commit; empty if nothing does."""
        return self._set(self.for_connection)

    def _set(self, names: Iterable[str]) -> str:
        """The role last: it may forbid others. What is as it was is left alone: it may be forbidden."""
        calls = [
            f"CASE WHEN {literal(self.settings[name])} <> {_present(name)} THEN"
            f" set_config({literal(name)}, {literal(self.settings[name])},"
            f" {str(name not in self.for_connection).lower()}) END"
            for name in sorted(names, key=lambda name: (name == "role", name))
        ]
        return "SELECT " + ", ".join(calls) if calls else ""
