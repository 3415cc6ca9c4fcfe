"""The group, and what its commands share: options, errors and output."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import click
from flask.cli import AppGroup

from flask_idempotency.core.errors import IdempotencyError
from flask_idempotency.operate.words import as_utc, explain, printable

_JSON = "flask_idempotency.json"


class _Group(AppGroup):
    """Shows our errors as one line instead of a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except IdempotencyError as error:
            raise click.ClickException(printable(explain(error))) from error


@click.group(cls=_Group)
def cli() -> None:
    """Look after the records of idempotency keys."""


def _note_json(context: click.Context, _option: click.Parameter, as_json: bool) -> None:
    context.meta[_JSON] = as_json


def as_json() -> bool:
    """Return True if the present command writes JSON."""
    return bool(click.get_current_context().meta[_JSON])


MANY = click.IntRange(1, 1_000_000_000)
"""A count that every database takes."""

json_option = click.option("--json", is_flag=True, expose_value=False, callback=_note_json,
                           help="Write JSON, times in UTC.")  # fmt: skip
yes_option = click.option("--yes", is_flag=True, help="Do not ask.")
by_option = click.option("--by", metavar="WHO", help="Who decides; by default the user logged in.")


def which_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of :class:`~flask_idempotency.operate.find.Sought`."""
    for option in (
        click.option("--namespace", metavar="NAMESPACE", help="The namespace of --key, if it is not"
                     " that of the route or the application."),
        click.option("--scope", metavar="SCOPE", help="Only the records of this tenant or user, or"
                     " whose --key it is; int:7 is the number alone."),
        click.option("--key", metavar="KEY", help="Only the record of this key, as the client sent it;"
                     " needs --operation, and --scope unless there is one tenant."),
        click.option("--operation", metavar="NAME", help="Only this operation, such as an endpoint."),
    ):  # fmt: skip
        command = option(command)
    return command


def asks(yes: bool) -> bool:
    """Return True if the command asks before it acts. Raises ``UsageError`` beside JSON."""
    if as_json() and not yes:
        raise click.UsageError("with --json, --yes is needed")
    return not yes


def write(text: str = "", *, err: bool = False) -> None:
    """Write a line; see :func:`printable`."""
    click.echo(printable(text), err=err)


def write_rows(rows: list[dict[str, Any]], none: str = "no records") -> None:
    """Write rows as a table, numbers to the right, or as JSON."""
    if as_json():
        click.echo(json.dumps(rows, indent=2, default=lambda time: as_utc(time, "T")))
        return
    for line in table(rows) if rows else [none]:
        write(line)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table, its head first, numbers to the right."""
    columns = []
    for name in rows[0]:
        values = [row[name] for row in rows]
        cells = [name, *map(_cell, values)]
        width, is_right = max(map(len, cells)), any(isinstance(value, int) for value in values)
        columns.append([cell.rjust(width) if is_right else cell.ljust(width) for cell in cells])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return as_utc(value, " ")
    return "-" if value is None else printable(str(value))
