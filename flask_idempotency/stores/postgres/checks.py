"""What ``flask idempotency check`` looks at on the servers."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import cast

import psycopg2
from sqlalchemy import Table, exc, text

from flask_idempotency.core.errors import (
    ConfigurationError,
    IdempotencyError,
    NotAtomic,
    StoreUnavailable,
)
from flask_idempotency.core.records import Claim
from flask_idempotency.stores.admin import CREATE, MIGRATE, TRIAL, Finding, reason, trial_claim
from flask_idempotency.stores.table import FILLFACTOR

from .holds import PostgresHold
from .messages import Messages
from .records import PostgresRecords
from .shape import Shape, shape_of, wrong_columns

POOLER = "a pooler such as PgBouncer must pool transactions or sessions, not statements"
"""Advice where a connection is lost or changes under a transaction."""

_KNOWS_DEAD_CLIENTS = 140000  # client_connection_check_interval came with PostgreSQL 14
_FORGET = "DELETE FROM {table} WHERE key = %(key)s AND owner = %(owner)s"
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
        remedy = f"see that the server runs, and that the URL, user and password are right; {POOLER}"
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
    if standby:
        remedy = "connect to the primary; on a standby nothing can be claimed"
        yield Finding("FAILED", "writable", "this server is a standby", remedy)
    elif read_only:
        remedy = "turn default_transaction_read_only off for this user and database"
        yield Finding("FAILED", "writable", "transactions are read-only by default", remedy)
    else:
        yield Finding("ok", "writable", "this server is a primary")
    if commit == "off":
        lossy = (
            "synchronous_commit is off; idempotent operations turn it on for themselves, but a crash"
            " may lose other commits of the application"
        )
        yield Finding("advice", "durability", lossy, "turn synchronous_commit on")


def _examine_table(messages: Messages, shape: Shape | None) -> Iterator[Finding]:
    name, create_it = messages.table.fullname, CREATE
    if shape is None:
        yield Finding("FAILED", "table", f"{name} is missing", f"{create_it}, or {MIGRATE}")
        return
    if shape.unlogged:
        remedy = f"ALTER TABLE {name} SET LOGGED"
        yield Finding("FAILED", "table", f"{name} is unlogged, so a crash empties it", remedy)
    if wrong := wrong_columns(messages.table, shape):
        yield Finding("FAILED", "columns", f"missing or of another type: {wrong}", MIGRATE)
    else:
        yield Finding("ok", "columns", f"all {len(messages.table.columns)} of {name}")
    if shape.has_key:
        yield Finding("ok", "primary key", "key")
    else:
        remedy = f"ALTER TABLE {name} ADD PRIMARY KEY (key)"
        yield Finding("FAILED", "primary key", "nothing keeps two records of a key apart", remedy)
    if shape.has_expiry:
        yield Finding("ok", "index", "expires_at")
    else:
        slow = "none that is valid on expires_at, so every purge reads the whole table"
        yield Finding("FAILED", "index", slow, create_it)
    if not shape.has_resumable:
        slow = "none of resumable operations, so every resume reads the whole table"
        yield Finding("advice", "index", slow, create_it)
    if (shape.fillfactor or 100) <= FILLFACTOR:
        yield Finding("ok", "fill factor", f"{shape.fillfactor} %")
    else:
        full = "pages have no room for the completing UPDATE, which then touches every index"
        set_it = f"ALTER TABLE {name} SET (fillfactor = {FILLFACTOR})"
        yield Finding("advice", "fill factor", full, set_it if shape.fillfactor else create_it)


def _examine_steps(messages: Messages, shape: Shape | None, *, writable: bool) -> Finding:
    """The table of steps, which every purge uses too. Without it a step runs again in each attempt."""
    subject, name = "steps", messages.steps.fullname
    if shape is None:
        lost = f"{name} is missing: it keeps the steps of operations, and a purge deletes them"
        return Finding("FAILED", subject, lost, f"{CREATE}, or {MIGRATE}")
    if shape.unlogged:
        lost = f"{name} is unlogged, so a crash empties it"
        return Finding("FAILED", subject, lost, f"ALTER TABLE {name} SET LOGGED")
    if wrong := wrong_columns(messages.steps, shape):
        return Finding("FAILED", subject, f"{name}: missing or of another type: {wrong}", MIGRATE)
    if not shape.has_key:
        lost = f"nothing keeps two results of a step apart in {name}"
        return Finding("FAILED", subject, lost, f"ALTER TABLE {name} ADD PRIMARY KEY (key, name)")
    if writable:
        return _try_steps(messages)
    return Finding("ok", subject, f"all {len(messages.steps.columns)} columns of {name}")


def _try_steps(messages: Messages) -> Finding:
    """Keep a step as a request does, and delete it in the same transaction."""
    subject, name = "steps", messages.steps.fullname
    allow = f"grant the application's user SELECT, INSERT, UPDATE and DELETE on {name}, on all rows"
    try:
        written = messages.run(_STEP, {"key": secrets.token_bytes(32), "name": TRIAL})[1]
    except ConfigurationError as error:
        return Finding("FAILED", subject, error.detail, allow)
    except (IdempotencyError, exc.SQLAlchemyError) as error:
        return Finding("FAILED", subject, f"{name}: {reason(error)}", allow)
    if written != 1:
        lost = f"a step that was written is not in {name}: a trigger, a rule or row security hides it"
        return Finding("FAILED", subject, lost, allow)
    return Finding("ok", subject, f"one was written to {name}")


@contextmanager
def trial(records: PostgresRecords) -> Iterator[PostgresHold]:
    """Claim a record of its own as a request would; roll back and delete the record at the end.

    Raises what a request would raise, and ``NotAtomic`` if two messages are not one transaction.
    """
    claim = trial_claim()
    try:
        hold = cast("PostgresHold | None", records.claim(claim))
        if hold is None:
            raise StoreUnavailable("the table is locked, by an ALTER TABLE for instance")
        try:
            if not hold.connection.scalar(text("SELECT txid_current_if_assigned() IS NOT NULL")):
                raise NotAtomic(f"two statements of one transaction went two ways: {POOLER}")
            _change(records.messages.table, hold, claim)
            yield hold
        finally:
            hold.abandon()
    finally:
        with suppress(StoreUnavailable):
            records.messages.run(_FORGET, {"key": claim.key, "owner": claim.owner})


def _change(table: Table, hold: PostgresHold, claim: Claim) -> None:
    """Change the record as the end of an operation does. Raises ``ConfigurationError``."""
    mine = table.c.key == claim.key
    change = table.update().where(mine).values(status=200)
    if hold.connection.execute(change).rowcount != 1:
        raise ConfigurationError(
            f"a record of {table.fullname} stays as it is when it is changed: a trigger, a rule"
            " or row security keeps it, so no answer can be stored"
        )
