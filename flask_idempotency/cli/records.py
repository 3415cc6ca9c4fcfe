"""Commands to create the tables, look at the records, and let an operation be run again."""

from __future__ import annotations

import re
import secrets
from dataclasses import asdict
from typing import Any

import click

from flask_idempotency.core.engine import Claimed
from flask_idempotency.core.errors import IdempotencyError, LeaseLost, OperationFailed, UnknownRecord
from flask_idempotency.core.keys import SHOWN
from flask_idempotency.core.records import Claim, State
from flask_idempotency.stores.admin import Admin, Line, StepLine
from flask_idempotency.web.request.response import capture, lasting_response
from flask_idempotency.web.setup.state import AppState

from .group import MANY, admin, as_json_option, cli, current_state, in_utc, write, write_rows
from .keys import possible_hashes

STATES = (*(state.value for state in State), "interrupted", "released")


@cli.command("create-table")
@as_json_option
def create_table(as_json: bool) -> None:
    """Create the table of the records and that of their steps, with indexes and fill factor.

    Creates these two and none of the application's own. If a table of an earlier release exists, adds
    the columns, indexes and fill factor that it lacks, while requests use it; never alters or drops a
    column. Running it again does nothing. An application with Flask-Migrate needs only a migration: the
    tables are part of db.metadata.
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
@click.option("--limit", type=MANY, default=20, show_default=True, metavar="N")
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
    becomes "interrupted" when its lease runs out, and "released" when it may be run again. The exit
    code is 1 if a --key has no record.
    """
    app, none = current_state(), "no records"
    store = admin(app)
    if key is not None and operation is not None:
        hashes = possible_hashes(app, key, operation, scope, namespace)
        lines = [line for each in hashes for line in store.starting(each)]
        found = [line for line in lines if state in (None, line.state)]
        found.sort(key=lambda line: str(line.created), reverse=True)
        none = "no record of this key, operation, scope and namespace"
    elif key is scope is namespace is None:
        found = store.newest(operation, state, limit)
    else:
        raise click.UsageError("a record is found by --key and --operation, with its --scope")
    write_rows([_row(line) for line in found], as_json, none)
    context.exit(0 if found or key is None else 1)


@cli.command()
@click.argument("digits")
@as_json_option
def show(digits: str, as_json: bool) -> None:
    """Show one record and its finished steps.

    DIGITS are the 8 digits that `list` shows; `list --key` finds those of a client's key. Shows no key,
    no response and no step's result. The steps tell how far an interrupted operation came: the step
    after the last one may or may not have happened.
    """
    line, steps = find(admin(current_state()), _checked(digits))
    if as_json:
        write_rows([{**_row(line), "steps": [in_utc(asdict(step)) for step in steps]}], as_json)
        return
    write_rows([_row(line)], as_json)
    if steps:
        click.echo()
        write_rows([asdict(step) for step in steps], as_json)


@cli.command()
@click.argument("digits")
@click.option("--fail", is_flag=True, help="Store a failure as its response; it never runs again.")
@as_json_option
def release(digits: str, fail: bool, as_json: bool) -> None:
    """Let an operation that was interrupted, or has failed, be run again.

    DIGITS are the 8 digits that `list` shows; `list --key` finds those of a client's key. First find
    out what became of the operation, for example from the other service: the next retry runs the view
    again, without its finished steps. If it must not run again, use --fail: then every retry gets a
    500 of the type operation-failed. Does not touch an operation that has completed or whose lease
    still runs. Atomic operations need nothing: their next retry takes over.
    """
    state = current_state()
    store, digits = admin(state), _checked(digits)
    line, _ = find(store, digits)
    key = line.key[:SHOWN]
    found = store.reopen(bytes.fromhex(digits), secrets.token_urlsafe(16), state.settings.ttl)
    if found is None and line.state == "released":
        raise IdempotencyError(f"{key} has been released: its next retry runs the view again")
    if found is None:
        raise IdempotencyError(
            f"{key} is {line.state.replace('_', ' ')}: only what is interrupted or failed can be"
            " released"
        )
    if fail:
        _fail(state, found)
    if as_json:
        write_rows([_row(find(store, line.key)[0])], as_json)
    else:
        click.echo(f"{key}: {'failed for good' if fail else 'may be run again'}")


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


def _fail(state: AppState, key: bytes) -> None:
    """Store a failure as the response of a record that nobody holds: an operator has decided.

    Raises ``StoreUnavailable``, and ``LeaseLost`` if a request was faster.
    """
    record = state.records.look(key)
    if record is None:
        raise LeaseLost
    problem = OperationFailed("The operation was interrupted, and will not be run again.")
    response = lasting_response(state.app, problem, state.settings)
    owner = secrets.token_urlsafe(16)
    claim = Claim(key, record.name, record.fingerprint, owner, state.settings.ttl, state.settings.lease)
    decision = state.engine.decide(claim)
    if not isinstance(decision, Claimed):
        raise LeaseLost
    decision.execution.complete(capture(response, state.settings))


def _row(line: Line) -> dict[str, Any]:
    return {**asdict(line), "key": line.key[:SHOWN]}


def _checked(digits: str) -> str:
    if not re.fullmatch(
        "[0-9a-fA-F]{8}|[0-9a-fA-F]{16}", digits
    ):  # not repeated: it may be a client's key
        raise UnknownRecord(
            "DIGITS are the 8 digits, 0 to 9 and a to f, that `flask idempotency list` shows, not the"
            " client's key; to find the digits of a key, run"
            " `flask idempotency list --key KEY --operation NAME --scope SCOPE`"
        )
    return digits.lower()
