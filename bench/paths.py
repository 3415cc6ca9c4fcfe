"""The measured paths: what sends one request along each of them."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count, repeat
from unittest.mock import patch

from flask.testing import FlaskClient

from .app import make_client

Send = Callable[[], None]

PATIENCE_SECONDS = 20.0
"""How long a request may take to reach its view, and Redis to reply: usually it is left alone after a
twentieth of a second, and other paths would be measured. Longer than any machine is slow."""


YOUNG_SECONDS = 60.0
"""For so long Redis alone rejects duplicates, as it does in the first second."""


class Shops:
    """Three applications: ``unprotected``, ``hybrid`` and ``postgres``, each on a database of its own.

    ``database_urls`` are by these names. :meth:`close` gives their connections back.
    """

    def __init__(self, database_urls: Mapping[str, str], redis_url: str) -> None:
        self._arrived, self._go_on = threading.Event(), threading.Event()
        redis_url += f"{'&' if '?' in redis_url else '?'}socket_timeout={PATIENCE_SECONDS}"
        self.clients = {
            "unprotected": make_client(database_urls["unprotected"], protect=False),
            "hybrid": make_client(database_urls["hybrid"], redis_url=redis_url, during=self._stay),
            "postgres": make_client(database_urls["postgres"]),
        }

    def close(self) -> None:
        """Close the connections to PostgreSQL."""
        for client in self.clients.values():
            with client.application.app_context():
                client.application.extensions["sqlalchemy"].engine.dispose()

    @contextmanager
    def path(self, name: str) -> Iterator[Send]:
        """A function that sends one request along the path: one of ``budgets.BASE``, or its base."""
        kind, _, store = name.partition(", ")
        match kind:
            case "first":
                yield sending(self.clients[store], "/payments", new_keys())
            case "replay":
                yield replaying(self.clients[store], "/payments")
            case "duplicate":
                key = next(new_keys())
                with self._in_flight(self.clients[store], key):
                    yield sending(self.clients[store], "/held", repeat(key), status=409)
            case "unprotected bare view" | "unprotected empty view":
                yield sending(self.clients["hybrid"], f"/{name.split()[1]}", new_keys())
            case _:
                yield sending(self.clients["unprotected"], f"/{name}", new_keys())

    @contextmanager
    def _in_flight(self, client: FlaskClient, key: str) -> Iterator[None]:
        """A first request is inside its view meanwhile, and its lock in Redis is young."""
        from flask_idempotency.stores import lock  # not before the package's import is measured

        times = {"PROBE_AFTER_SECONDS": YOUNG_SECONDS, "LOCK_SECONDS": 2 * YOUNG_SECONDS}
        self._arrived.clear()
        self._go_on.clear()
        own_client = client.application.test_client()
        first = threading.Thread(target=sending(own_client, "/held", repeat(key)))
        slow_locks = patch.multiple(lock, **times)
        slow_locks.start()
        first.start()
        try:
            if not self._arrived.wait(PATIENCE_SECONDS):
                raise RuntimeError("the first request did not reach its view")
            yield
        finally:
            self._go_on.set()
            first.join()
            slow_locks.stop()

    def _stay(self) -> None:
        self._arrived.set()
        self._go_on.wait()


def new_keys() -> Iterator[str]:
    """Keys that nobody has used; all have the same length."""
    return map((secrets.token_hex(8) + "-{:08}").format, count())


def sending(
    client: FlaskClient, url: str, keys: Iterator[str], *, status: int = 201, replay: bool = False
) -> Send:
    """A function that sends one request with the next of ``keys``.

    It raises ``RuntimeError`` for another status, and for a stored response if that is no ``replay``.
    """

    def send() -> None:
        response = client.post(url, json={"amount": 5}, headers={"Idempotency-Key": next(keys)})
        if response.status_code != status or ("Idempotent-Replayed" in response.headers) != replay:
            raise RuntimeError(f"{url} answered {response.status}: {response.text}")

    return send


def replaying(client: FlaskClient, url: str) -> Send:
    """A function that sends a request again, which it has sent once already."""
    key = next(new_keys())
    sending(client, url, repeat(key))()
    return sending(client, url, repeat(key), replay=True)
