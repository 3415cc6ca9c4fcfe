"""``age``: what is stored becomes older, so that no test waits for a retention or a lease to end."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from flask import Flask
from sqlalchemy import Column, DateTime, func, select, update

from flask_idempotency.core.errors import ConfigurationError
from flask_idempotency.web.routes import app_state

from .effects import connected


def age(app: Flask, seconds: float | timedelta) -> None:
    """Make all records of an application older by ``seconds``, a number or a ``timedelta``.

    What expires within that time has expired, and a lease that ends within it is over. Records whose
    transaction is open stay as they are. Raises ``ConfigurationError`` for the store ``redis``.
    """
    state = app_state(app)
    if state.settings.store == "redis":
        raise ConfigurationError("age() cannot make records in Redis older: test with the store 'sql'")
    table = state.table
    passed = seconds if isinstance(seconds, timedelta) else timedelta(seconds=seconds)
    if passed < timedelta(0):
        raise ValueError(f"age({seconds!r}): records become older, not younger")
    with connected(state, state.bind_key) as connection:
        keys = list(connection.scalars(select(table.c.key).with_for_update(skip_locked=True)))
        times = [column for column in table.columns if isinstance(column.type, DateTime)]
        older = {time: _earlier(time, passed, connection.dialect.name) for time in times}
        connection.execute(update(table).where(table.c.key.in_(keys)).values(older))
    state.lock.forget(keys)  # what Redis knows of them is as young as before


def _earlier(time: Column[Any], passed: timedelta, dialect: str) -> Any:
    if dialect == "sqlite":
        return func.strftime("%Y-%m-%d %H:%M:%f", time, f"{-passed.total_seconds():+.3f} seconds")
    return time - passed
