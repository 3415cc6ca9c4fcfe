"""What the five characters say that PostgreSQL gives each of its errors.

Messages and exception classes change with drivers and languages; these do not (Postgres manual,
appendix A).
"""

from __future__ import annotations

from typing import Any

from flask_idempotency.core.errors import sqlstate

SERIALIZATION_FAILURE = "40001"
DEADLOCK = "40P01"
ABORTED = "25P02"  # in_failed_sql_transaction
NO_SAVEPOINT = "3B001"


def base_of(error: BaseException | None) -> Any:
    """DB-API's class of all errors, of the driver that raised this one; None for any other error."""
    classes = type(error).__mro__ if hasattr(error, "diag") else ()
    return next((kind for kind in classes if kind.__name__ == "Error"), None)


def is_lost(error: BaseException | None, connection: Any = None) -> bool:
    """Return True if the connection is gone: nobody knows what an unanswered statement did."""
    if connection is not None and connection.closed:
        return True
    if base_of(error) is None:
        return False
    names = {kind.__name__ for kind in type(error).__mro__}
    if "InterfaceError" in names:
        return connection is None  # on an open one it is a mistake, such as a closed cursor
    code = sqlstate(error)
    return "OperationalError" in names and (code is None or code.startswith(("08", "57P")))
