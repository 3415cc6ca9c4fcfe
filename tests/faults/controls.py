"""The negative controls: designs and mutants that must be caught, each with the faults that suit it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from tests.faults.checker import Limits, Violation, violations
from tests.faults.machines import Machines, Plan
from tests.faults.soak import LONGEST_VIEW_SECONDS, run

FLUSH, REDIS_DOWN = "Redis: FLUSHALL", "Redis: kill -9 and start"
LOST, WORKER = "Postgres: COMMIT's reply lost", "worker: kill -9"
TERMINATED = "Postgres: holder terminated"


@dataclass(frozen=True)
class Control:
    """What suits it; see :class:`Plan`."""

    faults: tuple[str, ...] = ()
    points: tuple[str, ...] = ()
    kill_share: float = 0.0
    slow_share: float = 0.03
    trouble_share: float = 0.03
    changed_share: float = 0.15
    pause_seconds: float = 0.3
    wait: float = 0.0


_DUPLICATES = Control(faults=(FLUSH,), slow_share=0.08, wait=0.3)
_DEATHS = Control(points=("claim", "view", "write"), kill_share=0.2)

CONTROLS: dict[str, Control] = {
    # designs
    "mark_afterwards": Control(points=("commit",), kill_share=0.4),
    "redis_only": Control(faults=(FLUSH, REDIS_DOWN)),
    "take_over_by_age": Control(slow_share=0.08),
    # mutants
    "no_row_lock": _DUPLICATES,
    "empty_is_free": _DUPLICATES,
    "redis_trusted": _DUPLICATES,
    "commit_after_answer": Control(points=("answer",), kill_share=0.2),
    "two_transactions": Control(points=("answer",), kill_share=0.2),
    "delete_on_error": Control(faults=(LOST,), pause_seconds=0.1),
    "fail_open": Control(faults=(REDIS_DOWN,)),
    "no_scope": Control(),
    "claim_not_committed": _DEATHS,
    "lock_believed_forever": _DEATHS,
    "fingerprint_on_one_path": Control(changed_share=0.5),
    "fingerprint_not_in_progress": replace(_DEATHS, kill_share=0.3, changed_share=0.8),
    "never_taken_over": _DEATHS,
    "answer_not_stored": Control(),
    "errors_kept": Control(trouble_share=0.3),
    "lost_commit_is_success": Control(faults=(TERMINATED, LOST), pause_seconds=0.1),
    "claim_without_attempt": _DEATHS,
    "another_answer": Control(),
}


def plan(name: str, seed: int, seconds: float) -> Plan:
    """A short run of the control with what suits it."""
    control = CONTROLS[name]
    return replace(Plan(seconds, seed, design=name), **vars(control))


def caught(name: str, seed: int, seconds: float, machines: Machines) -> list[Violation]:
    """The guarantees that the control broke, as far as the checker has seen. A mere error is none."""
    with tempfile.TemporaryDirectory(prefix="journal-") as folder:
        history, truth = run(plan(name, seed, seconds), Path(folder, "journal.jsonl"), machines)
    found = violations(history, truth, Limits(LONGEST_VIEW_SECONDS))
    return [violation for violation in found if not violation.rule.startswith("an error")]
