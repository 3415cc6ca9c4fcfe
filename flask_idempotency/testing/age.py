"""``age``: what is stored becomes older, so that no test waits for a retention or a lease to end."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from flask import Flask
from sqlalchemy import Column, DateTime, Table, func, select, update

from flask_idempotency.stores.redis import Stored
from flask_idempotency.web.routes import AppState, app_state

_TIMES_IN_REDIS = "created", "completed", "lease", "released"


def age(app: Flask, seconds: float | timedelta) -> None:
    """Make all records of an application older, as if so much time had passed since they were written.

    What expires within that time has expired, and a lease that ends within it is over. Records whose
    transaction is open, such as that of an atomic view which runs just now, stay as they are.
    ``seconds`` is a number or a ``timedelta``.
    """
    state = app_state(app)
    passed = seconds if isinstance(seconds, timedelta) else timedelta(seconds=seconds)
    if state.settings.store == "redis":
        _age_in_redis(state.records, passed.total_seconds())
    else:
        _age_in_tables(state, passed)


def _age_in_redis(records: Any, passed: float) -> None:
    def older(seen: Stored) -> Stored | None:
        times = {
            name: seen.fields[name] for name in _TIMES_IN_REDIS if seen.fields.get(name) is not None
        }
        fields = seen.fields | {name: time - passed for name, time in times.items()}
        left = None if seen.left is None else seen.left - passed
        return replace(seen, fields=fields, left=left) if seen.fields else None

    for name in list(records.client.scan_iter(match=f"{records.prefix}*")):
        records.change(bytes.fromhex(str(name, "ascii")[len(records.prefix) :]), older)


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
