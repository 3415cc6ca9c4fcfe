"""Adding to the tables of an earlier release what this one has, while requests use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import Column, Index, Table
from sqlalchemy.schema import CreateColumn, SetColumnComment

from flask_idempotency.core.errors import ConfigurationError, StoreUnavailable, sqlstate
from flask_idempotency.stores.table import FILLFACTOR
from flask_idempotency.stores.table_admin import unsound

from .failures import LOCK_NOT_AVAILABLE
from .messages import Messages
from .shape import Shape, compiled, create_index, preparer, shape_of

TRIES, PAUSE_SECONDS = 30, 1.0
"""How often a column is tried to be added. Half a minute finds a moment without a view in all but an
application whose views run for longer than the lock is waited for, and always overlap."""

# A tenth of a second: while this waits, requests queue behind it, and they wait for 250 ms at most.
_LOCK = "SET LOCAL lock_timeout = '100ms';\n"


def upgrade(messages: Messages, table: Table, sleep: Callable[[float], object]) -> Iterator[str]:
    """Add the columns, indexes and fill factor that a table lacks; say what was done.

    ``sleep`` is called between two tries to lock the table. Raises ``ConfigurationError`` if something
    must be changed rather than added, or if the table is never free.
    """
    shape = _sound(messages, table)
    for column in shape.missing_columns():
        _add(messages, column, sleep)
        yield f"added the column {column.name}"
    for index in shape.missing_indexes():
        _create(messages, shape, index)
        yield f"created the index {index.name}"
    for piece in shape.pieces:
        if piece.fillfactor is None and table.dialect_options["postgresql"]["using"]:
            messages.run(f"ALTER TABLE {piece.name} SET (fillfactor = {FILLFACTOR})")
            yield f"set the fill factor of {piece.name} to {FILLFACTOR}"


def _sound(messages: Messages, table: Table) -> Shape:
    """The table as it is. Raises ``ConfigurationError`` if adding is not enough."""
    shape = shape_of(messages, table)
    if shape is None or not shape.has_key() or shape.other_columns():
        raise unsound(table)
    if not all(column.nullable for column in shape.missing_columns()):
        raise unsound(table)
    return shape


def _add(messages: Messages, column: Column[Any], sleep: Callable[[float], object]) -> None:
    """Add a column that may be null, which takes a moment in which nobody else uses the table."""
    what, comment = compiled(CreateColumn(column)), compiled(SetColumnComment(column))
    name = preparer.format_table(column.table)
    statement = f"{_LOCK}ALTER TABLE {name} ADD COLUMN IF NOT EXISTS {what};\n{comment}"
    for _ in range(TRIES):
        try:
            messages.run(statement)
        except StoreUnavailable as error:
            if sqlstate(error.__cause__) != LOCK_NOT_AVAILABLE:
                raise
            sleep(PAUSE_SECONDS)
        else:
            return
    raise ConfigurationError(
        f"{column.table.fullname} is always held by some transaction, so no column can be added: end"
        " those that are long (pg_stat_activity shows them), or run this at a quieter time"
    )


def _create(messages: Messages, shape: Shape, index: Index) -> None:
    """Create an index, which blocks nobody. Raises ``ConfigurationError`` for a partitioned table."""
    if shape.partitioned:
        raise ConfigurationError(
            f"{shape.table.fullname} has partitions, where an index can only be made with writes"
            f" blocked meanwhile: {create_index(index)}"
        )
    for found in shape.indexes:
        if not found.valid and found.serves_as(index):
            messages.run(f"DROP INDEX CONCURRENTLY IF EXISTS {found.name}")
    messages.run(create_index(index, " CONCURRENTLY IF NOT EXISTS"))
