"""What the errors of PostgreSQL and its drivers mean for a record."""

from __future__ import annotations

from sqlalchemy import Table, exc

from flask_idempotency.core.errors import (
    ConfigurationError,
    RecordBroken,
    StoreUnavailable,
    TransactionConflict,
    sqlstate,
)
from flask_idempotency.stores.admin import MISSING, original
from flask_idempotency.stores.holds import CONFLICTS

# What an error means is read from its SQLSTATE (Postgres manual, appendix A).
LOCK_NOT_AVAILABLE = "55P03"
QUERY_CANCELED = "57014"  # by a time-out, mostly
ABORTED = "25P02"  # a transaction in which a statement has failed
NOT_COMMITTABLE = ("22012", "3B001", ABORTED)
"""Division by zero (see FINISH), or a unit's savepoint that is gone."""
READ_ONLY = "25006"  # a standby, or default_transaction_read_only

# By their classes: lost connections; disk full, out of memory, too many connections; shutdown and
# time-outs; errors of the system and of the server.
_UNAVAILABLE = ("08", "53", "57", "58", "XX", READ_ONLY, LOCK_NOT_AVAILABLE)
NO_TABLE = ("42P01", "42703")  # undefined table, undefined column
NO_RIGHT = "42501"
_ADVICE = dict.fromkeys(NO_TABLE, MISSING) | {
    NO_RIGHT: "the database user, or the role that a request has set with SET ROLE and left on its"
    " pooled connection, may not use the table {}: grant it SELECT, INSERT, UPDATE and DELETE, or reset"
    " the role with RESET ROLE"
}
UNREADABLE = ("22003", "22008", "22P05", "54001")  # a number, a time; in JSON: a NUL, too many levels


def meaning(
    error: Exception, table: Table, kind: type[Exception], *, of_view: bool = False
) -> Exception:
    """Return what an error of the database, or of its driver, means.

    ``kind`` is the driver's class of errors. ``of_view``: not of a record alone, but perhaps of what a
    view has done.
    """
    code = sqlstate(original(error)) or ""
    if code in _ADVICE:
        return ConfigurationError(_ADVICE[code].format(table.fullname))
    if code in UNREADABLE and not of_view:  # what we store ourselves can be read
        return RecordBroken()
    if code in CONFLICTS:
        return TransactionConflict()
    if is_lost(error) or isinstance(error, exc.TimeoutError) or code.startswith(_UNAVAILABLE):
        return StoreUnavailable()
    if isinstance(error, kind):
        # An error of the application that shows only at COMMIT, such as a deferred constraint. It
        # gets the class that SQLAlchemy would have raised, without the values of our statement.
        return exc.DBAPIError.instance("COMMIT", None, error, kind, hide_parameters=True)
    return error


def is_lost(error: BaseException | None) -> bool:
    """Return True if the connection is gone: nobody knows what an unanswered statement did."""
    if isinstance(error, exc.DBAPIError) and error.connection_invalidated:
        return True
    error = original(error)
    if code := sqlstate(error):
        return code.startswith(("08", "57P"))
    return bool(
        {"OperationalError", "InterfaceError"} & {each.__name__ for each in type(error).__mro__}
    )
