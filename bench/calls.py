"""Function calls of one request, Python's and C's, as ``sys.setprofile`` counts them.

They are the same on every machine and under any load, and time follows them. Of the same path they
differ by a few, so the figure is the median of some requests; what is asked or made only once in a
process has happened before.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .paths import Send

WARM_UP = 20
COUNTED = 9


def count_calls(send: Send) -> int:
    """The calls of one ``send()``, warm."""
    for _ in range(WARM_UP):
        send()
    with no_collection():
        return statistics.median_low(_count(send) for _ in range(COUNTED))


def _count(send: Send) -> int:
    calls = 0

    def note(_frame: object, event: str, _what: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with profiling(note):
        send()
    return calls


@contextmanager
def profiling(note: Callable[[Any, str, Any], None]) -> Iterator[None]:
    """Call ``note`` for each event in this thread."""
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage before and not meanwhile: it would strike at random."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
