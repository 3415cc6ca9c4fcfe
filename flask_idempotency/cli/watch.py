"""The command that shows what is going on, again and again, in a terminal or for a program."""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import click

from flask_idempotency.operate.find import admin, require
from flask_idempotency.operate.watch import Look, look
from flask_idempotency.operate.words import duration, printable, records
from flask_idempotency.stores.admin import CAPPED

from .group import Seconds, as_json, cli, current_state, json_option, table, until_signal

try:
    import termios
    import tty
except ImportError:  # Windows: Ctrl-C ends it
    _CAN_READ_KEYS = False
else:
    _CAN_READ_KEYS = True

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Show the terminal's other screen, without a cursor; give the first one back as it was."""
_REDRAW = "\x1b[H\x1b[J"

_KEY_SECONDS = 0.2
"""How long a signal may go unnoticed while a key is waited for."""


@cli.command()
@click.option("--every", type=Seconds(0.5), default=2.0, show_default=True, metavar="SECONDS",
              help="The time between two looks.")  # fmt: skip
@click.option("--once", is_flag=True, help="Look once, and end.")
@json_option
def watch(every: float, once: bool) -> None:
    """Show what there is and what happens, until q or Ctrl-C.

    For each operation and state: about how many records there are. Then how many begin and are deleted
    each second, how many leases run, how many operations are interrupted, how many expired records wait
    for a purge, and whether Redis works. Cheap on a table of any size: what no index counts is
    estimated from a sample. Goes on while the database is away. With --json it writes one object a line
    for each look. With --once it looks once; the exit code is 1 if the database is away.
    """
    state = current_state()
    require(admin(state), "overview")
    before, is_live = None, sys.stdout.isatty() and not (once or as_json())
    with until_signal() as stop, _screen(stop, is_live) as (draw, wait):
        while True:
            seen = look(state, before)
            text = text_of(seen, state.settings.table) + ("" if once or is_live else "\n")
            draw(json.dumps(_row(seen)) if as_json() else text)
            if once:
                click.get_current_context().exit(1 if seen.error else 0)
            wait(every)
            if stop.is_set():
                return
            before = seen


def _row(look: Look) -> dict[str, Any]:
    """Return one look as JSON has it."""
    found = {} if look.overview is None else asdict(look.overview)
    found |= {"inserted_per_second": look.inserted, "deleted_per_second": look.deleted}
    return {"at": f"{look.at:%Y-%m-%dT%H:%M:%SZ}", "error": look.error, "redis": look.redis, **found}


def text_of(look: Look, name: str) -> str:
    """Return one look as a terminal shows it, for the table ``name``."""
    lines = [f"{look.at:%Y-%m-%d %H:%M:%SZ}  {name}", ""]
    redis = f"Redis         {look.redis}"
    found = look.overview
    if found is None:
        return "\n".join([*lines, f"the records cannot be reached: {look.error}", "", redis])
    rows = [{"operation": t.operation, "state": t.state, "records": t.count} for t in found.tallies]
    about = "about " if found.estimated else ""
    tallies = [*table(rows), f"{about}{records(found.total)}"] if rows else ["no records"]
    facts = [
        f"each second   {_rate(look.inserted)} begun, {_rate(look.deleted)} deleted",
        f"leases        {_count(found.running)} running",
        f"interrupted   {_count(found.interrupted)}{_since(found.interrupted_seconds)}",
        f"to purge      {_count(found.expired)}{_since(found.expired_seconds)}",
    ]
    return "\n".join([*lines, *tallies, "", *facts, redis])


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,}"


def _count(count: int) -> str:
    return f"{count:,} or more" if count >= CAPPED else f"{count:,}"


def _since(seconds: float | None) -> str:
    return "" if seconds is None else f", the oldest for {duration(seconds)}"


@contextmanager
def _screen(
    stop: threading.Event, is_live: bool
) -> Iterator[tuple[Callable[[str], None], Callable[[float], object]]]:
    """Return what draws a text, and what waits for some seconds or until ``stop``.

    On a terminal the text replaces the one before it, ``q`` sets ``stop``, and at the end the terminal
    is as it was, with the last text.
    """
    if not is_live:
        yield click.echo, stop.wait
        return
    last = [""]

    def draw(text: str) -> None:
        last[0] = text
        columns, rows = shutil.get_terminal_size()
        fitting = [printable(line)[:columns] for line in text.splitlines()[: rows - 1]]
        click.echo(_REDRAW + "\n".join(fitting), nl=False)

    click.echo(_ENTER, nl=False)
    try:
        with _keys(stop) as wait:
            yield draw, wait
    finally:
        click.echo(_LEAVE + last[0])


@contextmanager
def _keys(stop: threading.Event) -> Iterator[Callable[[float], object]]:
    """Return what waits for some seconds, or until ``stop``, which the key ``q`` sets, too."""
    if not (_CAN_READ_KEYS and sys.stdin.isatty()):
        yield stop.wait
        return

    descriptor = sys.stdin.fileno()

    def wait(seconds: float) -> None:
        until = time.monotonic() + seconds
        while not stop.is_set() and (left := until - time.monotonic()) > 0:
            ready, _, _ = select.select([descriptor], [], [], min(left, _KEY_SECONDS))
            if ready and _ends(os.read(descriptor, 64)):
                stop.set()

    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield wait
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _ends(keys: bytes) -> bool:
    """Return True if somebody typed ``q``, or the terminal is gone."""
    return not keys or b"q" in keys.lower()
