"""Commands with which an operator decides what becomes of operations, and of what is stored of them."""

from __future__ import annotations

import sys
from collections import Counter

import click
from flask import current_app

from flask_idempotency.core.keys import SHOWN
from flask_idempotency.operate.decide import Operator, given_response, is_empty, settle, undecided
from flask_idempotency.operate.erase import MOST, erase
from flask_idempotency.operate.find import Sought, find
from flask_idempotency.operate.show import look_into, row
from flask_idempotency.operate.words import records
from flask_idempotency.stores.admin import Line
from flask_idempotency.web.routes import AppState, app_state

from . import group
from .group import as_json, asks, cli, write, write_rows
from .listing import write_found

_attempt_option = click.option("--attempt", type=int, metavar="N", help="The attempt that you"
                               " have looked into; does nothing after another one.")  # fmt: skip
_why_option = click.option("--why", metavar="TEXT", required=True,
                           help="The reason, which `show` shows and the log keeps.")  # fmt: skip


@cli.command()
@click.argument("digits")
@click.option("--fail", is_flag=True, help="Store a failure as its response; it does not run again.")
@click.option("--not-done", is_flag=True,
              help="No more was done than the finished steps: so say the other's books.")  # fmt: skip
@_attempt_option
@_why_option
@group.by_option
@group.json_option
def release(
    digits: str, fail: bool, not_done: bool, attempt: int | None, why: str, by: str | None
) -> None:
    """Let an operation that was interrupted, or has failed, be run again.

    DIGITS are the 8 digits that `list` shows. First find out what became of the operation: the next
    retry runs the view again, without its finished steps. Until it has ended, it is listed as
    interrupted. With --fail every retry gets a 500 of the type operation-failed, until you decide
    otherwise. Does not touch what has completed or whose lease still runs. Atomic operations need it
    only if they have used up max_attempts.
    """
    state, act = app_state(current_app), "fail" if fail else "release"
    seen = undecided(state, digits, act, attempt=attempt)
    settle(state, seen, act, why, Operator(by, "cli"), not_done=not_done)
    done = "failed for good" if fail else "may be run again; until then it is listed as interrupted"
    _write_settled(state, seen, done)


@cli.command()
@click.argument("digits")
@click.option("--status", type=click.IntRange(200, 599), required=True, metavar="N",
              help="The status of the response.")  # fmt: skip
@click.option("--body", default="", metavar="TEXT", help="The body, which is JSON unless --content-type"
              " is given; - reads standard input.")  # fmt: skip
@click.option("--header", "headers", multiple=True, metavar="'NAME: VALUE'", help="One more header.")
@click.option("--content-type", metavar="TYPE", help="application/json if there is a body.")
@_attempt_option
@_why_option
@group.by_option
@group.yes_option
@group.json_option
def resolve(
    digits: str,
    status: int,
    body: str,
    headers: tuple[str, ...],
    content_type: str | None,
    attempt: int | None,
    why: str,
    by: str | None,
    yes: bool,
) -> None:
    """Store the response that an interrupted or failed operation should have had.

    DIGITS are the 8 digits that `list` shows. First find out what became of the operation. Shows the
    record and the response, and asks. Then every retry gets this response, and the view never runs
    again: what it has not done yet, such as saving rows, is never done. So where `show` lists the step
    that was in doubt, use `release`. Does not touch what has completed or whose lease still runs.
    """
    must_ask, state = asks(yes), app_state(current_app)
    # A shell may give any bytes.
    given = sys.stdin.buffer.read() if body == "-" else body.encode(errors="surrogateescape")
    response = given_response(state, status, given, headers, content_type)
    seen = undecided(state, digits, "resolve", attempt=attempt)
    if must_ask:
        write_found(look_into(state, seen))
        click.echo(f"\nHTTP {response.status}")
        for name, value in response.headers:
            write(f"{name}: {value}")
        text = response.get_data().decode(errors="replace")
        for line in ("", text, "") if text else ("",):
            write(line)
        gets = f"an empty {status}" if is_empty(response) else "this response"
        click.confirm(f"Every retry will get {gets}. Store it?", abort=True)
    settle(state, seen, "resolve", why, Operator(by, "cli"), response)
    _write_settled(state, seen, f"every retry gets this {status}")


def _write_settled(state: AppState, seen: Line, done: str) -> None:
    if as_json():
        write_rows([row(find(state, seen.key))])
    else:
        write(f"{seen.key[:SHOWN]}: {done}")


@cli.command()
@group.which_options
@group.by_option
@group.yes_option
@group.json_option
@click.pass_context
def forget(context: click.Context, /, by: str | None, yes: bool, **which: str | None) -> None:
    """Erase what is stored about a user: responses, steps, and the records themselves.

    For one customer: forget --scope ID. Says how many there are (among the newest 100,000), asks, and
    erases all of them. Never erases what is in progress or waits for a decision, and says how many
    were left and why. Afterwards a retry of what was erased runs the view again. Uses small
    transactions; reads the whole table, unless there is a --key. The exit code is 1 if nothing was
    found: the options may be mistyped.
    """
    if which["scope" if which["key"] is None else "operation"] is None:
        raise click.UsageError("give --scope; or --key and --operation, with their --scope")
    must_ask, state, sought = asks(yes), app_state(current_app), Sought(**which)
    if sought.scope is not None:
        sought.refuse_two_scopes(state)
    found = sought.lines(state, None, MOST)
    lines = [line for line in found if not line.stays]
    left = Counter(line.state for line in found if line.stays)
    if lines and must_ask:
        if sought.key is not None:
            write_rows([row(line) for line in lines])
        write(f"{records(len(lines))} to erase. Retries of these requests will run again.")
        _write_left(left, found)
        click.confirm("Erase?", abort=True)
    erased = erase(state, lines, Operator(by, "cli"), sought.operation)
    left["in_progress"] += len(lines) - erased
    if as_json():
        write_rows([{"erased": erased, **{state: left[state] for state in _WHY_LEFT}}])
    elif found:
        write(f"{records(erased)} erased")
        _write_left(left, found)
    else:
        write(sought.nothing_found(state))
    context.exit(0 if found else 1)


_WHY_LEFT = {
    "in_progress": "in progress, or changed since it was counted: run this again later",
    "interrupted": "interrupted: release or resolve it, then run this again",
    "failed": "failed after a finished step: release or resolve it, then run this again",
}


def _write_left(left: Counter[str], found: list[Line]) -> None:
    for state, why in _WHY_LEFT.items():
        if left[state]:
            write(f"{records(left[state])} left, {why}")
    if len(found) == MOST:
        write(f"these are the newest {MOST:,}: run this again for the others")
