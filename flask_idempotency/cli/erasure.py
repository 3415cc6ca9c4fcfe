"""The command that erases what is stored about a user, and what the operators' page needs for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import click

from flask_idempotency.stores.admin import Admin, Erasure, Line
from flask_idempotency.stores.redis.lock import RedisLock
from flask_idempotency.web.setup.state import AppState

from .decisions import by_option, noted
from .group import (
    admin,
    as_json_option,
    cli,
    current_state,
    progress,
    records,
    require,
    write,
    write_rows,
)
from .keys import find_by_key, nothing_found, operation_name, scope_tails
from .records import row

BATCH = 1000
"""How many records are erased in one transaction: a few milliseconds, for which nothing waits."""

Batch = tuple[list[bytes], str | None]
"""The keys of records to erase together; or one key, and the version in which its record was shown."""

SEVERAL = "several operations"
"""The name in place of an operation's, where records of more than one were erased."""

_WHY = {
    "in_progress": "in progress, or changed since it was counted: run this again later",
    "interrupted": "interrupted: release or resolve it, then run this again",
}


def of_scope(
    store: Admin, scope: str, operation: str | None
) -> tuple[list[Batch], Counter[str], str | None]:
    """Find what there is to erase of a scope, or of one operation of it; and how much is left.

    At last the operation, if all that is erased is of one.
    """
    found = [store.belonging(tail, operation) for tail in scope_tails(scope)]
    keys = [key for each in found for key in each.keys]
    batches: list[Batch] = [(keys[start : start + BATCH], None) for start in range(0, len(keys), BATCH)]
    names = {name for each in found for name in each.names}
    one = next(iter(names)) if len(names) == 1 else operation
    return batches, sum((Counter(each.left) for each in found), Counter[str]()), one


def _of_key(lines: Mapping[bytes, Line]) -> tuple[list[Batch], Counter[str]]:
    """The same of the records of a key."""
    decided = {key: line for key, line in lines.items() if line.state != "interrupted"}
    batches: list[Batch] = [([key], line.version) for key, line in decided.items()]
    return batches, Counter(interrupted=len(lines) - len(decided))


def erase(
    state: AppState, store: Admin, batch: Batch, operation: str | None, by: str | None = None
) -> int:
    """Erase records with their steps, and their markers in Redis. See :meth:`Admin.erase`.

    One row stays that says who did it, in place of the records of one ``operation``, or of several.
    """
    for verb in "erase", "note":  # a store that notes nothing loses the trail
        require(store, verb)
    keys, seen = batch
    erased = store.erase(keys, seen, Erasure(operation or SEVERAL, noted("erased", "", by)))
    if isinstance(state.lock, RedisLock):
        state.lock.forget(keys)
    return erased


@cli.command()
@click.option("--scope", metavar="SCOPE", help="Whose records: the id of a tenant or user.")
@click.option("--operation", metavar="NAME", help="Only this operation, such as an endpoint.")
@click.option("--key", metavar="KEY", help="Only the record of this key, as the client sent it; needs"
              " --operation, and --scope unless there is one tenant.")  # fmt: skip
@click.option("--namespace", metavar="NAMESPACE", help="The namespace of --key, if it is not that of"
              " the route or the application.")  # fmt: skip
@by_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json_option
@click.pass_context
def forget(
    context: click.Context,
    scope: str | None,
    operation: str | None,
    key: str | None,
    namespace: str | None,
    by: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Erase what is stored about a user: responses, steps, stored requests, and the records themselves.

    Counts first, and asks; shows the record of a --key, and erases it only as it was shown. Never
    erases what is in progress, and says how many were left and why. Uses small transactions, so it may
    run at any time. Afterwards a retry of what was erased runs the view again, like a first request.
    One row stays for each thousand records: who erased how many, and when, but nothing of them. Reads
    the whole table, unless there is a --key. The exit code is 1 if there is nothing to erase and
    nothing was left: the options may be mistyped.
    """
    if (scope if key is None else operation) is None:
        raise click.UsageError("give --scope; or --key and --operation, with their --scope")
    if as_json and not yes:
        raise click.UsageError("with --json, --yes is needed")
    state = current_state()
    store, operation = admin(state), operation_name(operation)
    require(store, "belonging")
    lines: dict[bytes, Line] = {}
    of = operation
    if key is None:
        batches, left, of = of_scope(store, scope or "", operation)
    else:
        lines = find_by_key(state, store, key, operation or "", scope, namespace)
        batches, left = _of_key(lines)
    count = sum(len(keys) for keys, _ in batches)
    was_found = bool(count or left.total())
    if count and not yes:
        if lines:
            write_rows([row(line) for line in lines.values()], as_json)
        write(f"{records(count)} to erase. Retries of these requests will run again.")
        _write_left(left)
        click.confirm("Erase?", abort=True)
    erased, show = 0, progress(as_json)
    for batch in batches:
        erased += erase(state, store, batch, of, by)
        show(f"{erased:,} of {count:,} erased")
    show("")
    left["in_progress"] += count - erased
    if as_json:
        write_rows([{"erased": erased, **{state: left[state] for state in _WHY}}], as_json)
    elif was_found:
        write(f"{records(erased)} erased")
        _write_left(left)
    else:
        write(nothing_found(state, key, operation, scope))
    context.exit(0 if was_found else 1)


def _write_left(left: Counter[str]) -> None:
    for state, why in _WHY.items():
        if left[state]:
            write(f"{records(left[state])} left, {why}")
