"""Callers during an outage, by a clock that only the simulation moves."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import requests

from flask_idempotency.client import RetryPolicy
from flask_idempotency.client.retries import Attempts

REQUEST = requests.Request("POST", "https://api.example.com/payments")


@dataclass
class Outage:
    """A server that is away from 0 on, and callers with one policy.

    Each caller is a thread: it makes one call, and with a ``pause`` others while the outage lasts.

    :param seconds: how long the server is away.
    :param attempt: seconds that an attempt takes which fails; 0 for one that is refused at once.
    :param pause: seconds from a call to the caller's next; None for a single call of each.
    """

    seconds: float
    attempt: float = 0
    pause: float | None = None
    seed: int = 1
    now: float = 0.0
    calls: int = 0
    failed: int = 0
    sent: list[float] = field(default_factory=list)
    """When each request of the outage was sent."""

    def __post_init__(self) -> None:
        self._chance = Random(self.seed)  # noqa: S311 -- no secret

    def policy(self, **options: Any) -> RetryPolicy:
        """A policy that has this clock and a seeded chance."""
        return RetryPolicy(clock=lambda: self.now, random=self._chance.random, **options)

    def run(self, policy: RetryPolicy, begins: list[float]) -> None:
        """Let callers begin at these moments, and run until each has what it ends with."""
        waiting = [(at, number, self._caller(policy)) for number, at in enumerate(begins)]
        heapq.heapify(waiting)
        while waiting:
            self.now, number, caller = heapq.heappop(waiting)
            wait = next(caller, None)
            if wait is not None:
                heapq.heappush(waiting, (self.now + wait, number, caller))

    def _caller(self, policy: RetryPolicy) -> Iterator[float]:
        """The seconds until each of its next moments."""
        yield from self._call(policy)
        while self.pause is not None and self.now + self.pause < self.seconds:
            yield self.pause
            yield from self._call(policy)

    def _call(self, policy: RetryPolicy) -> Iterator[float]:
        self.calls += 1
        attempts = Attempts(policy, REQUEST)
        while True:
            limit = attempts.begin()
            if self.now >= self.seconds:
                attempts.after_response(201, {}, b"")
                return
            self.sent.append(self.now)
            if self.attempt:
                yield min(self.attempt, limit)
            wait = attempts.after_response(503, {}, b"")
            if wait is None:
                self.failed += 1
                return
            yield wait
