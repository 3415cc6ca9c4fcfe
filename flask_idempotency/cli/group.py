"""The group, and what its commands share: the application's state, options, errors and output."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

import click
from flask.cli import AppGroup

from flask_idempotency.core.errors import IdempotencyError, StoreUnavailable
from flask_idempotency.operate.find import Sought, operation_name
from flask_idempotency.operate.words import as_utc, explain, printable
from flask_idempotency.stores.admin import NothingToDo


class _Group(AppGroup):
    """Shows our errors as one line instead of a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except NothingToDo as note:
            write(note.detail)
        except IdempotencyError as error:
            raise click.ClickException(printable(explain(error))) from error


_JSON = "flask_idempotency.json"


@click.group(cls=_Group)
def cli() -> None:
    """Look after the records of idempotency keys."""


def _note_json(context: click.Context, _option: click.Parameter, as_json: bool) -> None:
    context.meta[_JSON] = as_json


def as_json() -> bool:
    """Return True if the present command writes JSON."""
    return bool(click.get_current_context().meta[_JSON])


json_option = click.option("--json", is_flag=True, expose_value=False, callback=_note_json,
                           help="Write JSON, times in UTC.")  # fmt: skip
yes_option = click.option("--yes", is_flag=True, help="Do not ask.")
key_option = click.option("--key", metavar="KEY", help="Only the record of this key, as the client sent"
                          " it; needs --operation, and --scope unless there is one"
                          " tenant.")  # fmt: skip
namespace_option = click.option("--namespace", metavar="NAMESPACE", help="The namespace of --key, if it"
                                " is not that of the route or the application.")  # fmt: skip
operation_option = click.option("--operation", metavar="NAME",
                                help="Only this operation, such as an endpoint.")  # fmt: skip


MANY = click.IntRange(1, 1_000_000_000)
"""A count that every database takes."""


class Seconds(click.FloatRange):
    """Seconds from ``least`` to a day: a number, so not nan, and no longer than a clock can wait."""

    def __init__(self, least: float) -> None:
        super().__init__(least, 86_400)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Read a number. No comparison would reject nan."""
        seconds = super().convert(value, param, ctx)
        if seconds != seconds:  # noqa: PLR0124
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return seconds


_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_MOST_AGE = 100 * 365 * 86_400
"""No record is older. PostgreSQL cannot count back for ever."""


def read_age(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    """Read an age, in seconds or with a unit (``90m``, ``12h``, ``7d``, ``4w``); return its seconds."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,9})([smhdw]?)", text)
    if found is None:
        raise click.BadParameter(f"{text!r} is not an age, such as 90m, 12h, 7d, 4w, or seconds.")
    age = int(found[1]) * _UNITS[found[2]]
    if not age:
        raise click.BadParameter(f"{text!r} is no age: the least is 1 second.")
    if age > _MOST_AGE:
        raise click.BadParameter(f"{text!r} is more than 100 years.")
    return age


@contextmanager
def until_signal() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set; a second signal ends the process as usual."""
    stop = threading.Event()

    def handle(number: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        stop.set()

    before = {}
    with suppress(ValueError):  # only the main thread may, and only it is sent signals
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def repeat(every: float | None, once: Callable[[threading.Event], object]) -> None:
    """Do something once; or, with a pause of ``every`` seconds, until a signal.

    Then it goes on, and says so, while the store is away.
    """
    with until_signal() as stop:
        while not stop.is_set():
            try:
                once(stop)
            except StoreUnavailable as error:
                if every is None:
                    raise
                write(f"Error: {explain(error)}", err=True)
            if every is None:
                return
            stop.wait(every)


def write(text: str, *, err: bool = False) -> None:
    """Write a line; see :func:`printable`."""
    click.echo(printable(text), err=err)


def progress() -> Callable[[str], None]:
    """Show how far long work has come, in one line on standard error; no text removes the line.

    Shows nothing where that is no terminal, and never beside JSON.
    """
    if as_json() or not sys.stderr.isatty():
        return lambda _: None
    return lambda text: click.echo(f"\r\x1b[K{text}", err=True, nl=False)


def write_rows(rows: list[dict[str, Any]], none: str = "no records") -> None:
    """Write rows as a table, numbers to the right, or as JSON."""
    if as_json():
        click.echo(json.dumps(rows, indent=2, default=lambda time: as_utc(time, "T")))
    elif not rows:
        write(none)
    else:
        for line in table(rows):
            click.echo(line)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table, its head first, numbers to the right."""
    columns = [[name, *map(_cell, values)] for name, values in _columns(rows)]
    widths = [max(map(len, column)) for column in columns]
    right = [any(isinstance(value, int) for value in values) for _, values in _columns(rows)]
    padded = (
        [cell.rjust(width) if is_right else cell.ljust(width) for cell in column]
        for column, width, is_right in zip(columns, widths, right, strict=True)
    )
    return ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]


def _columns(rows: list[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
    return [(name, [row[name] for row in rows]) for name in rows[0]]


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return as_utc(value, " ")
    return "-" if value is None else printable(str(value))


def sought(operation: str | None, key: str | None, scope: str | None, namespace: str | None) -> Sought:
    """Return what the options say of records. Raises ``UnknownRecord`` for what names no operation."""
    return Sought(operation_name(operation), key, scope, namespace)
