"""What ``flask idempotency check`` looks at on the servers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from sqlalchemy import Table, exc, text

from flask_idempotency.core.errors import ConfigurationError, IdempotencyError, NotAtomic, sqlstate
from flask_idempotency.core.records import Claim
from flask_idempotency.stores.admin import (
    ADD,
    LOCKED,
    REBUILD,
    TRIAL,
    UNLOCK,
    Finding,
    finding,
    reason,
    remedy_of,
)
from flask_idempotency.stores.table import FILLFACTOR

from .failures import LOCK_NOT_AVAILABLE
from .holds import PostgresHold
from .messages import Messages
from .shape import Piece, Shape, listed, shape_of

POOLER = "a pooler such as PgBouncer must pool transactions or sessions, not statements"
"""Advice where a connection is lost or changes under a transaction."""

_KNOWS_DEAD_CLIENTS = 140000  # client_connection_check_interval came with PostgreSQL 14
_STEP = """INSERT INTO {steps} (key, name, attempt, created_at, result)
VALUES (%(key)s, %(name)s, 1, clock_timestamp(), '')
ON CONFLICT (key, name) DO UPDATE SET result = excluded.result;
DELETE FROM {steps} WHERE key = %(key)s AND name = %(name)s"""
_SERVER = """SELECT current_setting('server_version'),
       current_setting('server_version_num')::int, current_database()::text, current_user::text,
       pg_is_in_recovery(), current_setting('default_transaction_read_only') = 'on',
       current_setting('synchronous_commit')"""


def examine(messages: Messages) -> Iterator[Finding]:
    """Check the server and the tables, and leave nothing there. Ends early if the server is away."""
    try:
        server = messages.operate(_SERVER)[0][0]
        shape, steps = (shape_of(messages, table) for table in (messages.table, messages.steps))
    except (IdempotencyError, exc.SQLAlchemyError) as error:
        if sqlstate(error.__cause__) == LOCK_NOT_AVAILABLE:  # of a partition
            yield Finding("FAILED", "table", LOCKED, UNLOCK)
            return
        remedy = f"check that the server runs and that the URL, user and password are right; {POOLER}"
        yield Finding("FAILED", "PostgreSQL", reason(error), remedy)
        return
    dialect = messages.engine.dialect
    version = dialect.loaded_dbapi.__version__.split()[0]
    yield from _examine_server(f"{dialect.driver} {version}", *server)
    yield from _examine_table(messages.table, shape)
    writable = not (server[4] or server[5])
    if shape is not None:
        yield _examine_steps(messages, steps, writable=writable)


def _examine_server(
    driver: str,
    version: str,
    number: int,
    database: str,
    user: str,
    standby: bool,
    read_only: bool,
    commit: str,
) -> Iterator[Finding]:
    yield Finding("ok", "PostgreSQL", f"{version}, database {database}, user {user}")
    yield Finding("ok", "driver", driver)
    if number < _KNOWS_DEAD_CLIENTS:
        old = "a worker killed inside a long statement blocks its key until the statement ends"
        yield Finding("advice", "version", old, "upgrade to PostgreSQL 14 or later")
    remedy = "connect to the primary; on a standby nothing can be claimed"
    if not standby:
        remedy = "turn default_transaction_read_only off for this user and database"
    bad = "this server is a standby" if standby else "transactions are read-only by default"
    good = not (standby or read_only)
    yield finding(good, "writable", "this server is a primary", bad, remedy)
    if commit == "off":
        lossy = (
            "synchronous_commit is off; idempotent operations turn it on for themselves, but a crash"
            " may lose other commits of the application"
        )
        yield Finding("advice", "durability", lossy, "turn synchronous_commit on")


def _flaws(table: Table, shape: Shape | None, stores: str, twice: str) -> Iterator[Finding]:
    """Yield what keeps one of our tables from doing its part: what it ``stores``, and not ``twice``."""
    name = table.fullname
    if shape is None:
        yield Finding("FAILED", "table", f"{name} is missing{stores}", ADD)
        return
    if remedy := _set(shape, lambda piece: piece.unlogged, "LOGGED"):
        yield Finding("FAILED", "unlogged", f"{name} is unlogged, so a crash empties it", remedy)
    if wrong := shape.missing_columns() + shape.other_columns():
        bad = f"missing in {name} or of another type: {listed(wrong)}"
        yield Finding("FAILED", "columns", bad, REBUILD)
    if not shape.has_key():
        key = ", ".join(column.name for column in table.primary_key)
        yield Finding("FAILED", "primary key", twice, f"ALTER TABLE {name} ADD PRIMARY KEY ({key})")


def _examine_table(table: Table, shape: Shape | None) -> Iterator[Finding]:
    flaws = {flaw.subject: flaw for flaw in _flaws(table, shape, "", _TWICE)}
    if shape is None or "unlogged" in flaws:
        yield replace(next(iter(flaws.values())), subject="table")
    if shape is None:
        return
    all_of_it = f"all {len(table.columns)} of {table.fullname}"
    yield flaws.get("columns") or Finding("ok", "columns", all_of_it)
    yield flaws.get("primary key") or Finding("ok", "primary key", "key")
    yield from _examine_indexes(shape)
    yield _examine_fill_factor(shape)


_TWICE = "nothing prevents two records of one key"


def _set(shape: Shape, is_wrong: Callable[[Piece], bool], what: str) -> str:
    """The statements that set something for what is wrong: the table, or some of its partitions."""
    return "; ".join(
        f"ALTER TABLE {piece.name} SET {what}" for piece in shape.pieces if is_wrong(piece)
    )


_WITHOUT: dict[str, tuple[Literal["advice", "FAILED"], str]] = {
    "expires_at": ("FAILED", "none that is valid on expires_at, so every purge reads the whole table"),
    "lease_expires_at": (
        "advice",
        "none of operations with a lease, so a search for interrupted ones reads the whole table",
    ),
}
"""How bad it is if the index that begins with a column is missing, and why."""


def _examine_indexes(shape: Shape) -> Iterator[Finding]:
    missing = [index for index in shape.missing_indexes() if index.columns[0].name in shape.columns]
    if not any(index.columns[0].name == "expires_at" for index in missing):
        yield Finding("ok", "index", "expires_at")
    for index in missing:
        level, bad = _WITHOUT[index.columns[0].name]
        yield Finding(level, "index", bad, shape.mend(index))


def _examine_fill_factor(shape: Shape) -> Finding:
    fills = [piece.fillfactor or 100 for piece in shape.pieces]
    bad = "pages have no room for the completing UPDATE, which then touches every index"
    remedy = _set(
        shape, lambda piece: (piece.fillfactor or 100) > FILLFACTOR, f"(fillfactor = {FILLFACTOR})"
    )
    return finding(
        not remedy, "fill factor", f"{max(fills, default=FILLFACTOR)} %", bad, remedy, "advice"
    )


def _examine_steps(messages: Messages, shape: Shape | None, *, writable: bool) -> Finding:
    """Check the table of steps, which every purge uses. Without it attempts repeat their steps."""
    name = messages.steps.fullname
    stores = ": it stores the steps of operations, and a purge deletes them"
    twice = f"nothing prevents two results of one step in {name}"
    for flaw in _flaws(messages.steps, shape, stores, twice):
        return replace(flaw, subject="steps")
    if writable:
        return _try_steps(messages)
    return Finding("ok", "steps", f"all {len(messages.steps.columns)} columns of {name}")


def _try_steps(messages: Messages) -> Finding:
    """Record a step as a request does, and delete it in the same transaction."""
    name = messages.steps.fullname
    bad = f"a step that was written is not in {name}: a trigger, a rule or row security hides it"
    allow = f"grant the application's user SELECT, INSERT, UPDATE and DELETE on {name}, on all rows"
    try:
        written = messages.operate(_STEP, {"key": secrets.token_bytes(32), "name": TRIAL})[1]
    except (IdempotencyError, exc.SQLAlchemyError) as error:
        is_named = isinstance(error, ConfigurationError)
        bad, written = str(error) if is_named else f"{name}: {reason(error)}", 0
        allow = remedy_of(error, allow)
    return finding(written == 1, "steps", f"one was written to {name}", bad, allow)


def change(table: Table, hold: PostgresHold, claim: Claim) -> None:
    """Change a claimed record as the end of an operation does.

    Raises ``ConfigurationError``, and ``NotAtomic`` if two messages are not one transaction.
    """
    if not hold.connection.scalar(text("SELECT txid_current_if_assigned() IS NOT NULL")):
        raise NotAtomic(f"two statements of one transaction used two connections: {POOLER}")
    update = table.update().where(table.c.key == claim.key).values(status=200)
    if hold.connection.execute(update).rowcount != 1:
        raise ConfigurationError(
            f"an UPDATE of a record in {table.fullname} changes nothing: a trigger, a rule or row"
            " security prevents it, so no response can be stored"
        )
