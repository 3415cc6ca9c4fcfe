"""Erasing what is stored about a user."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from flask_idempotency.core.keys import SHOWN
from flask_idempotency.stores.admin import Line
from flask_idempotency.web.routes import AppState

from .decide import noted, tell
from .find import Sought, admin, scope_tails

BATCH = 1000
"""How many records are erased in one transaction: a few milliseconds, for which nothing waits."""


@dataclass(frozen=True, slots=True)
class Erasable:
    """What there is to erase, in ``batches``: keys, and for one key the version that was seen.

    ``left`` counts by state what is not to be erased, ``operation`` is that of all, if it is one, and
    ``lines`` are the records of a key.
    """

    batches: list[tuple[list[bytes], str | None]]
    left: Counter[str]
    operation: str | None
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
        return Erasable([*batches], left, sought.operation, [*lines.values()])
    found = [store.belonging(tail, sought.operation) for tail in scope_tails(sought.scope or "")]
    keys = [key for each in found for key in each.keys]
    return Erasable(
        [(keys[start : start + BATCH], None) for start in range(0, len(keys), BATCH)],
        sum((_left(each.left) for each in found), Counter[str]()),
        sought.operation,
    )


def erase(state: AppState, found: Erasable, by: str | None = None, *, origin: str) -> Iterator[int]:
    """Erase records, and their markers in Redis; yield how many, after each batch.

    A line of the log says who did it: see :func:`tell`. It names the only record of a batch.
    """
    store = admin(state)
    for keys, seen in found.batches:
        erased = store.erase(keys, seen)
        if erased:
            of = keys[0].hex()[:SHOWN] if len(keys) == 1 else None
            tell(
                noted("erased", "", by),
                origin,
                operation=found.operation,
                id=of,
                records=erased,
            )
        state.lock.forget(keys)
        yield erased


def _left(counts: Mapping[str, int]) -> Counter[str]:
    """Count what is left of a scope: what waits needs a decision, failed or interrupted."""
    left = Counter(counts)
    left["interrupted"] += left.pop("failed", 0)
    return left
