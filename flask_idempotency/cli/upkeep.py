"""Commands that run regularly: the check before each release, and the purge."""

from __future__ import annotations

import threading
from dataclasses import asdict

import click
from flask import current_app

from flask_idempotency.core.errors import StoreUnavailable
from flask_idempotency.operate import purge as purging
from flask_idempotency.operate.check import examine
from flask_idempotency.operate.find import admin
from flask_idempotency.operate.words import duration, explain, records
from flask_idempotency.stores.admin import Admin
from flask_idempotency.web.routes import app_state

from .group import (
    MANY,
    Seconds,
    as_json,
    cli,
    json_option,
    progress,
    read_age,
    repeat,
    write,
    write_rows,
)


@cli.command()
@click.option("--batch", type=click.IntRange(1, 100_000), default=1000, show_default=True, metavar="N",
              help="The most records to delete in one transaction.")  # fmt: skip
@click.option("--rate", type=MANY, metavar="N", help="The most records to delete a second, on average.")
@click.option("--every", type=Seconds(1), metavar="SECONDS",
              help="Go on, with this pause after each purge, until SIGINT or SIGTERM.")  # fmt: skip
@click.option("--older-than", callback=read_age, metavar="AGE", help="Delete also what ended so long"
              " ago and has not expired: 12h, 7d, or seconds.")  # fmt: skip
@click.option("--yes", is_flag=True, help="Do not ask about --older-than.")
@json_option
def purge(batch: int, rate: int | None, every: float | None, older_than: int | None, yes: bool) -> None:
    """Delete the records that have expired.

    Uses small transactions that nothing waits for, so it may run at any time, and several at once.
    Keeps a record whose request is still running, even an expired one. Run it from cron, or leave it
    running with --every: then it survives a database that is away for a while. SIGINT and SIGTERM end
    it between two transactions. With --older-than it also deletes records that completed or failed so
    long ago, whatever their ttl, after counting them and asking: a retry of theirs runs the view again.
    """
    store = admin(app_state(current_app))
    if older_than is not None and not yes:
        if as_json():
            raise click.UsageError("with --json, --older-than needs --yes")
        _ask(store, older_than)
    what = "expired" if older_than is None else "expired or old"

    def once(stop: threading.Event) -> None:
        deleted, show = 0, progress()
        try:
            for deleted in purging.purge(store, stop, batch, older_than, rate):
                show(f"{deleted:,} deleted")
        except StoreUnavailable as error:
            if every is None:
                raise
            write(f"Error: {explain(error)}", err=True)
        finally:
            show("")
        if as_json():
            write_rows([{"deleted": deleted}])
        elif deleted or every is None:
            click.echo(f"{deleted} {what} {'record' if deleted == 1 else 'records'} deleted")

    repeat(every, once)


def _ask(store: Admin, seconds: int) -> None:
    if old := store.count_older(seconds):
        what = f"{records(old)} that ended more than {duration(seconds)} ago"
        write(f"To delete, besides what has expired: {what}. Retries of these requests will run again.")
        click.confirm("Delete?", abort=True)


@cli.command()
@json_option
@click.pass_context
def check(context: click.Context) -> None:
    """Check that everything the guarantees depend on is in place.

    Prints one line for each check: ok, advice (works, but could be better) or FAILED, with what to do.
    Claims one record and writes one step, as a request would, and deletes them. Asks once on a
    connection of our own, as the purge after a response and observing do.
    Then checks the routes: names the endpoints that change something and are not protected; what the
    first request would refuse, such as @idempotent above the route; arguments of protect() and exempt()
    that are not registered; views of other packages that protect() covers; and, with requests that go
    to no view, what reads a form too early, and a scope of protect() that raises an error where nobody
    is signed in. The exit code is 1 if a check failed: run it before each release.
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
