"""The group, and what its commands share: the application's records, errors and output."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any
from unicodedata import category

import click
from flask import current_app
from flask.cli import AppGroup

from flask_idempotency.core.errors import IdempotencyError, Problem
from flask_idempotency.stores.admin import Admin, NothingToDo, reason
from flask_idempotency.web.setup.state import AppState, app_state

from .stores import admin_of


class _Group(AppGroup):
    """Shows our errors as one line instead of a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except NothingToDo as note:
            write(note.detail)
        except IdempotencyError as error:
            raise click.ClickException(printable(explain(error))) from error


_BIND = "flask_idempotency.bind"


@click.group(cls=_Group)
@click.option("--bind", metavar="NAME", help="The database, where IDEMPOTENCY_BINDS has several: a bind"
              " key; default for None.")  # fmt: skip
@click.pass_context
def cli(context: click.Context, bind: str | None) -> None:
    """Look after the records of idempotency keys."""
    context.meta[_BIND] = bind


as_json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON, times in UTC.")


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
_SHOWN_UNITS = {"d": 86_400, "h": 3600, "min": 60, "s": 1}


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


def duration(seconds: float) -> str:
    """Seconds in their one or two largest units: ``"3 min 20 s"``, ``"2 d 4 h"``."""
    left, parts = int(abs(seconds)), list[str]()
    for unit, size in _SHOWN_UNITS.items():
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {unit}")
    return " ".join(part for part in parts[:2] if not part.startswith("0 ")) or "0 s"


def current_state() -> AppState:
    """Return the state of the application, and of the database, that a command runs for."""
    state, bind = app_state(current_app), click.get_current_context().meta[_BIND]
    names = {"default" if key is None else key: each for key, each in state.binds.items()}
    if bind is None and len(names) == 1:
        return state
    if bind not in names:
        text = "which database? Several have records" if bind is None else f"no records in {bind!r}"
        raise click.UsageError(f"{text}: write flask idempotency --bind {{{'|'.join(names)}}} ...")
    return names[bind]


def admin(state: AppState) -> Admin:
    """Return what the commands need of the application's store. Raises what :func:`admin_of` does."""
    return admin_of(state.records, state.settings.store)


def require(store: Admin, verb: str) -> None:
    """Raise ``IdempotencyError`` if a store of the application's own lacks a verb."""
    if not hasattr(store, verb):
        raise IdempotencyError(
            f"the application's own store cannot do this: its admin() has no {verb}(), see"
            " flask_idempotency.stores.admin.Admin"
        )


def explain(error: IdempotencyError) -> str:
    """The error for an operator: in the driver's words, where a client only reads to try again."""
    return reason(error) if isinstance(error, Problem) else error.detail


def write(text: str, *, err: bool = False) -> None:
    """Write a line; see :func:`printable`."""
    click.echo(printable(text), err=err)


def printable(text: str) -> str:
    """Text without instructions to the terminal: whoever writes to the table is not trusted."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


LONGEST_NAME = 200
"""Characters of a person's name."""

_BLANK = "\u115f\u1160\u2800\u3164\uffa0"
"""Letters and a symbol that are drawn as nothing."""


def is_legible(text: str, longest: int) -> bool:
    """Return True if a name or a reason can be seen, and has at most so many characters."""
    seen = (c for c in text if c.isprintable() and category(c)[0] not in "MZ" and c not in _BLANK)
    return len(text.strip()) <= longest and any(seen)


def one_line(name: str) -> str:
    """A person's name as it is noted, on one line; nothing if nothing of it can be seen."""
    line = "".join(c if c.isprintable() else " " for c in name).strip()
    return line if is_legible(line, len(line)) else ""


def records(count: int) -> str:
    """So many records, in words."""
    return "1 record" if count == 1 else f"{count:,} records"


def progress(as_json: bool) -> Callable[[str], None]:
    """Show how far long work has come, in one line on standard error; no text removes the line.

    Shows nothing where that is no terminal, and never beside JSON.
    """
    if as_json or not sys.stderr.isatty():
        return lambda _: None
    return lambda text: click.echo(f"\r\x1b[K{text}", err=True, nl=False)


def write_rows(rows: list[dict[str, Any]], as_json: bool, none: str = "no records") -> None:
    """Write rows as a table, numbers to the right, or as JSON."""
    if as_json:
        click.echo(json.dumps([in_utc(row) for row in rows], indent=2))
    elif not rows:
        write(none)
    else:
        for line in table(rows):
            click.echo(line)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of a table, its head first, numbers to the right."""
    cells = [[_cell(_time(value, " ")) for value in row.values()] for row in rows]
    lines = [list(rows[0]), *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    values = zip(*(row.values() for row in rows), strict=True)
    right = [any(isinstance(value, int) for value in column) for column in values]
    return [_aligned(line, widths, right) for line in lines]


def _aligned(cells: list[str], widths: list[int], right: list[bool]) -> str:
    padded = (
        cell.rjust(width) if is_right else cell.ljust(width)
        for cell, width, is_right in zip(cells, widths, right, strict=True)
    )
    return "  ".join(padded).rstrip()


def in_utc(row: dict[str, Any]) -> dict[str, Any]:
    """A row as it is written as JSON."""
    return {name: _time(value, "T") for name, value in row.items()}


def _time(value: Any, between: str) -> Any:
    """A time in UTC, as text; anything else as it is."""
    return as_utc(value, between) if isinstance(value, datetime) else value


def as_utc(time: datetime, between: str) -> str:
    """A time in UTC, as text with milliseconds: to be compared with what another service has logged."""
    return time.astimezone(timezone.utc).isoformat(between, "milliseconds").replace("+00:00", "Z")


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else printable(str(value))
