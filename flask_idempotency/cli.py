"""The command group ``flask idempotency``: what an operator does with the records."""

from __future__ import annotations

import json
import re
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import datetime, timezone
from typing import Any, cast

import click
from flask import current_app
from flask.cli import AppGroup

from .core.records import State
from .errors import IdempotencyError, Problem, StoreUnavailable, UnknownRecord
from .leased import fail_record
from .operation import Operation, Running
from .resume import resume
from .signals import Event, store_failed
from .state import AppState, app_state
from .stores import admin, checks
from .stores.checks import Finding
from .stores.redis import NoLock, RedisLock
from .stores.sql import SqlRecords

STATES = (*(state.value for state in State), "interrupted")


class _Group(AppGroup):
    """Shows our errors as one line instead of a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except IdempotencyError as error:
            raise click.ClickException(_explain(error)) from error


@click.group(cls=_Group)
def cli() -> None:
    """Look after the records of idempotency keys."""


_as_json = click.option("--json", "as_json", is_flag=True, help="Write JSON, times in UTC.")


@cli.command("create-table")
def create_table() -> None:
    """Create the table of the records and that of their steps, with indexes and fill factor.

    Creates these two and nothing else of the application. Of a table that is there already, missing
    indexes and the fill factor are added while it is in use; columns are never altered. Running it
    again does nothing. Applications with Flask-Migrate need no more than a migration: the tables are
    part of db.metadata.
    """
    state = _state()
    records, engine = _records(state), state.db.engines[state.settings.bind_key]
    for line in admin.create(records, engine) or ["nothing to do"]:
        click.echo(f"{records.table.fullname}: {line}")


@cli.command()
@_as_json
def stats(as_json: bool) -> None:
    """Count the records of each operation.

    For each operation and state: how many records there are, how many of them have expired and wait
    for a purge, the bytes of their answers' bodies, and when the oldest began. Reads the whole table.
    """
    _show([asdict(group) for group in admin.stats(_records(_state()))], as_json)


@cli.command("list")
@click.option("--operation", metavar="NAME", help="Only this operation, such as an endpoint.")
@click.option("--state", type=click.Choice(STATES), help="Only this state.")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, metavar="N")
@_as_json
def list_records(operation: str | None, state: str | None, limit: int, as_json: bool) -> None:
    """List the newest records.

    A key is never shown, nor is an answer: the first column has the first 8 digits of the hash that
    stands for scope, operation and key. "in_progress" is also what a worker that died has left
    behind of an atomic operation; the next request with the key takes it over. One that is not atomic
    is "interrupted" then, once its lease is over.
    """
    found = admin.newest(_records(_state()), operation, state, limit)
    _show([asdict(line) for line in found], as_json)


@cli.command()
@click.option(
    "--batch",
    type=click.IntRange(1, 100_000),
    default=1000,
    show_default=True,
    metavar="N",
    help="The most records to delete in one transaction.",
)
@click.option("--every", type=click.FloatRange(min=1), metavar="SECONDS",
              help="Go on, with this pause after each purge, until SIGINT or SIGTERM.")  # fmt: skip
def purge(batch: int, every: float | None) -> None:
    """Delete the records that have expired.

    Goes in small transactions that nothing waits for, so it may run at any time, and several at
    once. A record whose request is still running stays, also when it has expired. Run it from cron,
    or leave it running with --every: that outlives a database that is away for a while. Either ends
    between two transactions on SIGINT and SIGTERM.
    """
    records = _records(_state())
    with _until_signal() as stop:
        while not stop.is_set():
            deleted = 0
            try:
                for count in admin.purge(records, batch):
                    deleted += count
                    if stop.is_set():
                        break
            except StoreUnavailable as error:
                if every is None:
                    raise
                click.echo(f"Error: {_explain(error)}", err=True)
            if deleted or every is None:
                click.echo(f"{deleted} expired {'record' if deleted == 1 else 'records'} deleted")
            if every is None:
                return
            stop.wait(every)


@cli.command()
@click.argument("key")
@_as_json
def show(key: str, as_json: bool) -> None:
    """Show one record and its finished steps.

    KEY is the 8 digits that `list` shows. Neither the key itself nor an answer or the result of a
    step is shown. Of an interrupted operation the steps tell how far it came: the step after the last
    one may or may not have happened.
    """
    line, steps = admin.find(_records(_state()), _digits(key))
    if as_json:
        _show([{**asdict(line), "steps": [_in_utc(asdict(step)) for step in steps]}], as_json)
        return
    _show([asdict(line)], as_json)
    if steps:
        click.echo()
        _show([asdict(step) for step in steps], as_json)


@cli.command()
@click.argument("key")
@click.option("--fail", is_flag=True, help="Store a failure as its answer; it never runs again.")
def release(key: str, fail: bool) -> None:
    """Let an operation that was interrupted, or has failed, be run again.

    KEY is the 8 digits that `list` shows. Find out first what came of it, at the other service for
    example: the next retry runs the view again, with its finished steps left out. If it must not run
    again, use --fail: every retry gets a 500 of the type operation-failed then. An operation whose
    lease still runs is left alone, and so is one that is completed. Operations that are atomic need
    nothing: their next retry takes over.
    """
    state = _state()
    records, digits = _records(state), _digits(key)
    line, _ = admin.find(records, digits)
    owner = secrets.token_urlsafe(16)
    found = admin.reopen(records, digits, owner, state.settings.ttl)
    if found is None:
        raise IdempotencyError(
            f"{line.key} is {line.state.replace('_', ' ')}: only what is interrupted or failed can be"
            " released"
        )
    if fail:
        fail_record(state, found)
    click.echo(f"{line.key}: {'failed for good' if fail else 'may be run again'}")


@cli.command("resume")
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, metavar="N",
              help="The most operations to run each time.")  # fmt: skip
@click.option("--max-attempts", type=click.IntRange(min=1), default=10, show_default=True, metavar="N",
              help="Leave an operation alone that was begun this often.")  # fmt: skip
@click.option("--backoff", type=click.FloatRange(min=0.1), default=10.0, show_default=True,
              metavar="SECONDS", help="How long to leave one alone after its first attempt; doubled"
              " after each.")  # fmt: skip
@click.option("--every", type=click.FloatRange(min=1), metavar="SECONDS",
              help="Go on, with this pause, until SIGINT or SIGTERM.")  # fmt: skip
@_as_json
def resume_operations(
    limit: int, max_attempts: int, backoff: float, every: float | None, as_json: bool
) -> None:
    """Finish operations that were abandoned, as their client would.

    Of routes with resumable=True the request is kept until the operation ends. This sends those
    again, through the application itself, whose operation nobody works on: its worker died, it
    answered with an error that is not kept, or its lease is over (unless it is held: those end with
    409 here, too). May run in several places at once. Shows each operation with the status of its
    answer.
    """
    state = _state()
    with _until_signal() as stop:
        while not stop.is_set():
            done = []
            try:
                for resumed in resume(
                    state,
                    _records(state),
                    limit=limit,
                    max_attempts=max_attempts,
                    backoff_seconds=backoff,
                ):
                    done.append(asdict(resumed))
                    if stop.is_set():
                        break
            except StoreUnavailable as error:
                if every is None:
                    raise
                click.echo(f"Error: {_explain(error)}", err=True)
            if done or every is None:
                _show(done, as_json, "nothing to resume")
            if every is None:
                return
            stop.wait(every)


@cli.command()
@click.pass_context
def check(context: click.Context) -> None:
    """Check that everything the promises rest on is there.

    One line for each check: ok, advice (works, but could be better) or FAILED, with what to do.
    Claims one record as a request would, rolls back and deletes it. The exit code is 1 if a check
    failed: run it before a release goes live.
    """
    failed = False
    for finding in _examine(_state()):
        failed = failed or finding.level == "FAILED"
        click.echo(f"{finding.level:<8}{finding.subject:<14}{finding.text}")
        if finding.remedy:
            click.echo(f"{'':<22}-> {finding.remedy}")
    context.exit(1 if failed else 0)


def _examine(state: AppState) -> Iterator[Finding]:
    ready = True
    for finding in checks.examine(_records(state)):
        ready = ready and (finding.level != "FAILED" or finding.subject == "index")
        yield finding
    if ready:
        yield from _examine_claim(state)
    errors: list[BaseException | None] = []

    def note(_sender: object, event: Event) -> None:
        errors.append(event.error)

    with store_failed.connected_to(note, state.app):
        for finding in checks.examine_lock(cast("RedisLock | NoLock", state.lock)):
            yield replace(finding, text=f"{finding.text}: {errors[0]}") if errors else finding


def _examine_claim(state: AppState) -> Iterator[Finding]:
    """Claim, and join a session of the application to the claim's transaction, as a view's is."""
    subject = "claim"
    try:
        with checks.trial(_records(state)) as hold:
            yield Finding("ok", subject, "a record was claimed and its row locked")
            subject = "db.session"
            operation = Operation(checks.TRIAL, "", None, "", hold.attempt)
            running = Running(operation, hold.connection, hold.expose)
            try:
                state.prove_join(running)
            finally:
                running.end()
            yield Finding("ok", subject, "joins the operation's transaction")
            subject = "deletion"
    except IdempotencyError as error:
        remedy = checks.POOLER if isinstance(error, Problem) else ""
        yield Finding("FAILED", subject, _explain(error), remedy)


def _explain(error: IdempotencyError) -> str:
    """The error for an operator: with the driver's words, where a client is told to try again."""
    return checks.reason(error) if isinstance(error, Problem) else error.detail


def _state() -> AppState:
    return app_state(current_app)


def _records(state: AppState) -> SqlRecords:
    if not isinstance(state.records, SqlRecords):
        raise IdempotencyError(
            f"this command is for records in PostgreSQL; IDEMPOTENCY_STORE is {state.settings.store!r}"
        )
    return state.records


@contextmanager
def _until_signal() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set, in place of what they do otherwise."""
    stop = threading.Event()
    before = {}
    with suppress(ValueError):  # only the main thread may, and only it is sent signals
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, lambda *_: stop.set())
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _digits(key: str) -> str:
    if not re.fullmatch("[0-9a-f]{8}", key):
        raise UnknownRecord(
            "KEY is the 8 digits, 0 to 9 and a to f, that `flask idempotency list` shows"
        )
    return key


def _in_utc(row: dict[str, Any]) -> dict[str, Any]:
    return {name: _time(value, "T") for name, value in row.items()}


def _show(rows: list[dict[str, Any]], as_json: bool, none: str = "no records") -> None:
    """Write rows as a table, numbers to the right, or as JSON."""
    if as_json:
        click.echo(json.dumps([_in_utc(row) for row in rows], indent=2))
    elif not rows:
        click.echo(none)
    else:
        cells = [[_cell(_time(value, " ")) for value in row.values()] for row in rows]
        _align(list(rows[0]), cells, [isinstance(value, int) for value in rows[0].values()])


def _align(names: list[str], cells: list[list[str]], right: list[bool]) -> None:
    table = [names, *cells]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        padded = (
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        )
        click.echo("  ".join(padded).rstrip())


def _time(value: Any, between: str) -> Any:
    """A time in UTC, as text; anything else as it is."""
    if not isinstance(value, datetime):
        return value
    return value.astimezone(timezone.utc).strftime(f"%Y-%m-%d{between}%H:%M:%SZ")


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)
