"""Messages to PostgreSQL outside of any view's transaction, and what its errors mean."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

from sqlalchemy import Engine, Table, exc

from flask_idempotency.core.errors import (
    ConfigurationError,
    NotAtomic,
    RecordBroken,
    RequestInProgress,
    StoreUnavailable,
    TransactionConflict,
    sqlstate,
)
from flask_idempotency.core.records import Claim
from flask_idempotency.drivers.raw_connection import Answer, borrowed
from flask_idempotency.stores.admin import original
from flask_idempotency.stores.holds import CONFLICTS
from flask_idempotency.stores.own_pool import apart, reach

from . import statements

Values = dict[str, Any] | None

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
_ADVICE = dict.fromkeys(
    NO_TABLE,
    "the table {} is missing or not up to date: run `flask idempotency create-table`, or make a"
    " migration (the table is part of db.metadata)",
) | {
    NO_RIGHT: "the database user, or the role that a request has set with SET ROLE and left on its"
    " pooled connection, may not use the table {}: grant it SELECT, INSERT, UPDATE and DELETE, or reset"
    " the role with RESET ROLE"
}
UNREADABLE = ("22003", "22008", "22P05", "54001")  # a number, a time; in JSON: a NUL, too many levels


class Facts(NamedTuple):
    """What was asked once of the database.

    ``table`` is the table's full name, ``role`` that of a fresh connection, and ``watch`` the statement
    that lets the server look for dead clients, or nothing. ``deferred`` says that constraints are
    checked at COMMIT by definition, and ``reads_may_write`` that no text tells what a SELECT does.
    """

    table: str
    role: str
    deferred: bool
    reads_may_write: bool
    watch: str


class Messages:
    """Sends statements of our own: for this table, and prepared for this database.

    Views run on connections of ``application``, its engine. ``engine`` is another one: a request that
    has a connection never waits for a second of the same pool.
    """

    sql = statements.SQL
    finish = statements.FINISH % statements.SQL.finish
    record_step = statements.FINISH % statements.SQL.record_step
    is_brief = False

    def __init__(self, application: Engine, table: Table) -> None:
        self.application, self.table = application, table
        self.Error: type[Exception] = application.dialect.loaded_dbapi.Error
        # Made when it is first needed, so that all of the pool's listeners make its connections ready.
        self._engine = cache(partial(apart, application))
        self._facts: Facts | None = None
        self._cache: dict[tuple[str, str], str] = {}

    @property
    def engine(self) -> Engine:
        """The engine of our own connections."""
        return self._engine()

    def fetch(self, template: str, values: Values = None) -> list[tuple[Any, ...]]:
        """Send statements of our own in one message; the last one's rows.

        Raises ``StoreUnavailable``, ``ConfigurationError`` or ``RecordBroken``.
        """
        return self.send(template, values, first=statements.BRIEFLY)[0]

    def change(self, template: str, values: Values = None) -> int:
        """The same for what waits for the disk; how many rows the last statement changed."""
        return self.send(template, values)[1]

    def send(
        self,
        template: str,
        values: Values = None,
        none: frozenset[str] = frozenset(),
        first: str = statements.DURABLY,
    ) -> Answer:
        """Send a message; the last statement's rows, and how many it changed.

        There are none if it fails with one of the SQLSTATEs in ``none``.
        """
        text = self.prepared((statements.OBSERVING if self.is_brief else first) + template)
        return self.twice(self.engine, partial(self._ask, text, values), none) or ([], 0)

    def _ask(self, text: str, values: Values) -> Answer:
        if self.is_brief:
            reach(self.engine)
        with borrowed(self.engine) as raw:
            return raw.send(text, values)

    def twice(
        self,
        engine: Engine,
        use: Callable[[], Any],
        none: frozenset[str] = frozenset(),
        *,
        again: bool = True,
    ) -> Any:
        """Call ``use``, a second time if the pooled connection turned out to be unusable.

        It is dead, or after a failover it leads to a server that takes no writes. Every verb may be
        sent twice: a claim that did get through the first time carries our token. A connect that failed
        is not repeated, as it would take its whole time-out again where the host is silent. None if it
        fails with one of the SQLSTATEs in ``none``.
        """
        try:
            return use()
        except (self.Error, exc.SQLAlchemyError) as error:
            code = sqlstate(original(error))
            if code in NO_TABLE:  # it may have moved
                self.forget_facts()
            if code in none:
                return None
            if not again or not (is_lost(error) or code == READ_ONLY):
                raise self.error(error) from error
            # As SQLAlchemy does: if one pooled connection is dead, the server went away and the others
            # are dead too. Those in use are not touched. One to a standby would never die by itself.
            engine.dispose()
        return self.twice(engine, use, none, again=False)

    def error(self, error: Exception, *, of_view: bool = False) -> Exception:
        """Return what an error of the database, or of its driver, means.

        ``of_view``: not of a record alone, but perhaps of what a view has done.
        """
        code = sqlstate(original(error)) or ""
        if code in _ADVICE:
            return ConfigurationError(_ADVICE[code].format(self.table.fullname))
        if code in UNREADABLE and not of_view:  # what we store ourselves can be read
            return RecordBroken()
        if code in CONFLICTS:
            return TransactionConflict()
        if is_lost(error) or isinstance(error, exc.TimeoutError) or code.startswith(_UNAVAILABLE):
            return StoreUnavailable()
        if isinstance(error, self.Error):
            # An error of the application that shows only at COMMIT, such as a deferred constraint. It
            # gets the class that SQLAlchemy would have raised, without the values of our statement.
            return exc.DBAPIError.instance("COMMIT", None, error, self.Error, hide_parameters=True)
        return error

    def end_error(self, error: Exception, claim: Claim, lost: bool) -> Exception:
        """Return what failing to complete means; asks the record when the row was not ours."""
        driver_error: Any = original(error)
        if lost or is_lost(error):
            return StoreUnavailable(
                "The connection to the database was lost, and it is not known whether the operation"
                " was committed; a retry with the same key finds out."
            )
        if sqlstate(driver_error) not in NOT_COMMITTABLE:
            self.forget_facts()  # it may be a deferred constraint that is new in the database
            return self.error(driver_error, of_view=True)
        if not self.fetch(self.sql.attempt, claim.values()):
            return RequestInProgress(retry_after=1)
        return NotAtomic(
            "the view ended the operation's transaction and began another, hid the record from its"
            " role, or caught the error of a statement without db.session.rollback(): what it wrote and"
            " the record cannot commit together"
        )

    def prepared(self, template: str, level: str = "") -> str:
        """The statement for this table and, where it begins a transaction, this ``level``."""
        text = self._cache.get((template, level))
        if text is None:
            text = template.format(begin=level, **self.facts()._asdict())
            self._cache[template, level] = text
        return text

    def forget_facts(self) -> None:
        """Ask again: something has proved wrong."""
        self._facts = None
        self._cache.clear()

    def facts(self) -> Facts:
        """What a transaction must know about the database.

        Takes no lock, which would be held over a round trip: the first requests that come at the same
        time each ask, and get the same facts.
        """
        if self._facts is None:
            table = self.application.dialect.identifier_preparer.format_table(self.table)
            values = {"table": table.replace("%%", "%")}
            (row,), _ = self.twice(self.engine, partial(self._ask, statements.FACTS, values))
            self._facts = Facts(*row)
        return self._facts


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
