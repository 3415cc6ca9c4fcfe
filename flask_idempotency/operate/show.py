"""One record as an operator sees it: what happened, and which decisions are open."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from flask_idempotency.core.errors import RecordBroken
from flask_idempotency.core.keys import SHOWN, derive_key
from flask_idempotency.core.records import Record
from flask_idempotency.stores.admin import AuditEntry, Line, read_time
from flask_idempotency.web.routes import AppState
from flask_idempotency.web.steps import purpose

from .decide import acts, check_sealer, too_old
from .find import admin

_OWN_ROWS = "Look at your own rows first: what the view saved outside a step, it saves again."


@dataclass(frozen=True, slots=True)
class Found:
    """A record with what belongs to it: finished steps, what operators did, and derived keys.

    ``record`` has its response decrypted; ``unreadable`` says why it cannot be read. ``steps`` have
    their derived keys and results, and ``broken`` says why one of these cannot be read. ``too_old``
    says why a release could do it twice.
    """

    line: Line
    record: Record | None
    unreadable: str
    steps: list[dict[str, Any]]
    derived: list[dict[str, Any]]
    audit: list[AuditEntry]
    broken: str
    acts: list[str]
    too_old: str
    advice: tuple[str, ...]


def look_into(state: AppState, line: Line, names: Iterable[str] = ()) -> Found:
    """Read what belongs to a record, and what ``derive_key`` gives its view for these names."""
    store, key = admin(state), line.hash
    broken, steps, (finished, audit) = "", list[dict[str, Any]](), store.notes(key)
    for name, step in sorted(finished.items(), key=lambda each: each[1].at):
        result = None
        try:
            if step.result is not None:
                opened = state.sealer.open_bytes(step.result, key, purpose(name))
                result = opened.decode(errors="backslashreplace")
        except RecordBroken as error:
            broken = error.detail
        row = {"name": name, "attempt": step.attempt, "bytes": len(step.result or b"")}
        row |= {"finished": read_time(step.at), "derived_key": derive_key(key, name)}
        steps.append(row | {"result": result})
    derived = [{"name": name, "derived_key": derive_key(key, name)} for name in names]
    unreadable, may = "", acts(line)
    try:
        record = state.engine.look(key)
        if record is not None:
            check_sealer(state, record)
    except RecordBroken as error:
        record, unreadable = None, error.detail
    why_not = too_old(state, line, record) if record else unreadable.rstrip(".")
    lost = [name for name, step in finished.items() if step.result is None]
    advice = _advice(steps, why_not, lost) if "release" in may else ()
    return Found(line, record, unreadable, steps, derived, audit, broken, may, why_not, advice)


def row(line: Line) -> dict[str, Any]:
    """Return a record as it is shown: with the first digits only."""
    shown = {"key": line.key[:SHOWN], **asdict(line)}
    del shown["hash"], shown["version"]
    return shown


def _advice(steps: list[dict[str, Any]], why_not: str, lost: list[str]) -> tuple[str, ...]:
    """Return how far an interrupted or failed operation came, and which decision fits, in sentences.

    Resolving stores a response and nothing else: what the view had not yet done, above all rows of the
    application's own, is never done. Releasing repeats no finished step, but all else: whatever was cut
    off, and rows that the view has already saved outside a step. An old one (``why_not``) is released
    only if the other service has done no more than the steps: it recognises no key any more. Where the
    result of a step is ``lost``, as it could not be stored, every run stops there.
    """
    if not steps:
        came = (
            "No step has finished: whatever the view does may or may not have happened. (If the view is"
            " atomic, none of it has.)"
        )
        release = (
            "Release it if the other service knows nothing of it, or recognises its key and repeats its"
            " first response: the next retry runs the whole view."
        )
        resolve = (
            "Resolve it if the other service has done it and would do it again. First do by hand what"
            " the view does besides, such as saving rows of its own: the view never runs again."
        )
    else:
        came = (
            f"Finished: {', '.join(step['name'] for step in steps)}. What comes next in the view may or"
            " may not have happened."
        )
        release = (
            "Release it if the other service has done no more than that, or recognises the key of what"
            " came next: the next retry repeats no finished step, and does the rest."
        )
        resolve = (
            "Resolve it only if nothing is left to do, or you have done it by hand: the view never runs"
            f" again, so it will not do what comes after {steps[-1]['name']}, such as saving rows of"
            " its own."
        )
    if lost:
        release = (
            f"The result of {', '.join(lost)} could not be stored: do not release it, as the view would"
            " stop there again. Do by hand what comes after it."
        )
        return came, release, resolve
    if why_not:
        release = f"{why_not}."
    return came, f"{release} {_OWN_ROWS}", resolve
