"""Commands to create the tables, and to look at the records."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

import click

from flask_idempotency.core.errors import SealBroken, UnknownRecord
from flask_idempotency.core.keys import SHOWN, derive_key
from flask_idempotency.core.records import State
from flask_idempotency.stores.admin import Admin, AuditEntry, Line, StepLine
from flask_idempotency.web.attempt.steps import purpose
from flask_idempotency.web.setup.state import AppState

from .advice import Advice, advise
from .group import MANY, admin, as_json_option, cli, current_state, in_utc, table, write, write_rows
from .keys import find_by_key, find_of_scope, nothing_found, operation_name

STATES = (*(state.value for state in State), "interrupted", "released", "observed", "erased")


@cli.command("create-table")
@as_json_option
def create_table(as_json: bool) -> None:
    """Create the table of the records and that of their steps, with indexes and fill factor.

    With the operator's page, creates the table of its counts, too, and none of the application's own.
    If a table exists, creates the indexes that it lacks, and changes nothing else. Nobody can write to
    the table meanwhile: for one in use, check prints a statement that blocks nobody. Running it again
    does nothing. An application with Flask-Migrate needs only a migration: the tables are part of
    db.metadata.
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
@click.option("--scope", metavar="SCOPE", help="Only the records of this tenant or user, or whose --key"
              " it is.")  # fmt: skip
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
    """List the newest records, or those of a scope, or find that of a key.

    Never shows a key or a response: the first column has the first 8 digits of the hash that stands for
    scope, operation and key. If a worker dies in an atomic operation, the record stays "in_progress"
    until the next request with the key takes it over. An operation that is not atomic becomes
    "interrupted" when its lease runs out, and "released" when it may be run again. "observed" is
    whatever was not enforced, and "erased" is what `forget` leaves: who did it, and when. With --scope
    the whole table is read. The exit code is 1 if a --key or a --scope has no record.
    """
    app, none = current_state(), "no records"
    operation = operation_name(operation)
    store = admin(app)
    if key is not None and operation is not None:
        lines = find_by_key(app, store, key, operation, scope, namespace)
        found = [line for line in lines.values() if state in (None, line.state)]
        found.sort(key=lambda line: str(line.created), reverse=True)
        none = nothing_found(app, key, operation, scope)
    elif key is not None or namespace is not None:
        raise click.UsageError("a record is found by --key and --operation, with its --scope")
    elif scope is not None:
        found = find_of_scope(store, scope, operation, state, limit)
        none = nothing_found(app, None, operation, scope)
    else:
        found = store.newest(operation, state, limit)
    write_rows([row(line) for line in found], as_json, none)
    context.exit(0 if found or key is scope is None else 1)


@cli.command()
@click.argument("digits")
@click.option("--derive", "names", multiple=True, metavar="NAME",
              help="Show derive_key(NAME) of the operation, too.")  # fmt: skip
@as_json_option
def show(digits: str, names: tuple[str, ...], as_json: bool) -> None:
    """Show one record, its finished steps with their results, and what operators did to it.

    DIGITS are the 8 digits that `list` shows; `list --key` finds those of a client's key. Shows no key
    of a client and no response. The steps tell how far an interrupted operation came: the step after
    the last one may or may not have happened. `derived_key` is what the view gets from derive_key with
    the step's name, to find the call at the other service. If the view derives it from another name, or
    the step was cut off, use --derive.
    """
    state = current_state()
    store = admin(state)
    found = Shown.of(state, store, find(store, checked(digits)), names)
    if as_json:
        line, steps, audit, derived = (
            [in_utc(each) for each in rows]
            for rows in ([row(found.line)], found.steps, found.audit, found.derived)
        )
        more = {"derived": derived} if names else {}
        write_rows([{**line[0], "steps": steps, "audit": audit, **more}], as_json)
    else:
        found.write()


def find(admin: Admin, digits: str) -> Line:
    """Return the record whose key's hash begins with ``digits``.

    Raises ``UnknownRecord`` if there is none, or more than one.
    """
    found = admin.starting(bytes.fromhex(digits))
    if len(found) != 1:
        text = f"there is {'more than one' if found else 'no'} record whose digits are {digits}"
        longer = ": give all 16 digits, such as " + " or ".join(sorted(line.key for line in found))
        raise UnknownRecord(text + (longer if found else ""))
    return found[0]


def find_audit(admin: Admin, digits: str) -> list[AuditEntry]:
    """Return what operators did to the record whose key's hash begins with ``digits``.

    Nothing if a store of the application's own cannot note it.
    """
    return admin.audit(bytes.fromhex(digits)) if hasattr(admin, "audit") else []


LONGEST_RESULT = 80
"""Characters of a step's result in a table; JSON has all of it."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A record as an operator sees it; all but ``line`` and ``advice`` are rows."""

    line: Line
    steps: list[dict[str, Any]]
    audit: list[dict[str, Any]]
    derived: list[dict[str, Any]]
    advice: Advice | None

    @classmethod
    def of(cls, state: AppState, store: Admin, line: Line, names: tuple[str, ...] = ()) -> Shown:
        """The record, and keys derived from ``names``. Says on standard error why it lacks a result."""
        start = bytes.fromhex(line.key)
        steps = store.steps(start)
        # None if the record is gone, or a store of one's own lacks ``key``.
        key = store.key(start) if (steps or names) and hasattr(store, "key") else None
        rows, why = step_rows(state, key, steps)
        if why:
            write(f"a step's result cannot be read: {why}", err=True)
        audit = [{"at": each.at, **asdict(each)} for each in find_audit(store, line.key)]
        return cls(line, rows, audit, derived_rows(key, names), advise(line, steps))

    def write(self) -> None:
        """Write what there is, one table below the other, and the advice."""
        steps = [{**step, "result": _short(step["result"])} for step in self.steps]
        blocks = [table(rows) for rows in ([row(self.line)], steps, self.audit, self.derived) if rows]
        if self.advice is not None:
            blocks.append([*self.advice.sentences])
        for number, lines in enumerate(blocks):
            for line in [""] * bool(number) + lines:
                write(line)


def _short(result: str | None) -> str | None:
    is_long = result is not None and len(result) > LONGEST_RESULT
    return f"{result[:LONGEST_RESULT]}..." if result is not None and is_long else result


def step_rows(
    state: AppState, key: bytes | None, steps: list[StepLine]
) -> tuple[list[dict[str, Any]], str]:
    """The finished steps with their derived keys and results, and why a result cannot be read.

    Without the ``key``, the whole hash of the record's key, they have neither.
    """
    why, rows = "", list[dict[str, Any]]()
    for step in steps:
        shown = {
            "name": step.name,
            "attempt": step.attempt,
            "bytes": step.bytes,
            "finished": step.finished,
        }
        shown |= {"derived_key": None if key is None else derive_key(key, step.name), "result": None}
        if key is not None and step.result is not None:
            try:
                opened = state.sealer.open_bytes(step.result, key, purpose(step.name))
                shown["result"] = opened.decode(errors="backslashreplace")
            except SealBroken as error:
                why = error.detail
        rows.append(shown)
    return rows, why


def derived_rows(key: bytes | None, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return what a view of this operation gets from ``derive_key`` with these names."""
    return [{"name": name, "derived_key": derive_key(key, name)} for name in names if key is not None]


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
