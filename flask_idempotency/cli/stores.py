"""Which store has which commands."""

from __future__ import annotations

from typing import cast

from flask_idempotency.core.errors import IdempotencyError
from flask_idempotency.core.ports import Records
from flask_idempotency.stores.admin import Admin
from flask_idempotency.stores.memory import MemoryRecords
from flask_idempotency.stores.postgres.admin import PostgresAdmin
from flask_idempotency.stores.postgres.records import PostgresRecords
from flask_idempotency.stores.redis.admin import RedisAdmin
from flask_idempotency.stores.redis.records import RedisRecords
from flask_idempotency.stores.sqlite.admin import SqliteAdmin
from flask_idempotency.stores.sqlite.records import SqliteRecords


def admin_of(records: Records, store: object) -> Admin:
    """Return what the commands need of a store; ``store`` is its setting.

    A store of the application's own has a method ``admin()``. Raises ``IdempotencyError`` for a store
    without commands.
    """
    if hasattr(records, "admin"):
        return cast("Admin", records.admin())
    match records:
        case PostgresRecords():
            return PostgresAdmin(records)
        case SqliteRecords():
            return SqliteAdmin(records)
        case RedisRecords():
            return RedisAdmin(records)
        case MemoryRecords():
            raise IdempotencyError(
                "the store 'memory' keeps its records in the process that serves the requests, where a"
                " command, which is another process, cannot reach them: set IDEMPOTENCY_STORE"
            )
    raise IdempotencyError(
        f"IDEMPOTENCY_STORE is {store!r}, which has no commands; a store of your own has them if it"
        " has a method admin(), see flask_idempotency.stores.admin"
    )
