"""Commands to create the tables, and to look at the records."""

from __future__ import annotations

from dataclasses import asdict

import click
from flask import current_app

from flask_idempotency.core.errors import UnknownRecord
from flask_idempotency.operate.find import DIGITS, STATES, admin, find
from flask_idempotency.operate.show import Found, derived, key_of, row, shown_steps
from flask_idempotency.operate.words import duration, records
from flask_idempotency.stores.admin import CAPPED, Overview
from flask_idempotency.web.routes import AppState, app_state

from .group import (
    MANY,
    as_json,
    cli,
    json_option,
    key_option,
    namespace_option,
    operation_option,
    sought,
    table,
    write,
    write_rows,
)

LONGEST_RESULT = 80
"""Characters of a step's result in a table; JSON has all of it."""


@cli.command("create-table")
@json_option
def create_table() -> None:
    """Create the table of the records and that of their steps, with indexes and fill factor.

    Creates no table of the application's own. If a table exists, creates the indexes that it lacks, and
    changes nothing else. Nobody can write to the table meanwhile: for one in use, check prints a
    statement that blocks nobody. Running it again does nothing. An application with Flask-Migrate needs
    only a migration: the tables are part of db.metadata.
    """
    state = app_state(current_app)
    done, name = admin(state).create(), state.table.fullname
    if as_json():
        write_rows([{"table": name, "done": each} for each in done])
        return
    for line in done or ["nothing to do"]:
        write(f"{name}: {line}")


@cli.command("list")
@operation_option
@click.option("--state", type=click.Choice(STATES), help="Only this state.")
@click.option("--limit", type=MANY, default=20, show_default=True, metavar="N",
              help="The most records to list.")  # fmt: skip
@key_option
@click.option("--scope", metavar="SCOPE", help="Only the records of this tenant or user, or whose --key"
              " it is.")  # fmt: skip
@namespace_option
@json_option
@click.pass_context
def list_records(context: click.Context, /, state: str | None, limit: int, **which: str | None) -> None:
    """List the newest records, or those of a scope, or find that of a key.

    Never shows a key or a response: the first column has the first 8 digits of the hash that stands for
    scope, operation and key. If a worker dies in an atomic operation, the record stays
    "in_progress" until the next request with the key takes it over. An operation that is not atomic
    becomes "interrupted" when its lease runs out, and "released" when it may be run again.
    "observed" is whatever was not enforced. Below stands how many records there are in all, of each
    state, and what waits. In a large table the states are estimated ("about"); what waits is always
    counted. With --key and with --scope there is no such summary, and with --scope the whole table
    is read. The exit code is 1 if a --key or a --scope has no record.
    """
    app, wanted = app_state(current_app), sought(**which)
    if {wanted.key, wanted.scope, wanted.namespace} == {None}:
        store = admin(app)
        write_rows([row(line) for line in store.newest(wanted.operation, state, limit)])
        if not as_json() and (overview := store.overview()).total:
            write("")
            for sentence in summary(overview):
                write(sentence)
        return
    lines = wanted.lines(app, state, limit)
    if lines is None:
        raise click.UsageError("a record is found by --key and --operation, with its --scope")
    write_rows([row(line) for line in lines], wanted.nothing_found(app))
    context.exit(0 if lines else 1)


def summary(found: Overview) -> list[str]:
    """Return how many records there are, and what waits, in a sentence each."""
    states = sorted(found.by_state.items(), key=lambda each: (-each[1], each[0]))
    about = "about " if found.estimated else ""
    counted = ", ".join(f"{count:,} {state}" for state, count in states)
    return [
        f"{about}{records(found.total)} in all: {counted}",
        f"waiting for a retry or an operator: {_count(found.interrupted, found.interrupted_seconds)}",
        f"waiting for a purge: {_count(found.expired, found.expired_seconds)}",
    ]


def _count(count: int, seconds: float | None) -> str:
    """Return so many records, which were counted up to a limit, and the age of the oldest."""
    counted = f"{count:,} or more" if count >= CAPPED else f"{count:,}"
    return counted if not count or seconds is None else f"{counted}, the oldest for {duration(seconds)}"


@cli.command()
@click.argument("digits")
@click.option("--derive", "names", multiple=True, metavar="NAME",
              help="Show derive_key(NAME) of the operation, too.")  # fmt: skip
@json_option
def show(digits: str, names: tuple[str, ...]) -> None:
    """Show one record, its finished steps with their results, and what operators did to it.

    DIGITS are the 8 digits that `list` shows; `list --key` finds those of a client's key. Shows no key
    of a client and no response. The steps tell how far an interrupted operation came: the step after
    the last one may or may not have happened. `derived_key` is what the view gets from derive_key with
    the step's name, to find the call at the other service. If the view derives it from another name, or
    the step was cut off, use --derive.
    """
    state = app_state(current_app)
    store = admin(state)
    write_found(state, Found.of(store, find(store, checked(digits))), names)


def write_found(state: AppState, found: Found, names: tuple[str, ...] = ()) -> None:
    """Write a record and what belongs to it, one table below the other, and the advice."""
    key = key_of(state, found) if found.steps or names else None
    steps, why = shown_steps(state, key, found.steps)
    if why:
        write(f"a step's result cannot be read: {why}", err=True)
    audit = [{"at": each.at, **asdict(each)} for each in found.audit]
    line, more = row(found.line), derived(key, names)
    if as_json():
        whole = {**line, "steps": steps, "audit": audit, **({"derived": more} if names else {})}
        write_rows([whole])
        return
    for step in steps:
        if len(step["result"] or "") > LONGEST_RESULT:
            step["result"] = f"{step['result'][:LONGEST_RESULT]}..."
    blocks = [table(rows) for rows in ([line], steps, audit, more) if rows]
    if found.advice is not None:
        blocks.append([*found.advice.sentences])
    for number, lines in enumerate(blocks):
        for text in [""] * bool(number) + lines:
            write(text)


def checked(digits: str) -> str:
    """Return digits as an operator typed them. Raises ``UnknownRecord`` for anything else."""
    if not DIGITS.fullmatch(digits):  # not repeated: it may be a client's key
        raise UnknownRecord(
            "DIGITS are the 8 digits, 0 to 9 and a to f, that `flask idempotency list` shows, not the"
            " client's key; to find the digits of a key, run"
            " `flask idempotency list --key KEY --operation NAME --scope SCOPE`"
        )
    return digits.lower()
