"""How many retries the calls of one client may make together."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from threading import Lock
from typing import Final

from .allowed import WHOLE, check

RETRY: Final = 5
"""Tokens that a retry costs: of a full budget 100, for seven calls at a time in a fail-over of 45 s."""

SUCCESS: Final = 1
"""Tokens that a call without a retry earns: in the long run there is one retry for five of them."""

_lock = Lock()  # one for all, held for less than a microsecond: so budgets can be copied and pickled


def _new_lock() -> None:
    global _lock  # noqa: PLW0603
    _lock = Lock()


if hasattr(os, "register_at_fork"):  # another thread may have held it when the process was forked
    os.register_at_fork(after_in_child=_new_lock)


@dataclass
class RetryBudget:
    """How many retries all calls of a client may make together: an outage causes no storm.

    A retry costs 5 tokens. A call that needed none earns 1, and one that succeeded after all gets back
    what its last retry cost. When too few tokens are left, calls are sent once, until others succeed.
    The AWS SDKs have the same scheme. Waiting for a running attempt (409 ``request-in-progress``)
    costs nothing. A call needs some 11 retries for an outage of 45 seconds.

    Threads share a budget. A copy, an unpickled budget and that of a forked process count on their own.

    :param capacity: tokens at the beginning, and the most there can be; 500 allow 100 retries.
    :raises ValueError: for a negative capacity.
    :raises TypeError: for one that is not a whole number.
    """

    capacity: int = 500
    left: int = field(init=False)

    def __post_init__(self) -> None:
        check("capacity", self.capacity, WHOLE)
        self.left = self.capacity

    def take(self, tokens: int) -> bool:
        """Take tokens if there are as many. Returns whether there were."""
        with _lock:
            if tokens > self.left:
                return False
            self.left -= tokens
            return True

    def give(self, tokens: int) -> None:
        """Put tokens in, up to the capacity."""
        with _lock:
            self.left = min(self.left + tokens, self.capacity)
