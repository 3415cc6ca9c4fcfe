"""What ``flask idempotency check`` looks at on the servers."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import psycopg2
from sqlalchemy import Table, exc, text

from flask_idempotency.core.errors import ConfigurationError, IdempotencyError, NotAtomic
from flask_idempotency.core.records import Claim
from flask_idempotency.stores.admin import CREATE, MIGRATE, TRIAL, Finding, finding, reason
from flask_idempotency.stores.table import FILLFACTOR

from .holds import PostgresHold
from .messages import Messages
from .shape import Shape, shape_of, wrong_columns

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
        server = messages.run(_SERVER)[0]
        shape, steps = (shape_of(messages, table) for table in (messages.table, messages.steps))
    except (IdempotencyError, exc.SQLAlchemyError) as error:
        remedy = f"check that the server runs and that the URL, user and password are right; {POOLER}"
        yield Finding("FAILED", "PostgreSQL", reason(error), remedy)
        return
    yield from _examine_server(*server)
    yield from _examine_table(messages, shape)
    if shape is not None:
        yield _examine_steps(messages, steps, writable=not (server[4] or server[5]))


def _examine_server(
    version: str, number: int, database: str, user: str, standby: bool, read_only: bool, commit: str
) -> Iterator[Finding]:
    driver = psycopg2.__version__.split()[0]  # type: ignore[attr-defined]
    yield Finding("ok", "PostgreSQL", f"{version}, database {database}, user {user}")
    yield Finding("ok", "driver", f"psycopg2 {driver}")
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


def _examine_table(messages: Messages, shape: Shape | None) -> Iterator[Finding]:
    table, name = messages.table, messages.table.fullname
    if shape is None:
        yield Finding("FAILED", "table", f"{name} is missing", f"{CREATE}, or {MIGRATE}")
        return
    if shape.unlogged:
        remedy = f"ALTER TABLE {name} SET LOGGED"
        yield Finding("FAILED", "table", f"{name} is unlogged, so a crash empties it", remedy)
    wrong = wrong_columns(table, shape)
    bad = f"missing or of another type: {wrong}"
    yield finding(not wrong, "columns", f"all {len(table.columns)} of {name}", bad, MIGRATE)
    bad = "nothing prevents two records of one key"
    remedy = f"ALTER TABLE {name} ADD PRIMARY KEY (key)"
    yield finding(shape.has_key, "primary key", "key", bad, remedy)
    bad = "none that is valid on expires_at, so every purge reads the whole table"
    yield finding(shape.has_expiry, "index", "expires_at", bad, CREATE)
    if not shape.has_resumable:
        bad = "none of resumable operations, so every resume reads the whole table"
        yield Finding("advice", "index", bad, CREATE)
    if not (shape.has_leased or wrong):
        bad = "none of operations with a lease, so a search for interrupted ones reads the whole table"
        yield Finding("advice", "index", bad, CREATE)
    fill = shape.fillfactor
    bad = "pages have no room for the completing UPDATE, which then touches every index"
    remedy = f"ALTER TABLE {name} SET (fillfactor = {FILLFACTOR})" if fill else CREATE
    yield finding((fill or 100) <= FILLFACTOR, "fill factor", f"{fill} %", bad, remedy, "advice")


def _examine_steps(messages: Messages, shape: Shape | None, *, writable: bool) -> Finding:
    """Check the table of steps, which every purge uses. Without it attempts repeat their steps."""
    table, name = messages.steps, messages.steps.fullname
    if shape is None:
        bad = f"{name} is missing: it stores the steps of operations, and a purge deletes them"
        return Finding("FAILED", "steps", bad, f"{CREATE}, or {MIGRATE}")
    if shape.unlogged:
        bad = f"{name} is unlogged, so a crash empties it"
        return Finding("FAILED", "steps", bad, f"ALTER TABLE {name} SET LOGGED")
    if wrong := wrong_columns(table, shape):
        return Finding("FAILED", "steps", f"{name}: missing or of another type: {wrong}", MIGRATE)
    if not shape.has_key:
        bad = f"nothing prevents two results of one step in {name}"
        return Finding("FAILED", "steps", bad, f"ALTER TABLE {name} ADD PRIMARY KEY (key, name)")
    if writable:
        return _try_steps(messages)
    return Finding("ok", "steps", f"all {len(table.columns)} columns of {name}")


def _try_steps(messages: Messages) -> Finding:
    """Record a step as a request does, and delete it in the same transaction."""
    name = messages.steps.fullname
    bad = f"a step that was written is not in {name}: a trigger, a rule or row security hides it"
    allow = f"grant the application's user SELECT, INSERT, UPDATE and DELETE on {name}, on all rows"
    try:
        written = messages.run(_STEP, {"key": secrets.token_bytes(32), "name": TRIAL})[1]
    except (IdempotencyError, exc.SQLAlchemyError) as error:
        is_named = isinstance(error, ConfigurationError)
        bad, written = str(error) if is_named else f"{name}: {reason(error)}", 0
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
