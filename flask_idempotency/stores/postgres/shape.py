"""The table as it is in the database, compared with the table as it should be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Column, Index, Table
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex

from .messages import Messages

_DIALECT = postgresql.dialect()  # type: ignore[no-untyped-call]

# What rows are stored in: the table itself, or its partitions.
_TABLE = """WITH pieces AS (
  SELECT oid::regclass::text AS name, relpersistence = 'u' AS unlogged,
         (SELECT option_value FROM pg_options_to_table(reloptions)
           WHERE option_name = 'fillfactor') AS fillfactor
    FROM pg_class
   WHERE oid = to_regclass(%(table)s) AND relkind <> 'p' OR oid IN (
         SELECT relid FROM pg_partition_tree(to_regclass(%(table)s)) WHERE isleaf))
SELECT ARRAY(SELECT ARRAY[attname, format_type(atttypid, atttypmod)] FROM pg_attribute
              WHERE attrelid = pg_class.oid AND attnum > 0 AND NOT attisdropped),
       ARRAY(SELECT ARRAY[indexrelid::regclass::text, indisunique::text,
                          (indisvalid AND indisready)::text,
                          coalesce(pg_get_expr(indpred, indrelid), ''),
                          (SELECT string_agg(coalesce(attname, '?'), ',' ORDER BY n)
                             FROM unnest(indkey::int2[]) WITH ORDINALITY AS place(number, n)
                             LEFT JOIN pg_attribute ON attrelid = indrelid AND attnum = number
                            WHERE n <= indnkeyatts)]
               FROM pg_index WHERE indrelid = pg_class.oid),
       ARRAY(SELECT ARRAY[name, unlogged::text, fillfactor] FROM pieces),
       relkind = 'p'
  FROM pg_class WHERE oid = to_regclass(%(table)s)"""


@dataclass(frozen=True, slots=True)
class FoundIndex:
    """An index of the table. ``where`` is the condition of a partial one, as PostgreSQL writes it."""

    name: str
    unique: bool
    valid: bool
    where: str
    columns: list[str]

    def serves_as(self, index: Index) -> bool:
        """Return True if it can stand for one of ours, whatever its name and further columns are."""
        return self.columns[:1] == [index.columns[0].name] and self.where == _where(index)


@dataclass(frozen=True, slots=True)
class Piece:
    """What rows are stored in, by its quoted name: the table itself, or a partition of it."""

    name: str
    unlogged: bool
    fillfactor: int | None


@dataclass(frozen=True, slots=True)
class Shape:
    """One of our tables as it is in the database; ``columns`` are types by name."""

    table: Table
    columns: dict[str, str]
    indexes: list[FoundIndex]
    pieces: list[Piece]
    partitioned: bool

    def missing_columns(self) -> list[Column[Any]]:
        """Return the columns that are not there."""
        return [column for column in self.table.columns if column.name not in self.columns]

    def other_columns(self) -> list[Column[Any]]:
        """Return the columns that are there, but of another type."""
        there = [column for column in self.table.columns if column.name in self.columns]
        return [column for column in there if self.columns[column.name] != _type(column)]

    def has_key(self) -> bool:
        """Return True if a valid index, which is not partial, prevents two rows of one key."""
        key = [column.name for column in self.table.primary_key]
        return any(
            found.unique and found.valid and not found.where and found.columns == key
            for found in self.indexes
        )

    def missing_indexes(self) -> list[Index]:
        """Return the indexes of ours, by name, for which no valid one serves."""
        valid = [found for found in self.indexes if found.valid]
        wanted = sorted(self.table.indexes, key=lambda index: str(index.name))
        return [index for index in wanted if not any(found.serves_as(index) for found in valid)]

    def mend(self, index: Index) -> str:
        """Return the statement that makes a missing index. Without partitions it blocks nobody.

        What an interrupted ``CREATE INDEX CONCURRENTLY`` has left is there, but not valid.
        """
        for found in self.indexes:
            if found.serves_as(index):
                return f"REINDEX INDEX CONCURRENTLY {found.name}"
        how = "CREATE INDEX" if self.partitioned else "CREATE INDEX CONCURRENTLY"
        return str(CreateIndex(index).compile(dialect=_DIALECT)).replace("CREATE INDEX", how, 1)


def shape_of(messages: Messages, table: Table) -> Shape | None:
    """Return one of the two tables as it is in the database, or None."""
    rows, _ = messages.operate(_TABLE, {"table": _DIALECT.identifier_preparer.format_table(table)})
    if not rows:
        return None
    columns, indexes, pieces, partitioned = rows[0]
    return Shape(
        table,
        dict(columns),
        [
            FoundIndex(name, unique == "true", valid == "true", where, fields.split(","))
            for name, unique, valid, where, fields in indexes
        ],
        [Piece(name, unlogged == "true", fill and int(fill)) for name, unlogged, fill in pieces],
        partitioned,
    )


def listed(columns: list[Column[Any]]) -> str:
    """Columns as a message names them."""
    return ", ".join(f"{column.name} {_type(column)}" for column in columns)


def _type(column: Column[Any]) -> str:
    """Return a column's type, in PostgreSQL's own spelling."""
    text: str = column.type.compile(_DIALECT).lower()
    return text.replace("varchar", "character varying")


def _where(index: Index) -> str:
    """Return the condition of a partial index, in PostgreSQL's own spelling."""
    where = index.dialect_options["postgresql"]["where"]
    if where is None:
        return ""
    return f"({where.compile(dialect=_DIALECT, compile_kwargs={'include_table': False})})"
