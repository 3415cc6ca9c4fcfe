"""The figures as a table: path, what was measured, budget, figure, verdict."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import servers.urls

from .budgets import budget


@dataclass(frozen=True)
class Figure:
    """A figure, and for one that scatters its 95 % confidence interval."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return _shown(self.value)
        return f"{_shown(self.value)} ({_shown(self.low)}–{_shown(self.high)})"

    def verdict(self, budget: float) -> str:
        """Whether it is within the budget; "unclear" if the interval contains that."""
        low, high = self._reach
        if round(high, 2) <= budget:
            return "within"
        return "**over**" if round(low, 2) > budget else "unclear"

    @property
    def _reach(self) -> tuple[float, float]:
        low, high = (self.value if each is None else each for each in (self.low, self.high))
        return low, high


Figures = dict[str, dict[str, Figure]]
"""By path, and by what was measured."""


def markdown(figures: Figures, notes: list[str]) -> str:
    """One row for each figure; ``notes`` say how they were measured."""
    rows = ["| path | what | budget | figure | verdict |", "|---|---|---:|---:|---|"]
    for path, measured in figures.items():
        for what, figure in measured.items():
            most = budget(path, what, servers.urls.driver)
            shown, verdict = ("–", "–") if most is None else (_shown(most), figure.verdict(most))
            rows.append(f"| {path} | {what} | {shown} | {figure} | {verdict} |")
    return "\n".join([*rows, "", *(f"- {note}" for note in notes), ""])


def write(folder: Path, figures: Figures, notes: list[str]) -> None:
    """Write ``bench.md`` and ``bench.json`` into the folder."""
    driver = servers.urls.driver
    rows = [
        {"path": path, "what": what, "budget": budget(path, what, driver), **asdict(figure)}
        for path, measured in figures.items()
        for what, figure in measured.items()
    ]
    write_both(folder, "bench", markdown(figures, notes), {"figures": rows, "notes": notes})


def write_both(folder: Path, name: str, text: str, data: object) -> None:
    """Write what a reader needs, ``name``.md, and what a plot needs, ``name``.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text.rstrip() + "\n", encoding="utf-8")
    as_json = json.dumps(data, indent=1, ensure_ascii=False)
    (folder / f"{name}.json").write_text(as_json + "\n", encoding="utf-8")


def _shown(number: float) -> str:
    return f"{number:,.0f}" if float(number).is_integer() or number > 100 else f"{number:.2f}"
