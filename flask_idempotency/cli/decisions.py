"""Commands with which an operator decides what becomes of operations, and of what is stored of them."""

from __future__ import annotations

from collections import Counter

import click
from flask import Response, current_app

from flask_idempotency.core.errors import IdempotencyError
from flask_idempotency.core.keys import SHOWN
from flask_idempotency.operate.decide import (
    LONGEST_WHY,
    SAY_WHY,
    failure,
    given_response,
    is_empty,
    noted,
    settle,
    too_old,
    undecided,
)
from flask_idempotency.operate.erase import erasable, erase
from flask_idempotency.operate.find import admin, find
from flask_idempotency.operate.show import Found, row
from flask_idempotency.operate.words import LONGEST_NAME, is_legible, one_line, records
from flask_idempotency.stores.admin import Line
from flask_idempotency.web.routes import AppState, app_state

from .group import (
    as_json,
    cli,
    json_option,
    key_option,
    namespace_option,
    operation_option,
    progress,
    sought,
    write,
    write_rows,
    yes_option,
)
from .listing import checked, write_found

_attempt_option = click.option("--attempt", type=int, metavar="N", help="The attempt that you"
                               " have looked into; does nothing after another one.")  # fmt: skip


def _check_by(_context: click.Context, _option: click.Parameter, by: str | None) -> str | None:
    if len(one_line(by or "")) > LONGEST_NAME:
        raise click.BadParameter(f"A name has at most {LONGEST_NAME} characters.")
    return by


by_option = click.option("--by", metavar="WHO", callback=_check_by, help="Who decides; by default the"
                         " user logged in.")  # fmt: skip


def _check_why(_context: click.Context, _option: click.Parameter, why: str) -> str:
    if not is_legible(why, LONGEST_WHY):
        raise click.BadParameter(SAY_WHY)
    return why


_why_option = click.option("--why", metavar="TEXT", required=True, callback=_check_why,
                           help="The reason, which `show` shows and the log keeps.")  # fmt: skip


@cli.command()
@click.argument("digits")
@click.option("--fail", is_flag=True, help="Store a failure as its response; it never runs again.")
@click.option("--not-done", is_flag=True,
              help="No more was done than the finished steps: so say the other's books.")  # fmt: skip
@_attempt_option
@_why_option
@by_option
@json_option
def release(
    digits: str, fail: bool, not_done: bool, attempt: int | None, why: str, by: str | None
) -> None:
    """Let an operation that was interrupted, or has failed, be run again.

    DIGITS are the 8 digits that `list` shows; `list --key` finds those of a client's key. First find
    out what became of the operation, for example from the other service: the next retry runs the view
    again, without its finished steps. If it must not run again, use --fail: then every retry gets a
    500 of the type operation-failed. To give it the response that it should have had, use `resolve`.
    Until it has ended, it is listed as interrupted. Does not touch an operation that has completed or
    whose lease still runs. Atomic operations need nothing, as their next retry takes over, unless they
    have used up max_attempts.
    """
    state = app_state(current_app)
    seen = undecided(state, checked(digits), attempt)
    response = failure(state) if fail else None
    if response is None and not not_done and (why_not := too_old(state, seen)):
        raise IdempotencyError(
            f"{why_not}. If its books show no more than the finished steps, add --not-done; otherwise"
            " do the rest by hand, and `resolve` it"
        )
    entry = noted("failed" if fail else "released", why, by)
    settle(state, seen, entry, response, origin="cli", anew=not_done and not fail)
    _write_settled(
        state,
        seen,
        "failed for good" if fail else "may be run again; until then it is listed as interrupted",
    )


@cli.command()
@click.argument("digits")
@click.option("--status", type=click.IntRange(200, 599), required=True, metavar="N",
              help="The status of the response.")  # fmt: skip
@click.option("--body", metavar="TEXT", help="The body, which is JSON unless --content-type is given.")
@click.option("--body-file", type=click.Path(exists=True, dir_okay=False, allow_dash=True),
              metavar="FILE", help="The body; - reads standard input.")  # fmt: skip
@click.option("--header", "headers", multiple=True, metavar="'NAME: VALUE'", help="One more header.")
@click.option("--content-type", metavar="TYPE", help="application/json if there is a body.")
@_attempt_option
@_why_option
@by_option
@yes_option
@json_option
def resolve(
    digits: str,
    status: int,
    body: str | None,
    body_file: str | None,
    headers: tuple[str, ...],
    content_type: str | None,
    attempt: int | None,
    why: str,
    by: str | None,
    yes: bool,
) -> None:
    """Store the response that an interrupted or failed operation should have had.

    DIGITS are the 8 digits that `list` shows; `list --key` finds those of a client's key. First find
    out what became of the operation, for example from the other service. Shows the record and the
    response, and asks. Then every retry gets this response, the view never runs again, and a worker
    that is still at it can store nothing. So what the view has not done yet, such as saving rows of its
    own, is never done: where `show` lists the step that was in doubt, use `release`. The record notes
    who decided, when and why. Does not touch an operation that has completed or whose lease still runs.
    """
    if body is not None and body_file is not None:
        raise click.UsageError("give --body or --body-file, not both")
    if not yes and (as_json() or body_file == "-"):
        raise click.UsageError("with --json, and with a body from standard input, --yes is needed")
    state = app_state(current_app)
    digits, data = checked(digits), _content(body, body_file)
    response = given_response(state, status, data, headers, content_type)
    seen = undecided(state, digits, attempt)
    if not yes:
        write_found(state, Found.of(admin(state), seen))
        click.echo()
        _write_response(response)
        gets = f"an empty {status}" if is_empty(response) else "this response"
        click.confirm(f"Every retry will get {gets}. Store it?", abort=True)
    settle(state, seen, noted("resolved", why, by), response, origin="cli")
    _write_settled(state, seen, f"every retry gets this {status}")


def _content(body: str | None, body_file: str | None) -> bytes:
    if body_file is not None:
        try:
            with click.open_file(body_file, "rb") as file:
                return bytes(file.read())
        except OSError as error:  # a file may be there, and not to be read
            raise IdempotencyError(f"the body cannot be read: {error}") from error
    try:
        return (body or "").encode()
    except UnicodeEncodeError as error:  # a shell may give any bytes
        raise IdempotencyError("the body is not UTF-8 text: give it with --body-file") from error


def _write_response(response: Response) -> None:
    write(f"HTTP {response.status}")
    for name, value in response.headers:
        write(f"{name}: {value}")
    if body := response.get_data():
        click.echo()
        write(body.decode(errors="replace"))
    click.echo()


def _write_settled(state: AppState, seen: Line, done: str) -> None:
    if as_json():
        write_rows([row(find(admin(state), seen.key))])
    else:
        click.echo(f"{seen.key[:SHOWN]}: {done}")


@cli.command()
@click.option("--scope", metavar="SCOPE", help="Whose records: the id of a tenant or user.")
@operation_option
@key_option
@namespace_option
@by_option
@yes_option
@json_option
@click.pass_context
def forget(context: click.Context, /, by: str | None, yes: bool, **which: str | None) -> None:
    """Erase what is stored about a user: responses, steps, and the records themselves.

    Counts first, and asks; shows the record of a --key, and erases it only as it was shown. Never
    erases what is in progress, and says how many were left and why. Uses small transactions, so it
    may run at any time. Afterwards a retry of what was erased runs the view again, like a first
    request. The log says who erased how many, and when. Reads the whole table, unless there is a
    --key. The exit code is 1 if there is nothing to erase and nothing was left: the options may be
    mistyped.
    """
    if which["scope" if which["key"] is None else "operation"] is None:
        raise click.UsageError("give --scope; or --key and --operation, with their --scope")
    if as_json() and not yes:
        raise click.UsageError("with --json, --yes is needed")
    state, wanted = app_state(current_app), sought(**which)
    found = erasable(state, wanted)
    left, was_found = found.left, bool(found.count or found.left.total())
    if found.count and not yes:
        if found.lines:
            write_rows([row(line) for line in found.lines])
        write(f"{records(found.count)} to erase. Retries of these requests will run again.")
        _write_left(left)
        click.confirm("Erase?", abort=True)
    erased, show = 0, progress()
    for count in erase(state, found, by, origin="cli"):
        erased += count
        show(f"{erased:,} of {found.count:,} erased")
    show("")
    left["in_progress"] += found.count - erased
    if as_json():
        write_rows([{"erased": erased, **{state: left[state] for state in _WHY}}])
    elif was_found:
        write(f"{records(erased)} erased")
        _write_left(left)
    else:
        write(wanted.nothing_found(state))
    context.exit(0 if was_found else 1)


_WHY = {
    "in_progress": "in progress, or changed since it was counted: run this again later",
    "interrupted": "interrupted: release or resolve it, then run this again",
}


def _write_left(left: Counter[str]) -> None:
    for state, why in _WHY.items():
        if left[state]:
            write(f"{records(left[state])} left, {why}")
