"""Commands to create the tables, and to look at the records."""

from __future__ import annotations

from dataclasses import asdict

import click
from flask import current_app

from flask_idempotency.operate.find import STATES, Sought, admin, find
from flask_idempotency.operate.show import Found, look_into, row
from flask_idempotency.operate.words import duration, records
from flask_idempotency.stores.admin import CAPPED, Overview
from flask_idempotency.web.routes import app_state

from .group import MANY, as_json, cli, json_option, table, which_options, write, write_rows

LONGEST_RESULT = 80
"""Characters of a step's result in a table; JSON has all of it."""


@cli.command("create-table")
@json_option
def create_table() -> None:
    """Create the table of the records, with its indexes, and nothing else.

    If the table exists, creates the indexes that it lacks. Nobody can write to the table meanwhile: for
    one in use, `check` prints a statement that blocks nobody. With Flask-Migrate a migration is enough:
    the table is part of db.metadata.
    """
    state = app_state(current_app)
    done, name = admin(state).create(), state.table.fullname
    if as_json():
        write_rows([{"table": name, "done": each} for each in done])
        return
    for line in done or ["nothing to do"]:
        write(f"{name}: {line}")


@cli.command("list")
@which_options
@click.option("--state", type=click.Choice(STATES), help="Only this state.")
@click.option("--limit", type=MANY, default=20, show_default=True, metavar="N",
              help="The most records to list.")  # fmt: skip
@json_option
@click.pass_context
def list_records(context: click.Context, /, state: str | None, limit: int, **which: str | None) -> None:
    """List the newest records, or those of a scope, or find that of a key.

    The first column has the first 8 digits of the hash that stands for scope, operation and key. Below
    stands how many records there are of each state (in a large table estimated: "about"), and how many
    wait; not with --key or --scope. With --scope the whole table is read. The exit code is 1 if a --key
    or a --scope has no record.
    """
    app, sought = app_state(current_app), Sought(**which)
    lines = sought.lines(app, state, limit + 1)
    write_rows([row(line) for line in lines[:limit]], sought.nothing_found(app))
    if len(lines) > limit:
        write(f"only the newest {limit:,}: there are more, see --limit", err=as_json())
    if sought.key is None and sought.scope is None:
        overview = None if as_json() else admin(app).overview()
        for sentence in summary(overview) if overview and overview.total else ():
            write(sentence)
    elif not lines:
        context.exit(1)


def summary(found: Overview) -> list[str]:
    """Return how many records there are, and what waits, in a sentence each, below an empty line."""
    states = sorted(found.by_state.items(), key=lambda each: (-each[1], each[0]))
    about = "about " if found.estimated else ""
    counted = ", ".join(f"{count:,} {state}" for state, count in states)
    return [
        "",
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

    DIGITS are the 8 digits that `list` shows. What comes after the last finished step may or may not
    have happened. `derived_key` is what the view gets from derive_key with the step's name, to find the
    call at the other service. If the view derives it from another name, or the step was cut off, use
    --derive.
    """
    state = app_state(current_app)
    write_found(look_into(state, find(state, digits), names))


def write_found(found: Found) -> None:
    """Write a record and what belongs to it, one table below the other, and the advice."""
    if found.broken:
        write(f"a step's result cannot be read: {found.broken}", err=True)
    audit = [{"at": each.at, **asdict(each)} for each in found.audit]
    line = row(found.line)
    if as_json():
        more = {"derived": found.derived} if found.derived else {}
        write_rows([{**line, "steps": found.steps, "audit": audit, **more}])
        return
    steps = [{**step, "result": _shortened(step["result"])} for step in found.steps]
    blocks = [table(rows) for rows in ([line], steps, audit, found.derived) if rows]
    blocks += [[*found.advice]] if found.advice else []
    for number, lines in enumerate(blocks):
        for text in [""] * bool(number) + lines:
            write(text)


def _shortened(result: str | None) -> str | None:
    is_long = result is not None and len(result) > LONGEST_RESULT
    return f"{result[:LONGEST_RESULT]}..." if result and is_long else result
