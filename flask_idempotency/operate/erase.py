"""Erasing what is stored about a user."""

from __future__ import annotations

from flask_idempotency.core.keys import SHOWN
from flask_idempotency.stores.admin import Line
from flask_idempotency.web.routes import AppState

from .decide import Operator
from .find import admin

BATCH = 1000
"""How many records a line of the log is about at most: if the process is killed, it lacks the last."""

MOST = 100_000
"""How many records are found at once: as many as fit into 100 MB."""


def erase(state: AppState, lines: list[Line], operator: Operator, operation: str | None = None) -> int:
    """Erase records as they were seen, and their markers in Redis; return how many.

    A line of the log says who did it: see :meth:`Operator.tell`. It names the only record of a batch.
    """
    store, total = admin(state), 0
    for start in range(0, len(lines), BATCH):
        batch, erased = lines[start : start + BATCH], 0
        try:
            for line in batch:
                erased += store.erase(line)
        finally:
            if erased:
                of = batch[0].key[:SHOWN] if len(batch) == 1 else None
                operator.tell(operator.note("erased"), operation=operation, id=of, records=erased)
            state.lock.forget([line.hash for line in batch])
        total += erased
    return total
