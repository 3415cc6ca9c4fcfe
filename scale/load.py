"""Clients that pay, each with a key of its own and the project's own client, and what they saw."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import requests

from example.seed import ALICE, BOB, DemoAccount
from flask_idempotency.client import IdempotentSession

CLIENTS = 8
PAUSE_SECONDS = 0.2  # between two payments of a client, on average
AGAIN = 0.3  # of the payments are sent a second time with their key
AMOUNT = 1  # cent


@dataclass(frozen=True)
class Answer:
    """What one call came to; ``status`` is None if the client gave up without a response."""

    key: str
    began: float
    ended: float
    status: int | None
    body: bytes = b""
    error: str = ""

    @property
    def is_acknowledged(self) -> bool:
        return self.status == 201


@dataclass
class Load:
    """Payments at several addresses until it is stopped."""

    urls: Sequence[str]
    clients: int = CLIENTS
    answers: list[Answer] = field(default_factory=list)
    who: dict[str, DemoAccount] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._client) for _ in range(self.clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _client(self) -> None:
        with IdempotentSession() as session:
            while not self._over.is_set():
                key = str(uuid.uuid4())
                self.who[key] = random.choice((ALICE, BOB))  # noqa: S311 -- no secret
                self._over.wait(random.uniform(0, 2 * PAUSE_SECONDS))  # noqa: S311
                for _ in range(1 + (random.random() < AGAIN)):  # noqa: S311
                    self.answers.append(self.pay(session, key))

    def pay(self, session: requests.Session, key: str) -> Answer:
        """Send the payment of a key; its description is its key, so that its rows can be counted."""
        url = random.choice(self.urls) + "/payments"  # noqa: S311
        headers = {"Authorization": f"Bearer {self.who[key].token}", "Idempotency-Key": key}
        body = {"amount": AMOUNT, "description": key}
        began = time.monotonic()
        try:
            got = session.post(url, json=body, headers=headers, timeout=(3, 30))
        except requests.RequestException as error:
            return Answer(key, began, time.monotonic(), None, b"", type(error).__name__)
        return Answer(key, began, time.monotonic(), got.status_code, got.content)
