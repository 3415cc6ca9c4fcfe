"""The command group ``flask idempotency``: what an operator does with the records."""

from __future__ import annotations

import json
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
from .errors import IdempotencyError, Problem, StoreUnavailable
from .operation import Operation, Running
from .signals import Event, store_failed
from .state import AppState, app_state
from .stores import admin, checks
from .stores.checks import Finding
from .stores.redis import NoLock, RedisLock
from .stores.sql import SqlRecords


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
    """Create the table of the records, with its index and fill factor.

    Creates this one table and nothing else of the application. Of a table that is there already, a
    missing index and fill factor are added while it is in use; columns are never altered. Running it
    again does nothing. Applications with Flask-Migrate need no more than a migration: the table is
    part of db.metadata.
    """
    state = _state()
    engine = state.db.engines[state.settings.bind_key]
    for line in admin.create(_records(state), engine) or ["nothing to do"]:
        click.echo(f"{state.table.fullname}: {line}")


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
@click.option("--state", type=click.Choice([s.value for s in State]), help="Only this state.")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, metavar="N")
@_as_json
def list_records(operation: str | None, state: str | None, limit: int, as_json: bool) -> None:
    """List the newest records.

    A key is never shown, nor is an answer: the first column has the first 8 digits of the hash that
    stands for scope, operation and key. "in_progress" is also what a worker that died has left
    behind; the next request with the key takes it over.
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
    # Every store there is keeps its records in SQL.
    return cast("SqlRecords", state.records)


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


def _show(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Write rows as a table, numbers to the right, or as JSON."""
    if as_json:
        times = [{name: _time(value, "T") for name, value in row.items()} for row in rows]
        click.echo(json.dumps(times, indent=2))
    elif not rows:
        click.echo("no records")
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
