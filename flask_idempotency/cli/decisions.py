"""Commands with which an operator decides what becomes of an interrupted or failed operation.

The page for operators uses :func:`settle`, too.
"""

from __future__ import annotations

import getpass
import secrets
from codecs import BOM_UTF8
from contextlib import suppress
from dataclasses import replace

import click
from flask import Response
from werkzeug.datastructures import Headers

from flask_idempotency.core.errors import (
    BodyMalformed,
    IdempotencyError,
    OperationFailed,
    RecordBroken,
    SealBroken,
    UnknownRecord,
)
from flask_idempotency.core.fingerprint import parse_json
from flask_idempotency.core.keys import SHOWN
from flask_idempotency.core.ports import Plain
from flask_idempotency.core.records import Claim, Record
from flask_idempotency.core.storable import storable
from flask_idempotency.stores.admin import Admin, AuditEntry, Line, Verdict
from flask_idempotency.web.request.response import capture, lasting_response
from flask_idempotency.web.setup.state import AppState

from .group import (
    LONGEST_NAME,
    admin,
    as_json_option,
    cli,
    current_state,
    is_legible,
    one_line,
    require,
    write,
    write_rows,
)
from .records import Shown, checked, find, row


def undecided(store: Admin, digits: str, attempt: int | None = None) -> Line:
    """The record that an operator is about to decide about, as it is now.

    :param digits: 8 or 16 hex digits, the first of the key's hash.
    :param attempt: the attempt that the operator has looked into, if it was said.
    :raises UnknownRecord: if there is no such record, or more than one.
    :raises IdempotencyError: if it is neither interrupted nor failed, or in another attempt.
    """
    require(store, "settle")
    line = find(store, digits)
    if attempt not in (None, line.attempt):
        raise overtaken(line)
    if line.state not in ("interrupted", "failed"):
        raise _refusal(line)
    return line


def settle(
    state: AppState, store: Admin, seen: Line, entry: AuditEntry, response: Response | None = None
) -> None:
    """Release an interrupted or failed operation, or store ``response`` as its response.

    :param seen: the record as the operator has seen it.
    :param entry: what is noted in the record.
    :raises UnknownRecord: if the record is gone.
    :raises IdempotencyError: if it has changed since, or somebody works on it. Then nothing is done.
    """
    key = store.key(bytes.fromhex(seen.key))
    if key is None:
        raise UnknownRecord(f"{seen.key[:SHOWN]} has just been deleted")
    verdict = Verdict(key, secrets.token_urlsafe(16), state.settings.ttl, entry, seen.version)
    if response is not None:
        verdict = _with_response(state, verdict, response)
    # A statement whose reply was lost is sent twice: then it was done all the same.
    if not store.settle(verdict) and not _is_done(state, verdict):
        now = find(store, seen.key)
        if now.version != seen.version:
            raise overtaken(now)
        raise IdempotencyError(f"{seen.key[:SHOWN]} was in use just now: look at it again")


def overtaken(now: Line) -> IdempotencyError:
    """The error for a decision about a record that has changed since the operator saw it."""
    return IdempotencyError(
        f"somebody was first: {now.key[:SHOWN]} is {now.state.replace('_', ' ')} now, in attempt"
        f" {now.attempt}. Nothing was done: look at it again"
    )


def _with_response(state: AppState, verdict: Verdict, response: Response) -> Verdict:
    """The verdict with a response, sealed for the record as it is now."""
    record = state.records.look(verdict.key)
    if record is None:
        raise UnknownRecord(f"{verdict.key.hex()[:SHOWN]} has just been deleted")
    check_sealer(state, record)
    claim = Claim(verdict.key, record.name, record.fingerprint, verdict.owner, verdict.ttl_seconds)
    sealed = state.sealer.seal(capture(response, state.settings), claim)
    return replace(verdict, response=sealed)


def check_sealer(state: AppState, record: Record) -> None:
    """Raise ``SealBroken`` if the record's application encrypts, and this process has no keys."""
    if record.fingerprint.is_keyed and isinstance(state.sealer, Plain):
        raise SealBroken(
            "the application encrypts what it stores, but IDEMPOTENCY_ENCRYPTION_KEYS is empty here: it"
            " would reject each retry. Give this process the application's keys"
        )


def _is_done(state: AppState, verdict: Verdict) -> bool:
    with suppress(RecordBroken):
        record = state.records.look(verdict.key)
        return record is not None and record.owner == verdict.owner
    return False


def _refusal(line: Line) -> IdempotencyError:
    key = line.key[:SHOWN]
    if line.state == "released":
        return IdempotencyError(f"{key} has been released: its next retry runs the view again")
    return IdempotencyError(
        f"{key} is {line.state.replace('_', ' ')}: only what is interrupted or failed can be released"
        " or resolved"
    )


def failure(state: AppState) -> Response:
    """The response of an operation that shall not run again."""
    problem = OperationFailed("The operation was interrupted, and will not be run again.")
    return lasting_response(state.app, problem, state.settings)


def noted(did: str, why: str, by: str | None) -> AuditEntry:
    """Return what is noted in a record: ``by`` whom (or the user who has logged in), and ``why``."""
    return AuditEntry(one_line(by or "") or one_line(_user()), did, _plain(why))


def _plain(text: str) -> str:
    """Text that every store takes: no NUL, no lone surrogate."""
    return text.replace("\0", "").encode(errors="replace").decode()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"


LONGEST_WHY = 500
"""Characters of a reason: `show` has it in one line of a table."""

SAY_WHY = f"Say why, in at most {LONGEST_WHY} characters: the next operator reads it."


_attempt_option = click.option("--attempt", type=int, metavar="N", help="The attempt that you"
                               " have looked into; does nothing after another one.")  # fmt: skip


def _check_by(_context: click.Context, _option: click.Parameter, by: str | None) -> str | None:
    if len(one_line(by or "")) > LONGEST_NAME:
        raise click.BadParameter(f"A name has at most {LONGEST_NAME} characters.")
    return by


by_option = click.option("--by", metavar="WHO", callback=_check_by, help="Who decides; by default the"
                         " user logged in.")  # fmt: skip


def _check_why(_context: click.Context, _option: click.Parameter, why: str | None) -> str:
    if why is not None and not is_legible(why, LONGEST_WHY):
        raise click.BadParameter(SAY_WHY)
    return why or ""


@cli.command()
@click.argument("digits")
@click.option("--fail", is_flag=True, help="Store a failure as its response; it never runs again.")
@_attempt_option
@click.option("--why", metavar="TEXT", callback=_check_why, help="The reason, which `show` shows.")
@by_option
@as_json_option
def release(
    digits: str, fail: bool, attempt: int | None, why: str, by: str | None, as_json: bool
) -> None:
    """Let an operation that was interrupted, or has failed, be run again.

    DIGITS are the 8 digits that `list` shows; `list --key` finds those of a client's key. First find
    out what became of the operation, for example from the other service: the next retry runs the view
    again, without its finished steps. If it must not run again, use --fail: then every retry gets a
    500 of the type operation-failed. To give it the response that it should have had, use `resolve`.
    Does not touch an operation that has completed or whose lease still runs. Atomic operations need
    nothing, as their next retry takes over, unless they have used up max_attempts.
    """
    state = current_state()
    store, digits = admin(state), checked(digits)
    seen = undecided(store, digits, attempt)
    response = failure(state) if fail else None
    settle(state, store, seen, noted("failed" if fail else "released", why, by), response)
    _write_settled(store, seen, "failed for good" if fail else "may be run again", as_json)


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
@click.option("--why", metavar="TEXT", required=True, callback=_check_why,
              help="The reason, which `show` shows.")  # fmt: skip
@by_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json_option
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
    as_json: bool,
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
    if not yes and (as_json or body_file == "-"):
        raise click.UsageError("with --json, and with a body from standard input, --yes is needed")
    state = current_state()
    store, digits = admin(state), checked(digits)
    data = _content(body, body_file)
    response = given_response(state, status, data, headers, content_type)
    seen = undecided(store, digits, attempt)
    if not yes:
        Shown.of(state, store, seen).write()
        click.echo()
        _write_response(response)
        gets = f"an empty {status}" if is_empty(response) else "this response"
        click.confirm(f"Every retry will get {gets}. Store it?", abort=True)
    settle(state, store, seen, noted("resolved", why, by), response)
    _write_settled(store, seen, f"every retry gets this {status}", as_json)


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


def given_response(
    state: AppState,
    status: int,
    body: bytes,
    headers: tuple[str, ...] = (),
    content_type: str | None = None,
) -> Response:
    """The response that an operator gives; ``headers`` are lines, ``Name: value``.

    Raises ``IdempotencyError`` for one that could not be stored whole, or is not what it says.
    """
    given = (*headers, f"Content-Type: {content_type}") if content_type else headers
    lines = Headers()
    for line in given:
        name, colon, value = line.partition(":")
        pair = name.strip(), value.strip()
        if not colon or not storable([pair], state.settings.unstored_headers):
            raise IdempotencyError(f"the header {name!r} is malformed, or one that is never stored")
        lines.add(*pair)
    if len(lines.getlist("Content-Type")) > 1:
        raise IdempotencyError("a response has one Content-Type")
    if body and status in _WITHOUT_BODY:
        raise IdempotencyError(f"a response with the status {status} has no body")
    if len(body) > state.settings.max_response_bytes:
        raise IdempotencyError("the body is larger than IDEMPOTENCY_MAX_RESPONSE_BYTES")
    if body and "Content-Type" not in lines:
        _check_json(body)
        lines.add("Content-Type", "application/json")
    response: Response = state.app.response_class(body, status)
    response.headers = lines
    return response


def is_empty(response: Response) -> bool:
    """Return True if a response lacks a body that one of its status usually has."""
    return not response.get_data() and response.status_code not in _WITHOUT_BODY


_WITHOUT_BODY = (204, 205, 304)


def _check_json(body: bytes) -> None:
    if body.startswith(BOM_UTF8):  # a request may have one; RFC 8259 lets no sender add it
        raise IdempotencyError("the body begins with a byte order mark, which JSON has not: remove it")
    try:
        parse_json(body)
    except BodyMalformed as error:
        text = f"the body is not JSON: correct it, or give --content-type ({error.detail})"
        raise IdempotencyError(text) from error


def _write_response(response: Response) -> None:
    write(f"HTTP {response.status}")
    for name, value in response.headers:
        write(f"{name}: {value}")
    if body := response.get_data():
        click.echo()
        write(body.decode(errors="replace"))
    click.echo()


def _write_settled(store: Admin, seen: Line, done: str, as_json: bool) -> None:
    if as_json:
        write_rows([row(find(store, seen.key))], as_json)
    else:
        click.echo(f"{seen.key[:SHOWN]}: {done}")
