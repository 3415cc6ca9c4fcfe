"""What an error of the database means for an operation, read from its SQLSTATE alone."""

from __future__ import annotations

from sqlalchemy import exc

from flask_idempotency.core.errors import (
    ConfigurationError,
    IdempotencyError,
    RecordBroken,
    StoreUnavailable,
    TransactionConflict,
    sqlstate,
)
from flask_idempotency.drivers.raw_connection import RawConnection
from flask_idempotency.stores.admin import original

ABORTED = "25P02"
SERIALIZATION_FAILURE = "40001"
CONFLICTS = frozenset({SERIALIZATION_FAILURE, "40P01"})  # and a deadlock
LOCK_NOT_AVAILABLE = "55P03"
QUERY_CANCELED = "57014"  # by a time-out, mostly
DIVISION_BY_ZERO = "22012"
READ_ONLY = "25006"  # a standby, or default_transaction_read_only

_UNAVAILABLE = (
    "08",  # connection exceptions
    READ_ONLY,
    "53",  # disk full, out of memory, too many connections
    "55P03",  # lock not available
    "57",  # admin shutdown, crash shutdown, query canceled by a timeout
    "58",  # system error
    "XX",  # internal error
)
NO_TABLE = ("42P01", "42703")  # undefined table, undefined column
NO_RIGHT = "42501"
UNREADABLE = ("22003", "22008", "22P05", "54001")  # a number, a time; in JSON: a NUL, too many levels


def is_lost(
    error: BaseException | None, kind: type[Exception], connection: RawConnection | None = None
) -> bool:
    """Return True if the connection is gone: nobody knows what an unanswered statement did.

    ``kind`` is the driver's class of all errors. What its messages and classes say changes with drivers
    and languages; the five characters do not (Postgres manual, appendix A).
    """
    if connection is not None and connection.is_lost():
        return True
    if not isinstance(error, kind):
        return False
    names = {each.__name__ for each in type(error).__mro__}
    if "InterfaceError" in names:
        return connection is None  # on an open one it is a mistake, such as a closed cursor
    code = sqlstate(error)
    return "OperationalError" in names and (code is None or code.startswith(("08", "57P")))


def problem(
    error: BaseException | None, kind: type[Exception], connection: RawConnection | None = None
) -> IdempotencyError | None:
    """The problem for an error that concerns the transaction as a whole, or None for any other.

    That is: it conflicted with another one and was rolled back, or its connection is lost.
    """
    driver_error = original(error)
    if sqlstate(driver_error) in CONFLICTS:
        return TransactionConflict()
    if isinstance(error, exc.DBAPIError) and error.connection_invalidated:
        return StoreUnavailable()
    return StoreUnavailable() if is_lost(driver_error, kind, connection) else None


def record_error(error: Exception, table: str, kind: type[Exception]) -> Exception:
    """The error to raise when a statement that reads or changes records failed, outside of a view.

    What we store ourselves can be read, so a value that cannot came from the record.
    """
    if sqlstate(original(error)) in UNREADABLE:
        return RecordBroken()
    return store_error(error, table, kind)


def store_error(error: Exception, table: str, kind: type[Exception]) -> Exception:
    """The error to raise when a statement of the store itself failed."""
    driver_error = original(error)
    code = sqlstate(driver_error) or ""
    if code in NO_TABLE:
        return ConfigurationError(
            f"the table {table} is missing or not up to date: run `flask idempotency create-table`,"
            " or make a migration (the table is part of db.metadata)"
        )
    if code == NO_RIGHT:
        return ConfigurationError(
            "the database user, or the role that a request has set with SET ROLE and left on its pooled"
            f" connection, may not use the table {table}: grant it SELECT, INSERT, UPDATE and DELETE,"
            " or reset the role with RESET ROLE"
        )
    if found := problem(error, kind):
        return found
    if isinstance(error, exc.TimeoutError) or code.startswith(_UNAVAILABLE):
        return StoreUnavailable()
    if isinstance(error, kind):
        # An error of the application that shows only at COMMIT, such as a deferred constraint. It
        # gets the class that SQLAlchemy would have raised, without the values of our statement.
        return exc.DBAPIError.instance("COMMIT", None, error, kind, hide_parameters=True)
    return error
