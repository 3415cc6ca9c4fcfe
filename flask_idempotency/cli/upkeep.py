"""Commands that run regularly: the check before each release, the purge and the resume."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from typing import Any, cast

import click

from flask_idempotency.core.errors import (
    IdempotencyError,
    Problem,
    SealBroken,
    StoreUnavailable,
)
from flask_idempotency.core.ports import Lease
from flask_idempotency.session.databases import most_connections
from flask_idempotency.session.operation import Operation
from flask_idempotency.session.transaction_scope import Joined
from flask_idempotency.stores.admin import TRIAL, Admin, Finding, reason, trial_claim
from flask_idempotency.stores.counts import Counts
from flask_idempotency.stores.redis.lock import RedisLock
from flask_idempotency.stores.table import defined_counts
from flask_idempotency.web.background.threads import aside, reply
from flask_idempotency.web.setup.state import AppState
from flask_idempotency.web.signals import Event, store_failed

from .decisions import check_sealer
from .group import (
    MANY,
    Seconds,
    admin,
    as_json_option,
    cli,
    current_state,
    duration,
    explain,
    progress,
    read_age,
    records,
    require,
    write,
    write_rows,
)
from .resume import resume
from .routes import examine_routes, write_routes


@cli.command()
@click.option(
    "--batch",
    type=click.IntRange(1, 100_000),
    default=1000,
    show_default=True,
    metavar="N",
    help="The most records to delete in one transaction.",
)
@click.option("--rate", type=MANY, metavar="N", help="The most records to delete a second, on average.")
@click.option("--every", type=Seconds(1), metavar="SECONDS",
              help="Go on, with this pause after each purge, until SIGINT or SIGTERM.")  # fmt: skip
@click.option("--older-than", callback=read_age, metavar="AGE", help="Delete also what ended so long"
              " ago and has not expired: 12h, 7d, or seconds.")  # fmt: skip
@click.option("--yes", is_flag=True, help="Do not ask about --older-than.")
@as_json_option
def purge(
    batch: int,
    rate: int | None,
    every: float | None,
    older_than: int | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete the records that have expired.

    Uses small transactions that nothing waits for, so it may run at any time, and several at once.
    Keeps a record whose request is still running, even an expired one. Run it from cron, or leave it
    running with --every: then it survives a database that is away for a while. SIGINT and SIGTERM end
    it between two transactions. With --older-than it also deletes records that completed or failed so
    long ago, whatever their ttl, after counting them and asking: a retry of theirs runs the view again.
    """
    store = admin(current_state())
    if older_than is not None and not yes:
        if as_json:
            raise click.UsageError("with --json, --older-than needs --yes")
        _ask(store, older_than)
    what = "expired" if older_than is None else "expired or old"
    with until_signal() as stop:
        while not stop.is_set():
            deleted = 0
            try:
                for deleted in _purge(store, batch, older_than, rate, stop, progress(as_json)):  # noqa: B007
                    pass
            except StoreUnavailable as error:
                if every is None:
                    raise
                write(f"Error: {explain(error)}", err=True)
            if as_json:
                write_rows([{"deleted": deleted}], as_json)
            elif deleted or every is None:
                click.echo(f"{deleted} {what} {'record' if deleted == 1 else 'records'} deleted")
            if every is None:
                return
            stop.wait(every)


def _ask(store: Admin, seconds: int) -> None:
    require(store, "count_older")
    if old := store.count_older(seconds):
        what = f"{records(old)} that ended more than {duration(seconds)} ago"
        write(f"To delete, besides what has expired: {what}. Retries of these requests will run again.")
        click.confirm("Delete?", abort=True)


def _purge(
    store: Admin,
    batch: int,
    older_than: int | None,
    rate: int | None,
    stop: threading.Event,
    show: Callable[[str], None],
) -> Iterator[int]:
    """Purge once, until ``stop``; yields how many records are gone after each transaction."""
    deleted, began = 0, time.monotonic()
    age = () if older_than is None else (older_than,)  # a store of one's own need not know it
    try:
        for count in store.purge(batch, *age):
            deleted += count
            show(f"{deleted:,} deleted")
            yield deleted
            due = began + deleted / rate if rate else 0.0
            if stop.wait(max(due - time.monotonic(), 0.0)):
                return
    finally:
        show("")


@cli.command("resume")
@click.option("--limit", type=MANY, default=100, show_default=True, metavar="N",
              help="The most operations to run each time.")  # fmt: skip
@click.option("--max-attempts", type=MANY, default=10, show_default=True, metavar="N",
              help="Skip an operation that was begun this often.")  # fmt: skip
@click.option("--backoff", type=Seconds(0.1), default=10.0, show_default=True,
              metavar="SECONDS", help="How long to leave one alone after its first attempt; doubled"
              " after each.")  # fmt: skip
@click.option("--every", type=Seconds(1), metavar="SECONDS",
              help="Go on, with this pause, until SIGINT or SIGTERM.")  # fmt: skip
@as_json_option
def resume_operations(
    limit: int, max_attempts: int, backoff: float, every: float | None, as_json: bool
) -> None:
    """Finish operations that were abandoned, as their client would.

    Routes with resumable=True store each request until its operation ends. This command re-sends,
    through the application itself, the stored requests whose operation has no active worker: it died,
    its response was an error that is not stored, or its lease ran out (an operation that is held also
    gets its 409 here). May run in several places at once. Shows each operation with the status of its
    response, and how many others wait. SIGINT and SIGTERM end it after the present operation, a second
    signal at once.
    """
    state = current_state()
    store = admin(state)
    how = {"limit": limit, "max_attempts": max_attempts, "backoff_seconds": backoff}
    with until_signal() as stop:
        while not stop.is_set():
            try:
                done = _resume_once(state, store, how, stop, as_json)
                if done or every is None:
                    _write_waiting(store, max_attempts, as_json, is_none=not done)
            except StoreUnavailable as error:
                if every is None:
                    raise
                write(f"Error: {explain(error)}", err=True)
            if every is None:
                return
            stop.wait(every)


def _resume_once(
    state: AppState, store: Admin, how: dict[str, Any], stop: threading.Event, as_json: bool
) -> bool:
    """Resume what is due, until ``stop``; return whether there was anything."""
    done: list[dict[str, Any]] = []
    try:
        for resumed in resume(state, store, **how):
            done.append(asdict(resumed))
            if stop.is_set():
                break
    finally:  # also what was done before an error, or a second signal
        if done:
            write_rows(done, as_json)
    return bool(done)


def _write_waiting(store: Admin, max_attempts: int, as_json: bool, *, is_none: bool) -> None:
    """Say if nothing was due, and what still waits. JSON has rows only."""
    if is_none:
        write_rows([], as_json, "nothing to resume")
    if as_json:
        return
    waiting = store.waiting(max_attempts)
    for count, one, many in (
        (waiting.later, "runs or is not due yet", "run or are not due yet"),
        (
            waiting.given_up,
            f"has reached --max-attempts {max_attempts} and is left to you",
            f"have reached --max-attempts {max_attempts} and are left to you",
        ),
        (waiting.expired, "has expired unfinished", "have expired unfinished"),
    ):
        if count:
            write(f"1 operation {one}" if count == 1 else f"{count} operations {many}")


@cli.command()
@as_json_option
@click.pass_context
def check(context: click.Context, as_json: bool) -> None:
    """Check that everything the guarantees depend on is in place.

    Prints one line for each check: ok, advice (works, but could be better) or FAILED, with what to do.
    Claims one record and writes one step, as a request would, and deletes them. Tries what threads will
    do for this application: the heartbeat, the background purge, the console's counts and observing.
    Then checks the routes for what the first request would refuse, such as @idempotent above the route;
    for arguments of protect() and exempt() that are not registered; for views of other packages that
    protect() covers; and, with requests that go to no view, for what reads a form too early, and for a
    scope of protect() that raises an error where nobody is signed in. The exit code is 1 if a check
    failed: run it before each release.
    """
    found, state = [], current_state()
    for finding in chain(_examine(state), examine_routes(state)):
        found.append(finding)
        if not as_json:
            write(f"{finding.level:<8}{finding.subject:<14}{finding.text}")
            if finding.remedy:
                write(f"{'':<22}-> {finding.remedy}")
    if as_json:
        write_rows([asdict(finding) for finding in found], as_json)
    context.exit(1 if any(finding.level == "FAILED" for finding in found) else 0)


PATIENCE_SECONDS = 10.0
"""How long a thread of ours may take for one try."""

FOR_LISTENERS = (
    "commands and our threads have the application's context, but no request and an empty flask.g: let"
    " listeners on the engine do without, as with g.get(...). Of the engine's, our threads' own"
    " connections are told to those for connect alone: set there what the tables need, such as a role"
)
"""What to do where a listener of the application keeps us from the tables."""

_NEEDED_LESS = ("index", "memory", "steps")
"""What a claim works without."""


def _examine(state: AppState) -> Iterator[Finding]:
    ready = True
    store, well = admin(state), set[str]()
    try:
        for finding in store.examine():
            ready = ready and (finding.level != "FAILED" or finding.subject in _NEEDED_LESS)
            if finding.level == "ok":
                well.add(finding.subject)
            yield finding
    except IdempotencyError:
        raise
    except Exception as error:  # a listener's
        ready, bad = False, f"a listener on the engine raised {type(error).__name__}: {reason(error)}"
        yield Finding("FAILED", "listener", bad, FOR_LISTENERS)
    yield from _examine_waiters(state)
    if ready:
        yield from _examine_keys(state, store)
        yield from _examine_claim(state, store)
        yield from _examine_threads(state, store, well)
    if state.settings.store == "redis":
        return  # the records are there: no lock stands before them
    if not isinstance(state.lock, RedisLock):
        yield Finding("ok", "Redis", "not used")
        return
    errors: list[BaseException | None] = []

    def note(_sender: object, event: Event) -> None:
        errors.append(event.error)

    with store_failed.connected_to(note, state.app):
        for finding in state.lock.examine():
            yield replace(finding, text=f"{finding.text}: {errors[0]}") if errors else finding


def _examine_waiters(state: AppState) -> Iterator[Finding]:
    """Advise if those that wait for others may take too many of the pool's connections."""
    chosen, most = state.settings.max_waiters, most_connections(state.database)
    if chosen is not None and most is not None and chosen > most // 2:
        text = f"IDEMPOTENCY_MAX_WAITERS is {chosen}, and the engine's pool opens {most} connections"
        remedy = "make it at most half of them: all other requests need the rest"
        yield Finding("advice", "waiters", text, remedy)


def _examine_keys(state: AppState, store: Admin) -> Iterator[Finding]:
    """Advise if other processes encrypt, and this one does not."""
    try:
        key = store.latest() if hasattr(store, "latest") else None  # a store of one's own may lack it
        if key is not None and (record := state.records.look(key)) is not None:
            check_sealer(state, record)
    except SealBroken as error:
        remedy = "set IDEMPOTENCY_ENCRYPTION_KEYS as the other processes have it"
        yield Finding("advice", "encryption", error.detail, remedy)
    except IdempotencyError:  # told elsewhere
        return


def _examine_claim(state: AppState, store: Admin) -> Iterator[Finding]:
    """Claim, and join a session of the application to the claim's transaction, as a view's is."""
    subject = "claim"
    try:
        with store.trial() as hold:
            if hold is None:
                yield Finding("ok", subject, "a record was claimed")
                return
            yield Finding("ok", subject, "a record was claimed and its row locked")
            subject = "db.session"
            yield _examine_session(state, hold)
            subject = "deletion"
    except IdempotencyError as error:
        remedy = store.remedy if isinstance(error, Problem) else ""
        yield Finding("FAILED", subject, explain(error), remedy)


def _examine_session(state: AppState, hold: Any) -> Finding:
    """Join a session to a claim's transaction. Raises ``IdempotencyError`` if it does not join."""
    subject = "db.session"
    try:
        Joined(state, Operation(TRIAL, "", None, "", hold.attempt), hold).end()
    except Exception as error:  # also of a get_bind() that asks the request for its tenant
        if isinstance(error, IdempotencyError) and state.settings.binds is None:
            raise
        text = f"does not join outside of a request: {type(error).__name__}: {reason(error)}"
        return Finding("advice", subject, text, "the first request tries again, and is refused if not")
    return Finding("ok", subject, "joins the operation's transaction")


def _examine_threads(state: AppState, store: Admin, well: set[str]) -> Iterator[Finding]:
    """Try once what threads of ours will do here, in a thread and on a connection such as they use."""
    for what, work in _threads(state, store, well):
        try:
            reply(aside(state.app, work), PATIENCE_SECONDS)
        except Exception as error:  # a listener may raise anything
            yield Finding("FAILED", "threads", f"{what} would fail: {reason(error)}", FOR_LISTENERS)
        else:
            yield Finding("ok", "threads", f"{what} works")


def _threads(
    state: AppState, store: Admin, well: set[str]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """The threads that this application has; not those whose tables are known not to be ``well``."""
    if state.settings.store not in ("hybrid", "postgres", "sql"):  # elsewhere nobody listens
        return
    routes = [each.route for each in write_routes(state) if each.route is not None]
    if any(route.heartbeat for route in routes):
        yield "the heartbeat", partial(_renew, state, store)
    if state.purge is not None:
        yield "the background purge", state.purge.attempt
    if not all(route.resolved(state.settings, state.scope).enforce for route in routes):
        yield "observing", partial(state.own_records.look, trial_claim().key)
    if "counts" in well and (counts := defined_counts(state.table)) is not None:
        yield "the console's counts", Counts(state.own_engine, counts).attempt


def _renew(state: AppState, store: Admin) -> None:
    claim = replace(trial_claim(), lease_seconds=PATIENCE_SECONDS)
    lease = cast("Lease", state.own_records.claim(claim))
    try:
        lease.extend(PATIENCE_SECONDS)
    finally:
        lease.release()
        store.erase([claim.key])


@contextmanager
def until_signal() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; a second signal ends the process as usual."""
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
