"""The table as it is in the database, compared with the table as it should be."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Index, Table
from sqlalchemy.dialects import postgresql

from .messages import Messages

preparer = postgresql.dialect().identifier_preparer  # type: ignore[no-untyped-call]

# Partial indexes are left out: they serve neither ON CONFLICT (key) nor the purge. Ours has a name.
_TABLE = """WITH indexes AS (
  SELECT indexrelid::regclass::text AS name, indisunique, indisvalid AND indisready AS valid,
         ARRAY(SELECT attname::text
                 FROM unnest(indkey::int2[]) WITH ORDINALITY AS place(attnum, n)
                 JOIN pg_attribute USING (attnum)
                WHERE attrelid = indrelid AND n <= indnkeyatts ORDER BY n) AS columns
    FROM pg_index WHERE indrelid = to_regclass(%(table)s) AND indpred IS NULL)
SELECT ARRAY(SELECT attname || ' ' || format_type(atttypid, atttypmod) FROM pg_attribute
              WHERE attrelid = pg_class.oid AND attnum > 0 AND NOT attisdropped),
       EXISTS (SELECT FROM indexes WHERE indisunique AND valid AND columns = %(key)s),
       EXISTS (SELECT FROM indexes WHERE valid AND columns[1] = 'expires_at'),
       ARRAY(SELECT name FROM indexes WHERE NOT valid AND columns[1] = 'expires_at'),
       (SELECT option_value::int FROM pg_options_to_table(reloptions)
         WHERE option_name = 'fillfactor'),
       relpersistence = 'u',
       EXISTS (SELECT FROM pg_index WHERE indisvalid AND indexrelid = to_regclass(%(resumable)s)),
       EXISTS (SELECT FROM pg_index WHERE indisvalid AND indexrelid = to_regclass(%(leased)s))
  FROM pg_class WHERE oid = to_regclass(%(table)s)"""


@dataclass(frozen=True, slots=True)
class Shape:
    """The table as it is in the database.

    ``columns`` are names and types; ``has_key`` and ``has_expiry`` say whether a valid index keeps
    keys unique, and another is on ``expires_at``; ``broken`` names indexes on it that are not valid.
    ``has_resumable`` is for the index that ``resume`` reads, ``has_leased`` for that of the operations
    with a lease. The table of steps has the first only.
    """

    columns: list[str]
    has_key: bool
    has_expiry: bool
    broken: list[str]
    fillfactor: int | None
    unlogged: bool
    has_resumable: bool
    has_leased: bool


def shape_of(messages: Messages, table: Table) -> Shape | None:
    """One of the two tables as it is in the database, or None."""
    resumable, leased = (
        preparer.format_index(index_on(messages.table, column))
        for column in ("created_at", "lease_expires_at")
    )
    names = {
        "table": preparer.format_table(table),
        "key": [column.name for column in table.primary_key],
        "resumable": _beside(table, resumable),
        "leased": _beside(table, leased),
    }
    row = messages.run(_TABLE, names)[0]
    return None if row is None else Shape(*row)


def index_on(table: Table, column: str) -> Index:
    """The index of ours that begins with a column."""
    return next(index for index in table.indexes if index.columns[0].name == column)


def _beside(table: Table, index: str) -> str:
    """The name of an index with the schema of its table."""
    return f"{preparer.quote(table.schema)}.{index}" if table.schema else index


def wrong_columns(table: Table, shape: Shape) -> str:
    """The columns that are missing or of another type."""
    wanted = []
    for column in table.columns:
        kind = column.type.compile(postgresql.dialect()).lower()  # type: ignore[no-untyped-call]
        wanted.append(f"{column.name} {kind.replace('varchar', 'character varying')}")
    return ", ".join(column for column in wanted if column not in shape.columns)
