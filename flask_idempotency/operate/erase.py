"""Erasing what is stored about a user."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from flask_idempotency.core.keys import SHOWN
from flask_idempotency.stores.admin import Line
from flask_idempotency.web.routes import AppState

from .decide import Operator
from .find import Sought, admin, scope_tails

BATCH = 1000
"""How many records are erased in one transaction: a few milliseconds, for which nothing waits."""


@dataclass(frozen=True, slots=True)
class Erasable:
    """What there is to erase, in ``batches``: keys, and for one key the version that was seen.

    ``left`` counts what waits for a decision, or runs, by state; ``operation`` is that of all, if it is
    one; ``lines`` are the records of a key.
    """

    batches: list[tuple[list[bytes], str | None]]
    operation: str | None
    left: Counter[str] = field(default_factory=Counter)
    lines: list[Line] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many records there are to erase."""
        return sum(len(keys) for keys, _ in self.batches)


def erasable(state: AppState, sought: Sought) -> Erasable:
    """Find what there is to erase of a key, of a scope, or of one operation of it."""
    store = admin(state)
    if sought.key is not None:
        lines = sought.by_key(state)
        batches = [([key], line.version) for key, line in lines.items() if not line.waits]
        left = Counter(interrupted=len(lines) - len(batches))
        return Erasable([*batches], sought.operation, left, [*lines.values()])
    found = [store.belonging(tail, sought.operation) for tail in scope_tails(sought.scope or "")]
    keys = [key for each, _ in found for key in each]
    left = sum((left for _, left in found), Counter[str]())
    left["interrupted"] += left.pop("failed", 0)  # what waits needs a decision
    batched = [(keys[start : start + BATCH], None) for start in range(0, len(keys), BATCH)]
    return Erasable([*batched], sought.operation, left)


def erase(state: AppState, found: Erasable, operator: Operator) -> int:
    """Erase records, and their markers in Redis; return how many.

    A line of the log says who did it: see :meth:`Operator.tell`. It names the only record of a batch.
    """
    store, total = admin(state), 0
    for keys, seen in found.batches:
        if erased := store.erase(keys, seen):
            of = keys[0].hex()[:SHOWN] if len(keys) == 1 else None
            operator.tell(operator.note("erased"), operation=found.operation, id=of, records=erased)
        state.lock.forget(keys)
        total += erased
    return total
