"""Where the function calls of a path go: by function with all that it calls, and by package."""

from __future__ import annotations

import re
import sys
from collections import Counter
from types import FrameType
from typing import Any

from .calls import WARM_UP, no_collection, profiling
from .paths import Send

SHOWN = 60


class Places:
    """The calls of one ``send()``, warm.

    ``within`` counts by function: it, and all that is called until it returns; a function that calls
    itself counts once. ``own`` counts by package: calls of its functions, and C's that they call.
    """

    def __init__(self, send: Send) -> None:
        self.within: Counter[str] = Counter()
        self.times: Counter[str] = Counter()
        self.own: Counter[str] = Counter()
        self._calls = 0
        self._stack: list[tuple[str, int]] = []
        for _ in range(WARM_UP):
            send()
        with no_collection(), profiling(self._note):
            send()

    def _note(self, frame: FrameType, event: str, what: Any) -> None:
        if event == "call":
            self._calls += 1
            self._stack.append((_place(frame), self._calls))
            self.own[_package(frame)] += 1
        elif event == "c_call":
            self._calls += 1
            name = f"C: {getattr(what, '__qualname__', what)}"
            self.own[_package(frame)] += 1
            self.within[name] += 1
            self.times[name] += 1
        elif event == "return" and self._stack:
            name, before = self._stack.pop()
            self.times[name] += 1
            if all(name != outer for outer, _ in self._stack):
                self.within[name] += self._calls - before + 1


def table(path: Places, base: Places) -> str:
    """What the path spends beyond its base, as two Markdown tables."""
    lines = ["| function | calls with all within | it is called |", "|---|---:|---:|"]
    added = path.within.copy()
    added.subtract(base.within)
    for name, calls in added.most_common(SHOWN):
        lines.append(f"| `{name}` | {calls:+} | {path.times[name] - base.times[name]:+} |")
    lines += ["", "| package | calls of its own |", "|---|---:|"]
    own = path.own.copy()
    own.subtract(base.own)
    lines += [f"| {name} | {calls:+} |" for name, calls in own.most_common() if calls]
    return "\n".join(lines)


def _place(frame: FrameType) -> str:
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)  # new in Python 3.11
    return f"{_file(frame)}:{name}"


def _file(frame: FrameType) -> str:
    """The file's path from its package on."""
    path = frame.f_code.co_filename
    roots = sorted((root for root in sys.path if root and path.startswith(root)), key=len)
    return path[len(roots[-1]) :].lstrip("/") if roots else path


def _package(frame: FrameType) -> str:
    return re.split(r"[/.]", _file(frame))[0]
