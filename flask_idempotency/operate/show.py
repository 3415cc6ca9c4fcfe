"""One record as an operator sees it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from flask_idempotency.core.errors import RecordBroken
from flask_idempotency.core.keys import SHOWN, derive_key
from flask_idempotency.stores.admin import Admin, AuditEntry, Line, StepLine
from flask_idempotency.web.routes import AppState
from flask_idempotency.web.steps import purpose

from .advice import Advice, advise
from .find import admin


@dataclass(frozen=True, slots=True)
class Found:
    """A record, its finished steps, and what operators did to it."""

    line: Line
    steps: list[StepLine]
    audit: list[AuditEntry]

    @classmethod
    def of(cls, store: Admin, line: Line) -> Found:
        """Return what belongs to a record."""
        start = bytes.fromhex(line.key)
        return cls(line, store.steps(start), store.audit(start))

    @property
    def advice(self) -> Advice | None:
        """What an operator should know before deciding."""
        return advise(self.line, self.steps)


def shown_steps(
    state: AppState, key: bytes | None, steps: list[StepLine]
) -> tuple[list[dict[str, Any]], str]:
    """Return the finished steps with derived keys and results, and why a result cannot be read.

    Without the ``key``, the whole hash of the record's key, they have neither.
    """
    why, rows = "", list[dict[str, Any]]()
    for step in steps:
        derived, result = None if key is None else derive_key(key, step.name), None
        if key is not None and step.result is not None:
            try:
                opened = state.sealer.open_bytes(step.result, key, purpose(step.name))
                result = opened.decode(errors="backslashreplace")
            except RecordBroken as error:
                why = error.detail
        row = asdict(step)
        del row["result"]  # it stands at the end
        rows.append({**row, "derived_key": derived, "result": result})
    return rows, why


def derived(key: bytes | None, names: Iterable[str]) -> list[dict[str, Any]]:
    """Return what a view of this operation gets from ``derive_key`` with these names."""
    return [{"name": name, "derived_key": derive_key(key, name)} for name in names if key is not None]


def key_of(state: AppState, found: Found) -> bytes | None:
    """Return a record's whole key; None if it is gone."""
    return admin(state).key(bytes.fromhex(found.line.key))


def row(line: Line) -> dict[str, Any]:
    """Return a record as it is shown: with the first digits only."""
    shown = {**asdict(line), "key": line.key[:SHOWN]}
    del shown["version"]
    return shown
