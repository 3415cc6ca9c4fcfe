"""``age``: what is stored becomes older, so that no test waits for a retention or a lease to end."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from flask import Flask
from sqlalchemy import Column, DateTime, Table, func, select, update

from flask_idempotency.web.routes import AppState, app_state

_TIMES_IN_REDIS = "created", "completed", "lease", "released"

_AGE = f"""
for _, name in ipairs({{{str(_TIMES_IN_REDIS)[1:-1]}}}) do
  local time = redis.call('HGET', KEYS[1], name)
  if time then redis.call('HSET', KEYS[1], name, time - ARGV[1]) end
end
local left = redis.call('PTTL', KEYS[1])
if left >= 0 then redis.call('PEXPIRE', KEYS[1], left - ARGV[1]) end
"""


def age(app: Flask, seconds: float | timedelta) -> None:
    """Make all records of an application older, as if so much time had passed since they were written.

    What expires within that time has expired, and a lease that ends within it is over. Records whose
    transaction is open, such as that of an atomic view which runs just now, stay as they are.
    ``seconds`` is a number or a ``timedelta``.
    """
    state = app_state(app)
    passed = seconds if isinstance(seconds, timedelta) else timedelta(seconds=seconds)
    if state.settings.store == "redis":
        _age_in_redis(state.records, passed)
    else:
        _age_in_tables(state, passed)


def _age_in_redis(records: Any, passed: timedelta) -> None:
    client = records.connected()
    for name in list(client.scan_iter(match=f"{records.prefix}*")):
        client.eval(_AGE, 1, name, round(passed / timedelta(milliseconds=1)))


def _age_in_tables(state: AppState, passed: timedelta) -> None:
    table = state.table
    with state.engines[state.bind_key].begin() as connection:
        keys = list(connection.scalars(select(table.c.key).with_for_update(skip_locked=True)))
        older = {time: _earlier(time, passed, connection.dialect.name) for time in _times(table)}
        connection.execute(update(table).where(table.c.key.in_(keys)).values(older))
    state.lock.forget(keys)  # what Redis knows of them is as young as before


def _times(table: Table) -> list[Column[Any]]:
    return [column for column in table.columns if isinstance(column.type, DateTime)]


def _earlier(time: Column[Any], passed: timedelta, dialect: str) -> Any:
    if dialect == "sqlite":
        return func.strftime("%Y-%m-%d %H:%M:%f", time, f"{-passed.total_seconds():+.3f} seconds")
    return time - passed
