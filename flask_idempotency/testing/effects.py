"""What operations have done: the counts of a test's own, or the rows of the application's tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context
from decimal import Decimal
from typing import Any

from flask import has_app_context
from sqlalchemy import Connection, Table, func, inspect, select

from flask_idempotency.web.routes import AppState

Number = int | float | Decimal
Effects = Callable[[], Number | Mapping[str, Number]]
Counts = Counter[str]  # numbers of any kind, by what they count; 0 for what is not there


def connection_of_test(state: AppState) -> Connection | None:
    """The connection to which the test has bound ``db.session``, or None."""
    with nullcontext() if has_app_context() else state.app.app_context():
        return state.connection_of_test()


def connected(state: AppState, bind: str | None) -> AbstractContextManager[Connection]:
    """A transaction in one of the databases: the test's own, or another, which is committed."""
    found: Any = (bind == state.bind_key and connection_of_test(state)) or state.sessions.engines[bind]
    return nullcontext(found) if isinstance(found, Connection) else found.begin()


def counter(state: AppState, effects: Effects | None) -> Callable[[], Counts]:
    """Return what counts: a test's function, or (None) the rows of the application's own tables.

    What is returned raises ``TypeError`` if ``effects`` is no function that counts numbers.
    """
    if effects is None:
        return _rows(state)

    def count() -> Counts:
        with state.app.app_context():
            return _numbers(effects() if callable(effects) else {"effects": effects})

    return lambda: Context().run(count)


def difference(before: Counts, now: Counts) -> Counts:
    """By how much each count has changed."""
    return Counter({name: now[name] - before[name] for name in {**before, **now}})


def _numbers(counted: Any) -> Counts:
    numbers = Counter(dict(counted) if isinstance(counted, Mapping) else {"effects()": counted})
    for name, number in numbers.items():
        if not isinstance(number, (int, float, Decimal)):
            raise TypeError(
                f"effects must be a function that returns a number, or numbers by name: {name} is"
                f" {number!r} (SQL's sum() of no rows is NULL: coalesce it)"
            )
    return numbers


def _rows(state: AppState) -> Callable[[], Counts]:
    """Return what counts the rows of the application's own tables, one round trip a database."""
    tables = {
        bind: [table for table in _existing(state, bind) if table is not state.table]
        for bind in state.sessions.engines
    }

    def count() -> Counts:
        rows: Counts = Counter()
        for bind, there in tables.items():
            counts = [select(func.count()).select_from(table).scalar_subquery() for table in there]
            if counts:
                of_bind = f" (bind {bind!r})" if bind else ""
                names = [f"rows of {table.fullname}{of_bind}" for table in there]
                with connected(state, bind) as connection:
                    found = connection.execute(select(*counts)).one()
                rows.update(dict(zip(names, found, strict=True)))
        return rows

    return count


def _existing(state: AppState, bind: str | None) -> list[Table]:
    """The tables of a bind that its database has: an application may test with some of them only."""
    tables = state.sessions.metadata_of(bind).tables.values()
    with connected(state, bind) as connection:
        inspector = inspect(connection)  # a fixture's transaction may have made the tables
        return [table for table in tables if inspector.has_table(table.name, table.schema)]
