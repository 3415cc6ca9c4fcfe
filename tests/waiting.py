"""Waiting for what a server or a process does by itself, and tells nobody when it has."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_SECONDS = 30
"""How long a test waits for what ought to happen soon. Longer than any machine is slow."""


def wait_until(happens: Callable[[], Any], what: str) -> Any:
    """Ask until the answer is true; give it."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (answer := happens()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)
    return answer
