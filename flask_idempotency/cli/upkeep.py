"""Commands that run regularly: the check before each release, and the purge."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import click
from flask import current_app

from flask_idempotency.core.errors import StoreUnavailable
from flask_idempotency.operate.check import examine
from flask_idempotency.operate.find import admin
from flask_idempotency.operate.words import explain
from flask_idempotency.web.routes import app_state

from .group import as_json, cli, json_option, write, write_rows


@cli.command()
@click.option("--batch", type=click.IntRange(1, 100_000), default=1000, show_default=True, metavar="N",
              help="The most records to delete in one transaction.")  # fmt: skip
@click.option("--every", type=click.IntRange(1, 86_400), metavar="SECONDS",
              help="Go on, with this pause after each purge, until SIGINT or SIGTERM.")  # fmt: skip
@json_option
def purge(batch: int, every: int | None) -> None:
    """Delete the records that have expired.

    Uses small transactions, so it may run at any time, and several at once. Keeps a record whose
    request is still running. With --every it survives a database that is away for a while.
    """
    store = admin(app_state(current_app))
    with _until_signal() as stop:
        while not stop.is_set():
            try:
                deleted = 0
                for count in store.purge(batch):
                    deleted += count
                    if stop.is_set():
                        break
                if as_json():
                    write_rows([{"deleted": deleted}])
                elif deleted or every is None:
                    write(f"{deleted} expired {'record' if deleted == 1 else 'records'} deleted")
            except StoreUnavailable as error:
                if every is None:
                    raise
                write(f"Error: {explain(error)}", err=True)
            if every is None or stop.wait(every):
                return


@contextmanager
def _until_signal() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set; a second signal ends the process as usual."""
    stop, before = threading.Event(), dict[int, Any]()

    def handle(number: int, _frame: object) -> None:
        stop.set()
        signal.signal(number, before[number])

    if threading.current_thread() is threading.main_thread():  # no other is sent signals
        before = {each: signal.signal(each, handle) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@cli.command()
@json_option
@click.pass_context
def check(context: click.Context) -> None:
    """Check that everything the guarantees depend on is in place.

    One line for each check: ok, advice (works, but could be better) or FAILED, with what to do. Claims
    one record, completes and deletes it. Then names the endpoints that change something and are not
    protected, and what the first request would refuse, such as @idempotent above the route. The exit
    code is 1 if a check failed.
    """
    found, state = [], app_state(current_app)
    for finding in examine(state):
        found.append(finding)
        if not as_json():
            write(f"{finding.level:<8}{finding.subject:<14}{finding.text}")
            if finding.remedy:
                write(f"{'':<22}-> {finding.remedy}")
    if as_json():
        write_rows([asdict(finding) for finding in found])
    context.exit(1 if any(finding.level == "FAILED" for finding in found) else 0)
