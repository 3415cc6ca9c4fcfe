"""The command that erases what is stored about a user, and what the operators' page needs for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import click

from flask_idempotency.stores.admin import Admin, Belongings
from flask_idempotency.stores.redis.lock import RedisLock
from flask_idempotency.web.setup.state import AppState

from .group import admin, as_json_option, cli, current_state, progress, require, write, write_rows
from .keys import nothing_found, possible_hashes, scope_tails

BATCH = 1000
"""How many records are erased in one transaction: a few milliseconds, for which nothing waits."""

_WHY = {
    "in_progress": "in progress: run this again once it has ended",
    "interrupted": "interrupted: release or resolve it, then run this again",
}


@dataclass(frozen=True, slots=True)
class Whose:
    """What is to be erased: all of a scope, or of one operation of it; or the one record of a key."""

    scope: str | None
    operation: str | None = None
    key: str | None = None
    namespace: str | None = None


def belongings(state: AppState, store: Admin, whose: Whose) -> Belongings:
    """What there is to be erased, and what is in progress; changes nothing.

    Raises ``IdempotencyError`` if a store of the application's own cannot erase.
    """
    require(store, "belonging")
    require(store, "erase")
    if whose.key is None:
        found = [store.belonging(tail, whose.operation) for tail in scope_tails(whose.scope or "")]
    else:
        operation, place = whose.operation or "", whose.namespace
        hashes = possible_hashes(state, whose.key, operation, whose.scope, place)
        found = [_of_key(store, each) for each in hashes]
    left = sum((Counter(each.left) for each in found), Counter[str]())
    return Belongings([key for each in found for key in each.keys], dict(left))


def _of_key(store: Admin, key: bytes) -> Belongings:
    states = [line.state for line in store.starting(key)]
    if "interrupted" in states:
        return Belongings([], {"interrupted": 1})
    return Belongings([key] if states else [], {})  # erase() leaves one that runs


def erase(state: AppState, store: Admin, keys: list[bytes], seen: str | None = None) -> Iterator[int]:
    """Erase records with their steps, and their markers in Redis, a batch at a time.

    Yields how many of each batch were erased: what is in progress by then is left, and so is the record
    of a single key if ``seen`` is no longer its version.
    """
    for start in range(0, len(keys), BATCH):
        batch = keys[start : start + BATCH]
        erased = store.erase(batch, seen)
        if isinstance(state.lock, RedisLock):
            state.lock.forget(batch)
        yield erased


@cli.command()
@click.option("--scope", metavar="SCOPE", help="Whose records: the id of a tenant or user.")
@click.option("--operation", metavar="NAME", help="Only this operation, such as an endpoint.")
@click.option("--key", metavar="KEY", help="Only the record of this key, as the client sent it; needs"
              " --operation, and --scope unless there is one tenant.")  # fmt: skip
@click.option("--namespace", metavar="NAMESPACE", help="The namespace of --key, if it is not that of"
              " the route or the application.")  # fmt: skip
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json_option
@click.pass_context
def forget(
    context: click.Context,
    scope: str | None,
    operation: str | None,
    key: str | None,
    namespace: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Erase what is stored about a user: responses, steps, stored requests, and the records themselves.

    Counts first, and asks. Never erases what is in progress, and says how many were left and why. Uses
    small transactions, so it may run at any time. Afterwards a retry of what was erased runs the view
    again, like a first request. Reads the whole table, unless there is a --key. The exit code is 1 if
    there is nothing to erase and nothing was left: the options may be mistyped.
    """
    if (scope if key is None else operation) is None:
        raise click.UsageError("give --scope; or --key and --operation, with their --scope")
    if as_json and not yes:
        raise click.UsageError("with --json, --yes is needed")
    state = current_state()
    store = admin(state)
    found = belongings(state, store, Whose(scope, operation, key, namespace))
    if found.keys and not yes:
        write(f"{_records(len(found.keys))} to erase. Retries of these requests will run again.")
        _write_left(found.left)
        click.confirm("Erase?", abort=True)
    erased, show = 0, progress(as_json)
    for count in erase(state, store, found.keys):
        erased += count
        show(f"{erased:,} of {len(found.keys):,} erased")
    show("")
    left, was_found = Counter(found.left), bool(found.keys or found.left)
    left["in_progress"] += len(found.keys) - erased
    if as_json:
        write_rows([{"erased": erased, **{state: left[state] for state in _WHY}}], as_json)
    elif was_found:
        write(f"{_records(erased)} erased")
        _write_left(left)
    else:
        write(nothing_found(state, key, operation, scope))
    context.exit(0 if was_found else 1)


def _write_left(left: Mapping[str, int]) -> None:
    for state, why in _WHY.items():
        if left.get(state):
            write(f"{_records(left[state])} left, {why}")


def _records(count: int) -> str:
    return "1 record" if count == 1 else f"{count:,} records"
