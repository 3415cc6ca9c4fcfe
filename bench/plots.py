"""The figures as SVG for the documentation: ``python -m bench --plots`` draws what the folder holds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .budgets import BUDGETS, GROWTH, NETWORK, TIME
from .climb import MOST_P99

try:
    import matplotlib as mpl
    from matplotlib import pyplot as plt
except ImportError as error:
    raise SystemExit("Plots need matplotlib: pip install --group bench, or make bench") from error

GREY = "#808080"
"""Readable on white and on black: the pages have both."""

COLOURS = {"hybrid": "#3b7dd8", "postgres": "#d9822b"}
"""Their difference is one of brightness, too."""

mpl.use("svg")
mpl.rcParams.update({
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.family": "sans-serif",
    "legend.frameon": False,
    "legend.labelcolor": GREY,
    "savefig.transparent": True,
    "svg.fonttype": "none",  # the reader's own fonts: text stays text
    "svg.hashsalt": "bench",  # the same figures give the same file
    "text.color": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
})  # fmt: skip


def draw(folder: Path) -> list[Path]:
    """Draw each plot whose figures lie in the folder; returns the files written."""
    written = []
    for name, (source, plot) in PLOTS.items():
        if (folder / source).exists():
            figures = json.loads((folder / source).read_text(encoding="utf-8"))
            path = folder / f"{name}.svg"
            plot(figures, path)
            written.append(path)
    return written


def cost(figures: dict[str, Any], path: Path) -> None:
    """Time by path, and its budget."""
    ratios = {row["path"]: row for row in figures["figures"] if row["what"] == TIME}
    names = list(reversed(ratios))
    with _axes(path, height=3) as axes:
        for place, name in enumerate(names):
            row, store = ratios[name], "postgres" if "postgres" in name else "hybrid"
            reach = [[row["value"] - row["low"]], [row["high"] - row["value"]]]
            axes.barh(place, row["value"], xerr=reach, color=COLOURS[store], ecolor=GREY, height=0.6)
            axes.plot([BUDGETS[name][TIME]] * 2, [place - 0.4, place + 0.4], color=GREY, linewidth=2)
        axes.axvline(1, color=GREY, linestyle=":")
        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel("time, × the unprotected view (thick line: budget)")


def network(figures: dict[str, Any], path: Path) -> None:
    """A first request's time against the delay of each round trip."""
    with _axes(path, height=3) as axes:
        for store in ("hybrid", "postgres"):
            rows = {r["what"]: r for r in figures["figures"] if r["path"] == f"first, {store}"}
            delays = {0.0: TIME, **NETWORK}
            times = [delay * 1000 for delay, what in delays.items() if what in rows]
            values = [rows[what]["value"] for what in delays.values() if what in rows]
            axes.plot(times, values, "o-", color=COLOURS[store], label=store)
        axes.axhline(1, color=GREY, linestyle=":")
        axes.set_xlabel("ms that the network adds to each round trip")
        axes.set_ylabel("time, × the unprotected view")
        axes.legend()


def growth(figures: dict[str, Any], path: Path) -> None:
    """First requests and replays against the number of records."""
    sizes = figures["sizes"]
    with _axes(path, height=3) as axes:
        for what, colour in (("first", COLOURS["postgres"]), ("replay", GREY)):
            ratios = [size[what] for size in sizes]
            values = [each["value"] for each in ratios]
            reach = [[each["value"] - each["low"] for each in ratios],
                     [each["high"] - each["value"] for each in ratios]]  # fmt: skip
            axes.errorbar([size["records"] for size in sizes], values, reach,
                          fmt="o-", color=colour, label=what)  # fmt: skip
        axes.axhline(GROWTH, color=GREY, linewidth=2)
        axes.set_xscale("log")
        axes.set_ylim(0, 1.3)
        axes.set_xlabel("records in the table")
        axes.set_ylabel("time, × the smallest table\n(thick line: budget)")
        axes.legend()


def throughput(figures: dict[str, Any], path: Path) -> None:
    """How late 1 of 100 first requests is, by their rate, for each kind of workers."""
    climbers = [each for each in figures["rates"] if each["request"] == "first"]
    kinds = list(dict.fromkeys(each["workers"] for each in climbers))
    figure, panels = plt.subplots(1, len(kinds), figsize=(7, 2.8), sharey=True, squeeze=False)
    for axes, kind in zip(panels[0], kinds, strict=True):
        for each in climbers:
            if each["workers"] == kind:
                colour = COLOURS.get(each["server"], GREY)
                steps = sorted((step["offered"], step["p99"]) for step in each["steps"])
                axes.plot(*zip(*steps, strict=True), ".", color=colour, label=each["server"])
                axes.axvline(statistics.median(each["highest"]), color=colour, linewidth=1)
        axes.set_title(kind, fontsize=10)
        axes.set_yscale("log")
        axes.axhline(MOST_P99, color=GREY, linestyle=":")
    panels[0][0].set_ylabel("p99, ms")
    panels[0][0].legend(fontsize=8)
    figure.supxlabel("first requests a second that were due; line: the highest rate", fontsize=10)
    _save(figure, path)


@contextmanager
def _axes(path: Path, height: float) -> Iterator[Any]:
    figure, axes = plt.subplots(figsize=(7, height))
    yield axes
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


PLOTS = {
    "cost": ("bench.json", cost),
    "network": ("bench.json", network),
    "growth": ("growth.json", growth),
    "throughput": ("workers.json", throughput),
}
"""By name: the file with the figures, and what draws them."""
