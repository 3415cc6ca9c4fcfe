"""What a statement does, read from its text: enough to refuse what would break a guarantee.

A message may hold several statements. One pass from left to right removes literals, quoted names and
comments first, so that nothing inside them counts as a statement.

A text cannot tell everything: a function may write, lock or set something that its call does not show.
Then :func:`traits_of` says ``UNSURE``, and whoever needs to know asks the server.
"""

from __future__ import annotations

import re
from functools import partial
from sys import getsizeof
from typing import Any

READS = 0
"""Nothing but reads of tables: no trait at all."""
UNSURE = 1
"""Calls a function that is not known to only read."""
WRITES = 2
"""May change data or definitions, or is anything other than a read."""
LOCKS = 4
"""Takes a lock that outlasts the statement: on rows, on a table, or an advisory one."""
SETS = 8
"""Changes a setting or the role, for the transaction or the connection."""
CONSTRAINTS = 16
"""Says when constraints are checked (``SET CONSTRAINTS``), or creates one that can be deferred."""
ON_COMMIT = 32
"""Creates a temporary table that the end of the transaction empties or drops."""
CURSOR = 64
"""Opens a cursor that later statements read."""
SIGNALS = 128
"""``NOTIFY``, ``LISTEN`` or ``UNLISTEN``."""
SAVEPOINT = 256
"""Sets, releases or rolls back to a savepoint."""
SUSPECT = 512
"""Contains a word that could end a transaction: ask :func:`ends_transaction`. Nearly always false."""

LONG = 10_000
"""Characters of a text that is not worth remembering: it holds its values, so it comes but once."""
MOST = 4_000_000
"""Bytes of all remembered texts together. When there are more, all are forgotten."""

_QUOTED = r"""|"[^"]*(?:"|\Z)|(?<![\w$])\$(?P<tag>[A-Za-z_]\w*|)\$.*?(?:\$(?P=tag)\$|\Z)"""
_ESCAPED = r"'(?:[^'\\]|\\.|'')*(?:'|\Z)"
_NOISE = re.compile(rf"--[^\n\r]*|/\*|\b[eE]{_ESCAPED}|'[^']*(?:'|\Z)" + _QUOTED, re.DOTALL)
_NOISE_WITH_BACKSLASHES = re.compile(rf"--[^\n\r]*|/\*|{_ESCAPED}" + _QUOTED, re.DOTALL)
_PLACE = re.compile(r"%\(\w+\)s(?:::\w+)?")
_COMMENT_EDGE = re.compile(r"/\*|\*/")

_sql = partial(re.compile, flags=re.IGNORECASE | re.DOTALL)

_SUSPECT = _sql(r"\b(?:COMMIT|END|ABORT|ROLLBACK|BEGIN|START|PREPARE)\b")
_ENDS = _sql(
    r"(?:COMMIT|END|ABORT|BEGIN|START\s+TRANSACTION|PREPARE\s+TRANSACTION"
    r"|ROLLBACK(?!\s+(?:(?:WORK|TRANSACTION)\s+)?TO\b))\b"
)
_READS = _sql(
    r"[\s(]*(?:SELECT|SHOW|EXPLAIN|VALUES|TABLE|SET|RESET|DECLARE|FETCH|MOVE|CLOSE|PRAGMA"
    r"|SAVEPOINT|RELEASE|ROLLBACK|COMMIT|BEGIN|START|WITH(?!.*\b(?:INSERT|UPDATE|DELETE|MERGE)\b))\b"
)

_SELECTS = _sql(r"[\s(]*(?:SELECT|VALUES|TABLE|WITH)\b")
_SAVEPOINT = _sql(
    r"(?P<verb>SAVEPOINT|RELEASE|ROLLBACK)\s+(?:(?:WORK|TRANSACTION)\s+)?(?:TO\s+)?(?:SAVEPOINT\s+)?"
    r'(?P<name>\w+|"[^"]+")$'
)
_PLAIN_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_TRAITS = _sql(
    r"(?:\b(?P<writes>INSERT|DELETE|MERGE|INTO|(?<!FOR )(?<!KEY )UPDATE)\b"
    r"|\bFOR\s+(?P<locks>UPDATE|NO\s+KEY|SHARE|KEY\s+SHARE)\b"
    r"|(?P<qualified>\.\s*)?\b(?P<call>[A-Za-z_][\w$]*)\s*\()"
)
_BY_FIRST_WORD = (
    (_sql(r"SET\s+CONSTRAINTS\b"), CONSTRAINTS),
    (_sql(r"(?:SET|RESET|DISCARD\s+ALL)\b"), SETS),
    (_sql(r"LOCK\b"), LOCKS),
    (_sql(r"(?:NOTIFY|LISTEN|UNLISTEN)\b"), SIGNALS),
    (_sql(r"DECLARE\b.*\bWITH\s+HOLD\b"), UNSURE),
    (_sql(r"DECLARE\b"), CURSOR | UNSURE),
    (_sql(r"(?:FETCH|MOVE|CLOSE)\b"), CURSOR),
    (_sql(r"(?:SHOW|PRAGMA)\b"), READS),
)
_DEFERS = _sql(r"\bDEFERR(?:ABLE|ED)\b")
_ENDS_WITH_COMMIT = _sql(r"\bON\s+COMMIT\s+(?:DELETE\s+ROWS|DROP)\b")

# Keywords that precede a parenthesis, types with a length, and functions of the server that only read
# (or that a rollback does not undo either, as those of sequences).
_HARMLESS_WORDS = """
abs age all and any array array_agg array_length array_position as ascii avg between bigint bit
bool_and bool_or btrim by cardinality case cast ceil ceiling changes char char_length character
check chr clock_timestamp coalesce col_description concat concat_ws count cume_dist
current_database current_schema current_schemas current_setting currval date date_bin date_part
date_trunc datetime decimal decode dense_rank distinct div else encode every exists exp extract
filter first_value float floor format from gcd gen_random_uuid generate_series greatest group
group_concat grouping having ifnull ilike in initcap instr interval is isfinite join json_agg
json_array_elements json_build_array json_build_object json_object_agg json_typeof jsonb_agg
jsonb_array_elements jsonb_build_array jsonb_build_object jsonb_object_agg jsonb_set
jsonb_typeof julianday key lag last_value lastval lead least left length like limit ln log lower
lpad ltrim make_date max md5 min mod nextval not now ntile null nullif numeric octet_length of
offset on or order over overlay partition percent_rank pg_backend_pid pg_current_xact_id
pg_current_xact_id_if_assigned pg_sleep pg_typeof position power quote_ident quote_literal
random rank regexp_match regexp_matches regexp_replace regexp_split_to_table repeat replace
reverse right round row row_number row_to_json rows rpad rtrim select set sets sign similar some
split_part sqrt stddev strftime string_agg string_to_array strpos substr substring sum table
then time timestamp to to_char to_date to_json to_jsonb to_number to_regclass to_timestamp
to_tsquery to_tsvector total transaction_timestamp translate trim trunc txid_current
txid_current_if_assigned typeof union unnest upper using uuid_generate_v4 values varchar
variance varying version when where width_bucket window with within
"""
HARMLESS = frozenset(_HARMLESS_WORDS.split())
_CALLS = {
    "set_config": SETS,
    "pg_export_snapshot": LOCKS,
    "pg_notify": SIGNALS,
    **{
        f"pg_{tries}advisory_{ends}lock{shared}": LOCKS
        for tries in ("", "try_")
        for ends in ("", "xact_")
        for shared in ("", "_shared")
    },
}

_NAME = r"(?P<name>TIME\s+ZONE\b|SESSION\s+AUTHORIZATION\b|[\w.$]+|\"[^\"]+\")"
_SET = _sql(
    r"SET\s+(?:SESSION\s+(?!AUTHORIZATION\b|CHARACTERISTICS\b))?"
    rf"(?!LOCAL\b|TRANSACTION\b|CONSTRAINTS\b|SESSION\s+CHARACTERISTICS\b){_NAME}"
)
_SET_LOCAL = _sql(rf"SET\s+LOCAL\s+{_NAME}")
_RESET = _sql(r"(?:RESET\s+(?P<name>SESSION\s+AUTHORIZATION\b|[\w.$]+)|DISCARD\s+ALL)")
_SET_CONFIG = _sql(
    r"\bset_config\s*\(\s*'(?P<name>[^']+)'(?:::\w+)?\s*,\s*(?:[^()']|'(?:[^']|'')*'|\([^()]*\))*?"
    r",\s*'?(?P<local>[A-Za-z01]+)'?(?:::\w+)?\s*\)"
)
_ANY_SET_CONFIG = _sql(r"\bset_config\s*\(")
_ISOLATION = _sql(
    r"SET\s+(?:LOCAL\s+|SESSION\s+)?(?:TRANSACTION\b"
    r"|CHARACTERISTICS\b|TRANSACTION_(?:ISOLATION|DEFERRABLE)\b|DEFAULT_TRANSACTION_\w+)"
)
_FALSE = frozenset({"f", "false", "n", "no", "off", "0", "of", "fa", "fal", "fals"})
_OTHER_NAMES = {
    "time zone": "timezone",
    "names": "client_encoding",
    "session authorization": "session_authorization",
    "all": "*",
}

_DO = _sql(r"\s*DO\b")
_DOLLARS = re.compile(r"\$\w*\$")
_BLOCK_WORDS = _sql(r"\b(?:BEGIN|THEN|ELSE|LOOP|PERFORM)\b")
_SETS_SOMETHING = _sql(r"\bset_config\b|\bSET\s+\w")

_ENDED_TABLE = _sql(
    r"CREATE\s+(?:(?:LOCAL|GLOBAL)\s+)?TEMP(?:ORARY)?\s+TABLE\s+(?:IF\s+NOT\s+EXISTS\s+)?"
    r"(?:pg_temp\s*\.\s*)?(?P<name>\w+|\"[^\"]+\")[^;]*?\bON\s+COMMIT\s+(?P<end>DROP|DELETE)\b"
)


_QUOTED_NAME = "quoted_"
"""Stands for a quoted name: what it calls is not known."""


def without_noise(text: str, *, backslashes: bool = False) -> str:
    """The text without comments (which nest in PostgreSQL) and literals; a name for each quoted one."""
    noise = _NOISE_WITH_BACKSLASHES if backslashes else _NOISE
    kept, place = [], 0
    while (found := noise.search(text, place)) is not None:
        kept.append(text[place : found.start()])
        place = found.end()
        if found.group()[0] == '"':
            kept.append(_QUOTED_NAME)
        elif found.group() == "/*":
            depth = 1
            while depth and (edge := _COMMENT_EDGE.search(text, place)) is not None:
                depth += 1 if edge.group() == "/*" else -1
                place = edge.end()
            if depth:
                place = len(text)
    kept.append(text[place:])
    return " ".join(kept)


def _statements(text: str, *, backslashes: bool = False) -> list[str]:
    parts = without_noise(text, backslashes=backslashes).split(";")
    return [part.strip() for part in parts if part.strip()]


def ends_transaction(text: str, *, backslashes: bool = False) -> bool:
    """Return True if a statement of the message begins, ends or prepares a transaction.

    ``ROLLBACK TO`` a savepoint does not. The ``END`` of a function's ``BEGIN ATOMIC`` counts, as no
    application was seen to create such a function in a request. ``backslashes`` says that a backslash
    escapes in every literal, as on a server with ``standard_conforming_strings = off``.
    """
    if _SUSPECT.search(text) is None:
        return False
    return any(_ENDS.match(part) for part in _statements(text, backslashes=backslashes))


def may_write(text: str) -> bool:
    """Return True if a statement of the message is anything but a plain read."""
    return not all(_READS.match(statement) for statement in _statements(text))


class Room:
    """How much room is left for texts that are remembered."""

    left = MOST

    def takes(self, text: str, remembered: set[Any] | dict[Any, Any]) -> bool:
        """Return True if a text may join those ``remembered``; too many are forgotten."""
        if len(text) >= LONG:
            return False
        size = getsizeof(text)
        if size > self.left:
            remembered.clear()
            self.left = MOST
        self.left -= size
        return True


class _Traits(dict[str, int]):
    """The traits of texts: a look-up, as it is asked for each statement, and a call would be felt."""

    def __init__(self) -> None:
        self._room = Room()

    def __missing__(self, text: str) -> int:
        traits = traits_of(text)
        if self._room.takes(text, self):
            self[text] = traits
        return traits


TRAITS = _Traits()
"""What :func:`traits_of` says of a text, which is remembered."""


def traits_of(text: str) -> int:
    """Return what the message may do besides reading tables: the sum of the constants above."""
    if len(text) >= LONG:  # many rows in one statement: the places of their values are most of it
        text = _PLACE.sub("?", text)
    traits = READS if _SUSPECT.search(text) is None else SUSPECT
    for statement in _statements(text):
        traits |= _traits_of_statement(statement)
        if _DO.match(statement):
            traits |= UNSURE | (SETS if _SETS_SOMETHING.search(text) else READS)
            traits |= ON_COMMIT if _ENDS_WITH_COMMIT.search(text) else READS
    if traits & WRITES and _DEFERS.search(text) is not None:
        traits |= CONSTRAINTS
    return traits


def _traits_of_statement(statement: str) -> int:
    for pattern, traits in _BY_FIRST_WORD:
        if pattern.match(statement):
            return traits
    if _SAVEPOINT.match(statement):
        return SAVEPOINT
    traits = READS if _SELECTS.match(statement) else WRITES
    if traits and _ENDS_WITH_COMMIT.search(statement) is not None:
        traits |= ON_COMMIT
    for found in _TRAITS.finditer(statement):
        call = found["call"]
        if found["writes"]:
            traits |= WRITES
        elif found["locks"]:
            traits |= LOCKS
        elif call is not None and (found["qualified"] or call.lower() not in HARMLESS):
            traits |= _CALLS.get(call.lower(), UNSURE)
    return traits


def savepoint_of(text: str) -> tuple[str, str] | None:
    """Verb (``SAVEPOINT``, ``RELEASE``, ``ROLLBACK``) and name, if the message is nothing else.

    The name is written as PostgreSQL keeps it: in lower case, unless it was quoted.
    """
    found = _SAVEPOINT.match(text.strip())
    if found is None:
        return None
    name = found["name"]
    plain = name[1:-1] if name[0] == '"' else name.lower()
    return found["verb"].upper(), plain if _PLAIN_NAME.fullmatch(plain) else f'"{plain}"'


def settings_of(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """The settings that the message changes: for the connection, and for the transaction.

    In lower case; ``*`` for all of the connection, or one of the transaction whose name is not in the
    text. Those that a function on the server sets are not among them. The
    message must contain its values.
    """
    session: set[str] = set()
    local: set[str] = set()
    if _DO.match(text):
        text = _DOLLARS.sub(";", _BLOCK_WORDS.sub(";", text))
    calls = [*_SET_CONFIG.finditer(text)]
    for call in calls:
        (session if call["local"].lower() in _FALSE else local).add(call["name"])
    if len(calls) < len(_ANY_SET_CONFIG.findall(text)):
        local.add("*")
    for statement in _statements(_keep_names(text)):
        if (found := _SET.match(statement) or _RESET.match(statement)) is not None:
            session.add(found["name"] or "*")
        elif (found := _SET_LOCAL.match(statement)) is not None:
            local.add(found["name"])
    return _plain(session), _plain(local)


def chooses_isolation(text: str) -> bool:
    """Return True if the message chooses how its transaction is isolated, or that it only reads."""
    return any(_ISOLATION.match(statement) for statement in _statements(text))


def _plain(names: set[str]) -> frozenset[str]:
    plain = (" ".join(name.strip('"').lower().split()) for name in names)
    return frozenset(_OTHER_NAMES.get(name, name) for name in plain)


def _keep_names(text: str) -> str:
    """The text with quoted names bare, so that they are not removed with the literals."""
    return re.sub(r'"([\w.$]+)"', r"\1", text)


def temporary_endings(text: str) -> list[str]:
    """Return what a commit does to the temporary tables that the message makes, as statements."""
    return [
        f"{'DROP TABLE' if found['end'].upper() == 'DROP' else 'TRUNCATE'} pg_temp.{found['name']}"
        for found in _ENDED_TABLE.finditer(text)
    ]
