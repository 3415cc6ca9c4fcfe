"""Commands to create the tables, and to look at the records."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import click

from flask_idempotency.core.errors import ConfigurationError, UnknownRecord
from flask_idempotency.core.keys import SHOWN
from flask_idempotency.core.records import State
from flask_idempotency.stores.admin import Admin, AuditEntry, Line, StepLine

from .group import MANY, admin, as_json_option, cli, current_state, in_utc, write, write_rows
from .keys import find_by_key, nothing_found

STATES = (*(state.value for state in State), "interrupted", "released", "observed")


@cli.command("create-table")
@as_json_option
def create_table(as_json: bool) -> None:
    """Create the table of the records and that of their steps, with indexes and fill factor.

    With the operator's page, creates the table of its counts, too, and none of the application's own.
    If a table of an earlier release exists, adds the columns, indexes and fill factor that it lacks,
    while requests use it; never alters or drops a column. Running it again does nothing. An application
    with Flask-Migrate needs only a migration: the tables are part of db.metadata.
    """
    state = current_state()
    done, table = admin(state).create(), state.table.fullname
    if as_json:
        write_rows([{"table": table, "done": each} for each in done], as_json)
        return
    for line in done or ["nothing to do"]:
        write(f"{table}: {line}")


@cli.command()
@as_json_option
def stats(as_json: bool) -> None:
    """Count the records of each operation.

    For each operation and state: how many records there are, how many of them have expired and wait
    for a purge, the bytes of their response bodies, and when the oldest began. Reads the whole table.
    """
    write_rows([asdict(group) for group in admin(current_state()).stats()], as_json)


@cli.command("list")
@click.option("--operation", metavar="NAME", help="Only this operation, such as an endpoint.")
@click.option("--state", type=click.Choice(STATES), help="Only this state.")
@click.option("--limit", type=MANY, default=20, show_default=True, metavar="N",
              help="The most records to list.")  # fmt: skip
@click.option("--key", metavar="KEY", help="Only the record of this key, as the client sent it; needs"
              " --operation, and --scope unless there is one tenant.")  # fmt: skip
@click.option("--scope", metavar="SCOPE", help="Whose --key it is: the id of a tenant or user.")
@click.option("--namespace", metavar="NAMESPACE", help="The namespace of --key, if it is not that of"
              " the route or the application.")  # fmt: skip
@as_json_option
@click.pass_context
def list_records(
    context: click.Context,
    operation: str | None,
    state: str | None,
    limit: int,
    key: str | None,
    scope: str | None,
    namespace: str | None,
    as_json: bool,
) -> None:
    """List the newest records, or find that of a key.

    Never shows a key or a response: the first column has the first 8 digits of the hash that stands
    for scope, operation and key. If a worker dies in an atomic operation, the record stays
    "in_progress" until the next request with the key takes it over. An operation that is not atomic
    becomes "interrupted" when its lease runs out, and "released" when it may be run again. "observed"
    is whatever was not enforced. The exit code is 1 if a --key has no record.
    """
    app, none = current_state(), "no records"
    store = admin(app)
    if key is not None and operation is not None:
        lines = find_by_key(app, store, key, operation, scope, namespace)
        found = [line for line in lines.values() if state in (None, line.state)]
        found.sort(key=lambda line: str(line.created), reverse=True)
        none = nothing_found(app, key, operation, scope)
    elif key is scope is namespace is None:
        found = store.newest(operation, state, limit)
    else:
        raise click.UsageError("a record is found by --key and --operation, with its --scope")
    write_rows([row(line) for line in found], as_json, none)
    context.exit(0 if found or key is None else 1)


@cli.command()
@click.argument("digits")
@as_json_option
def show(digits: str, as_json: bool) -> None:
    """Show one record, its finished steps, and what operators did to it.

    DIGITS are the 8 digits that `list` shows; `list --key` finds those of a client's key. Shows no key,
    no response and no step's result. The steps tell how far an interrupted operation came: the step
    after the last one may or may not have happened.
    """
    tables = tables_of(admin(current_state()), checked(digits))
    if as_json:
        (line,), steps, audit = ([in_utc(each) for each in rows] for rows in tables)
        write_rows([{**line, "steps": steps, "audit": audit}], as_json)
    else:
        write_tables(tables)


def find(admin: Admin, digits: str) -> tuple[Line, list[StepLine]]:
    """The record whose key's hash begins with ``digits``, and its steps.

    Raises ``UnknownRecord`` if there is none, or more than one.
    """
    start = bytes.fromhex(digits)
    found = admin.starting(start)
    if len(found) != 1:
        text = f"there is {'more than one' if found else 'no'} record whose digits are {digits}"
        longer = ": give all 16 digits, such as " + " or ".join(sorted(line.key for line in found))
        raise UnknownRecord(text + (longer if found else ""))
    return found[0], admin.steps(start)


def find_audit(admin: Admin, digits: str) -> list[AuditEntry]:
    """What operators did to the record whose key's hash begins with ``digits``.

    Nothing if a store of the application's own, or the table of an earlier release, cannot note it.
    """
    if not hasattr(admin, "audit"):
        return []
    try:
        return admin.audit(bytes.fromhex(digits))
    except ConfigurationError:
        return []


def tables_of(store: Admin, digits: str) -> list[list[dict[str, Any]]]:
    """A record, its steps, and what operators did to it: each as rows."""
    line, steps = find(store, digits)
    entries = [{"at": each.at, **asdict(each)} for each in find_audit(store, digits)]
    return [[row(line)], [asdict(step) for step in steps], entries]


def write_tables(tables: list[list[dict[str, Any]]]) -> None:
    """Write what there is, one table below the other."""
    for number, rows in enumerate(filter(None, tables)):
        if number:
            click.echo()
        write_rows(rows, as_json=False)


def row(line: Line) -> dict[str, Any]:
    """A record as it is shown: with the first digits only."""
    shown = {**asdict(line), "key": line.key[:SHOWN]}
    del shown["version"]
    return shown


DIGITS = re.compile("[0-9a-f]{8}|[0-9a-f]{16}", re.ASCII | re.IGNORECASE)


def checked(digits: str) -> str:
    """Digits as an operator typed them. Raises ``UnknownRecord`` for anything else."""
    if not DIGITS.fullmatch(digits):  # not repeated: it may be a client's key
        raise UnknownRecord(
            "DIGITS are the 8 digits, 0 to 9 and a to f, that `flask idempotency list` shows, not the"
            " client's key; to find the digits of a key, run"
            " `flask idempotency list --key KEY --operation NAME --scope SCOPE`"
        )
    return digits.lower()
