"""What the modes of one package gave, beside each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

PLAIN = "plain"
MODES = (PLAIN, "unused", "observed", "protected", "twice")


@dataclass(frozen=True)
class Result:
    """One run of a suite, as the plugin wrote it. ``tests`` are by their pytest id."""

    tests: Mapping[str, str]
    writes: int = 0
    replays: int = 0
    equal: int = 0
    unequal: list[str] = field(default_factory=list)


def differences(plain: Result, other: Result) -> list[str]:
    """Each test whose result differs, or that only one of the two has, as a line."""
    lines = []
    for name in sorted({*plain.tests, *other.tests}):
        before, after = plain.tests.get(name, "missing"), other.tests.get(name, "missing")
        if before != after:
            lines.append(f"{name}: {before}, then {after}")
    return lines


def figures(mode: str, result: Result, plain: Result | None) -> list[str]:
    """A mode's row."""
    count = Counter(result.tests.values())
    differ = "–" if plain is None or mode == PLAIN else str(len(differences(plain, result)))
    failed = count["failed"] + count["error"]
    numbers = [len(result.tests), count["passed"], failed, count["skipped"]]
    return [mode, *map(str, [*numbers, result.writes, result.replays, result.equal]), differ]


def table(results: Mapping[str, Result]) -> str:
    """The modes of a package as Markdown, and below it every test and replay that differs.

    ``failed`` counts errors in fixtures, too; ``equal`` the replays that have the first response's
    status and body.
    """
    rows = [
        "| mode | tests | passed | failed | skipped | writes | replays | equal | unlike plain |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    notes = []
    for mode, result in results.items():
        rows.append(f"| {' | '.join(figures(mode, result, results.get(PLAIN)))} |")
        differ = differences(results[PLAIN], result) if PLAIN in results else ()
        notes += [f"- {mode}: {line}" for line in [*differ, *result.unequal]]
    return "\n".join([*rows, *([""] if notes else []), *notes])
