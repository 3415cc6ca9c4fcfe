"""How the background purge deletes expired records, in each store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

from flask_idempotency.core.ports import Records

from .admin import Admin
from .memory import MemoryRecords
from .postgres.admin import PostgresAdmin
from .postgres.records import PostgresRecords
from .sqlite.admin import SqliteAdmin
from .sqlite.records import SqliteRecords

Purge = Callable[[int], Iterator[int]]


def purge_of(records: Records) -> Purge | None:
    """Return what deletes expired records in batches; None: the store does it itself.

    So does Redis. A store of the application's own has an ``admin()``, or is left alone.
    """
    if hasattr(records, "admin"):
        return cast("Admin", records.admin()).purge
    match records:
        case PostgresRecords():
            return PostgresAdmin(records).purge_alone
        case SqliteRecords():
            return SqliteAdmin(records).purge
        case MemoryRecords():
            return records.purge
    return None
