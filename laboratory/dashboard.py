"""Draw a dashboard of Grafana's as Grafana would: with what a Prometheus answers, as HTML."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader

from laboratory.running import send
from servers.process import Server

SCRAPED, STEP, RATE = 2, 5, "30s"  # seconds between two scrapes and two points; what a rate looks back
WIDTH, ROW, GAP, EDGE = 1088, 34, 8, 16  # pixels: of all panels, of a unit of height, between, around
LEFT, RIGHT, TOP, AXIS = 66, 14, 36, 22  # around the curves; the axis is below them
LEGEND, LETTER, MARK = 17, 5.9, 38  # pixels: for a line of it, for a letter, for what is around a name
# Okabe and Ito's colours, without the yellow, which is too light for a line; then the same in dashes.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#555555")
DASHES = ("", "5 3", "1.5 3")
STATES = {"green": "#1a7f4b", "orange": "#b35900", "red": "#c4162a"}

Values = list[float | None]
Panel = dict[str, Any]


class Prometheus(Server):
    """Scrapes one application, with a sign-in, until the block ends."""

    kind = "prometheus"

    def __init__(self, program: str, url: str, name: str, password: str) -> None:
        self._program = program
        self._job = {
            "job_name": "shop",
            "scrape_interval": f"{SCRAPED}s",
            "scrape_timeout": f"{SCRAPED}s",
            "basic_auth": {"username": name, "password": password},
            "static_configs": [{"targets": [url.partition("://")[2]]}],
        }
        super().__init__()

    def _prepare(self) -> None:
        self._account.write(self.data / "prometheus.yml", json.dumps({"scrape_configs": [self._job]}))

    def _command(self) -> list[str]:
        return [
            self._program,
            f"--config.file={self.data / 'prometheus.yml'}",
            f"--storage.tsdb.path={self.data / 'series'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _ping(self) -> bool:
        try:
            return send(self.url, "GET", "/-/ready", {}).status == 200
        except OSError:
            return False

    def ask(self, expression: str, times: list[int]) -> list[tuple[dict[str, str], Values]]:
        """Each series of an expression, by its labels, with a value or none for each time."""
        when = {"start": times[0], "end": times[-1], "step": STEP}
        query = urlencode({"query": expression, **when})
        answer = json.loads(send(self.url, "GET", f"/api/v1/query_range?{query}", {}).body)
        found = []
        for each in answer["data"]["result"]:
            values = {round(at): float(value) for at, value in each["values"]}
            numbers = [values.get(at, math.nan) for at in times]
            found.append((each["metric"], [None if math.isnan(n) else n for n in numbers]))
        return found


@dataclass
class Curve:
    """A series of a panel; ``base`` is what it stands on if the panel stacks them."""

    name: str
    colour: str
    dash: str
    values: Values
    base: list[float]

    @property
    def top(self) -> Values:
        return [None if v is None else v + b for v, b in zip(self.values, self.base, strict=True)]


def drawn(dashboard: dict[str, Any], prometheus: Prometheus, started: float, ended: float) -> str:
    """The dashboard as a page of HTML that needs nothing else."""
    times = list(range(math.ceil(started) + 2 * SCRAPED, math.floor(ended), STEP))
    panels = [_panel(panel, prometheus, times) for panel in dashboard["panels"]]
    templates = FileSystemLoader(Path(__file__).parent / "templates")
    page = Environment(loader=templates, autoescape=True).get_template("dashboard.html")
    height = max(panel["y"] + panel["height"] for panel in panels)
    minutes = round((ended - started) / 60)
    return page.render(title=dashboard["title"], panels=panels, height=height, minutes=minutes)


def _panel(panel: Panel, prometheus: Prometheus, times: list[int]) -> Panel:
    place = panel["gridPos"]
    shown = {
        "type": panel["type"],
        "title": panel["title"],
        "x": place["x"] * (WIDTH + GAP) / 24,
        "y": place["y"] * ROW,
        "width": place["w"] * (WIDTH + GAP) / 24 - GAP,
        "height": place["h"] * ROW - GAP,
    }
    if panel["type"] == "row":
        return shown
    curves = list(_curves(panel, prometheus, times))
    if not curves:
        return shown
    draw = _stat if panel["type"] == "stat" else _graph
    return {**shown, **draw(panel["fieldConfig"]["defaults"], curves, times, shown)}


def _curves(panel: Panel, prometheus: Prometheus, times: list[int]) -> Iterator[Curve]:
    custom = panel["fieldConfig"]["defaults"].get("custom", {})
    stacks = custom.get("stacking", {}).get("mode") == "normal"
    base, number = [0.0] * len(times), 0
    for target in panel["targets"]:
        expression = target["expr"].replace("$__rate_interval", RATE)
        expression = re.sub(r"\$(job|operation)", ".*", expression)
        for labels, values in prometheus.ask(expression, times):
            if all(value is None for value in values):
                continue
            parts = re.split(r"{{(\w+)}}", target["legendFormat"])
            name = "".join(labels.get(p, "") if n % 2 else p for n, p in enumerate(parts))
            round_, colour = divmod(number, len(COLOURS))
            curve = Curve(name.strip(), COLOURS[colour], DASHES[round_ % 3], values, base)
            if stacks:
                base = [b + (v or 0) for b, v in zip(base, values, strict=True)]
            number += 1
            yield curve


def _stat(defaults: Panel, curves: list[Curve], times: list[int], shown: Panel) -> Panel:
    """The last value, in the colour of its threshold, over a small curve of all of them."""
    [curve] = curves
    value = next(v for v in reversed(curve.values) if v is not None)
    steps = defaults.get("thresholds", {}).get("steps", [])
    passed = [step["color"] for step in steps if value >= (step["value"] or 0)]
    text, colour = _said(round(value, 1), defaults["unit"], value), passed[-1] if passed else "green"
    for mapping in defaults.get("mappings", []):
        if option := mapping["options"].get(f"{value:g}"):
            text, colour = option["text"], option["color"]
    curve.colour = STATES[colour]
    most = max([v for v in curve.values if v is not None] + [1e-9])
    box = (0.0, shown["width"] - 2, shown["height"] - 2, 34.0, most)
    return {"value": text, "colour": STATES[colour], "curves": [_lines(curve, 10, *box)]}


def _graph(defaults: Panel, curves: list[Curve], times: list[int], shown: Panel) -> Panel:
    """Curves with axes, above a legend."""
    bottom = shown["height"] - _legend(curves, shown["width"] - 24) - AXIS - 12
    most = max(value for curve in curves for value in curve.top if value is not None)
    step = _nice(most * 32 / (bottom - TOP) if most > 0 else 1, whole=defaults["unit"] == "short")
    ticks = [number * step for number in range(math.ceil(most / step + 1e-9) + 1)] or [0, step]
    box = (LEFT, shown["width"] - RIGHT, bottom, bottom - TOP, ticks[-1])
    across = (shown["width"] - RIGHT - LEFT) / (times[-1] - times[0])
    every = next(s for s in (60, 120, 180, 300, 600, 1200) if s * across >= 48 or s == 1200)
    minutes = [at for at in range(times[0], times[-1] + 1) if at % every == 0]
    opacity = defaults["custom"]["fillOpacity"]
    return {
        "bottom": bottom,
        "curves": [_lines(curve, opacity, *box) for curve in curves],
        "ticks": [
            (bottom - tick / ticks[-1] * (bottom - TOP), _said(tick, defaults["unit"], ticks[-1]))
            for tick in ticks
        ],
        "times": [
            (LEFT + (at - times[0]) * across, time.strftime("%H:%M", time.gmtime(at))) for at in minutes
        ],
    }


def _legend(curves: list[Curve], width: float) -> int:
    """How high a legend is, whose names stand one after the other."""
    lines, left = 1, width
    for curve in curves:
        needed = len(curve.name) * LETTER + MARK
        if needed > left:
            lines, left = lines + 1, width
        left -= needed
    return lines * LEGEND


def _lines(
    curve: Curve, opacity: int, left: float, right: float, bottom: float, height: float, most: float
) -> Panel:
    """A curve as paths of SVG: its line, which ends where there is no value, and the area below."""
    across, up = (right - left) / (len(curve.values) - 1), height / most
    line, areas, area = "", "", list[int]()
    top = curve.top

    def point(place: int, value: float) -> str:
        return f"{left + place * across:.1f},{bottom - value * up:.1f}"

    for place, value in enumerate([*top, None]):
        if value is not None:
            line += f"L{point(place, value)}" if area else f"M{point(place, value)}h0"
            area.append(place)
        elif area:
            over = [point(each, top[each] or 0) for each in area]
            under = [point(each, curve.base[each]) for each in reversed(area)]
            areas += f"M{'L'.join(over + under)}Z"
            area = []
    shown = {"name": curve.name, "colour": curve.colour, "dash": curve.dash, "opacity": opacity / 100}
    return {**shown, "line": line, "area": areas}


def _nice(step: float, *, whole: bool) -> float:
    """The next larger step of which people count: 1, 2, 2.5 or 5, and ten times these."""
    if whole and step <= 1:
        return 1
    power = 10.0 ** math.floor(math.log10(step))
    steps = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    return next(nice * power for nice in steps if nice * power >= step * (1 - 1e-9))


def _said(value: float, unit: str, most: float) -> str:
    """A number with its unit, in the size that the largest has."""
    if unit != "s":
        after = {"reqps": " req/s", "cps": " c/s"}.get(unit, "")
        return f"{value:,.3g}{after}" if value < 1000 else f"{value / 1000:.3g} K{after}"
    scales = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "µs"))
    size, name = next((s for s in scales if most >= s[0]), (1, "s"))
    return f"{value / size:.3g} {name}"
