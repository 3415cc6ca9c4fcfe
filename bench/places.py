"""Where the function calls of a path go: each is charged to the function of ours that caused it.

That is the innermost one on the stack, of the package or of the measured application.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from .calls import WARM_UP, no_collection, profiling
from .paths import Send

HERE = Path(__file__).parent.parent
OURS = tuple(str(HERE / name) for name in ("flask_idempotency", "bench/app.py"))

ELSEWHERE = "the other packages"
"""What Flask and SQLAlchemy do without being called by us, such as asking for listeners."""

ITSELF = "itself"

SHOWN = 5


def places(send: Send) -> Counter[tuple[str, str]]:
    """The calls of one ``send()``, warm: by the function that caused them, and the one it called."""
    counted: Counter[tuple[str, str]] = Counter()
    stack = [(ELSEWHERE, "")]

    def note(frame: FrameType, event: str, what: Any) -> None:
        place, called = stack[-1]
        if event == "call":
            if frame.f_code.co_filename.startswith(OURS):
                place, called = _name(frame), ""
                counted[place, ITSELF] += 1
            else:
                called = called or _name(frame)
                counted[place, called] += 1
            stack.append((place, called if place != ELSEWHERE else ""))
        elif event == "c_call":
            counted[place, called or what.__qualname__] += 1
        elif event == "return" and len(stack) > 1:
            stack.pop()

    for _ in range(WARM_UP):
        send()
    with no_collection(), profiling(note):
        send()
    return counted


def table(path: Counter[tuple[str, str]], base: Counter[tuple[str, str]]) -> str:
    """What the path spends beyond its base, as a Markdown table; the most expensive function first."""
    added = Counter(path)
    added.subtract(base)
    total: Counter[str] = Counter()
    parts: dict[str, Counter[str]] = {}
    for (place, called), calls in added.items():
        total[place] += calls
        parts.setdefault(place, Counter())[called] += calls
    lines = [f"{total.total()} calls", "", "| calls | function | of them by |", "|---:|---|---|"]
    for place, calls in total.most_common():
        if calls:
            most = (f"{name} {count}" for name, count in parts[place].most_common(SHOWN) if count)
            lines.append(f"| {calls} | {place} | {', '.join(most)} |")
    return "\n".join(lines)


_ABOVE = re.compile(rf"^{re.escape(str(HERE))}/|.*/site-packages/|.*/python3\.\d+/")


def _name(frame: FrameType) -> str:
    """The function's file, from its package on, and its name."""
    code = frame.f_code
    file = _ABOVE.split(code.co_filename)[-1]
    return f"{file}:{getattr(code, 'co_qualname', code.co_name)}"  # new in Python 3.11
