"""The process of one contender: it does what each line of its input asks, and prints what came of it.

    python -m bench.peers.worker APP DATABASE_URL REDIS_URL OPTIONS [--calls]

It runs in the contender's environment, so it imports nothing of this project but ``bench`` and
``servers``; only our own application imports the extension.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import count, repeat
from typing import Any

from bench.calls import COUNTED, WARM_UP, no_collection
from bench.peers.shop import BEFORE_COMMIT, Shop
from bench.processors import Queue

Send = Callable[[], None]

STORM_SECONDS = 0.3
"""How long the view of the duplicate storm takes: every duplicate arrives meanwhile."""

STORM_PATIENCE_SECONDS = 30.0
"""When a duplicate without an answer counts as hanging: longer than any contender waits by itself."""

POLL_SECONDS = 0.1

CHECKED = 10


class Worker:
    """One application without protection, and one with; each public method is a command."""

    def __init__(self, app: str, database_url: str, redis_url: str, options: dict[str, Any]) -> None:
        self._shop = Shop(database_url)
        protect = import_module(f"bench.peers.apps.{app}").protect
        protect(self._shop, database_url, redis_url, **options)
        self._shop.create_tables()
        self._client = self._shop.app.test_client()
        bare = Shop(database_url).app.test_client()
        self._keys = map(f"{os.getpid():08}-{{:08}}".format, count())
        self._sends = {
            "first": _sending(self._client, "/payments", self._keys),
            "replay": _sending(self._client, "/payments", repeat(next(self._keys))),
            "bare": _sending(bare, "/bare", self._keys),
            "empty": _sending(bare, "/empty", self._keys),
        }

    def check(self, path: str) -> dict[str, int]:
        """The statuses of some requests; a replay must have the first response's body."""
        key, statuses, bodies = next(self._keys), Counter[str](), set()
        for _ in range(CHECKED):
            response = _post(self._client, key if path == "replay" else next(self._keys))
            if response.status_code == 201:
                bodies.add(response.data)
            ran_again = path == "replay" and len(bodies) > 1
            statuses["another payment" if ran_again else str(response.status_code)] += 1
        return statuses

    def go(self, path: str, times: int = 1) -> None:
        """Send requests along a path."""
        for _ in range(times):
            self._sends[path]()

    def measure(self, path: str, base: str, rounds: int, pids: list[int]) -> list[list[float]]:
        """Seconds of a path and of its base, in turns: each by the clock, and without the waits.

        Those are the waits for a processor, of this process and of ``pids``, which serve it.
        """
        sends = self._sends[path], self._sends[base]
        with no_collection(), Queue(pids) as queue:
            return [[n for send in sends for n in _seconds(send, queue)] for _ in range(rounds)]

    def calls(self, paths: list[str]) -> dict[str, int]:
        """Function calls of each path, in all threads; they are counted from the process' start."""
        return {path: CALLS.of(self._sends[path]) for path in paths}

    def storm(self, threads: int, amount: int) -> dict[str, int]:
        """The same request from so many threads at once: the responses' statuses."""
        self._shop.at = lambda moment: time.sleep(STORM_SECONDS if moment == BEFORE_COMMIT else 0)
        key, barrier, statuses = next(self._keys), threading.Barrier(threads), Counter[str]()

        def send() -> None:
            client = self._shop.app.test_client()
            barrier.wait()
            statuses[str(_post(client, key, amount).status_code)] += 1

        senders = [threading.Thread(target=send, daemon=True) for _ in range(threads)]
        for each in senders:
            each.start()
        end = time.monotonic() + STORM_PATIENCE_SECONDS
        for each in senders:
            each.join(max(end - time.monotonic(), 0))
        if hanging := sum(each.is_alive() for each in senders):
            statuses["hanging"] = hanging
        return statuses

    def die(self, moment: str, key: str, amount: int) -> None:
        """Send a request whose view dies of ``kill -9`` at that moment."""
        self._shop.at = lambda now: now == moment and os.kill(os.getpid(), signal.SIGKILL)
        self.send(key, amount, patience=1)

    def send(self, key: str, amount: int, patience: float) -> dict[str, Any]:
        """Send a request again and again until it is neither an error nor in progress."""
        started, statuses = time.monotonic(), Counter[int]()
        while True:
            status = _post(self._client, key, amount).status_code
            if status in (201, 422) or time.monotonic() - started > patience:
                return {"status": status, "before": statuses}
            statuses[status] += 1
            time.sleep(POLL_SECONDS)


class Calls:
    """Function calls, Python's and C's, of all threads that begin after ``install()``."""

    def __init__(self) -> None:
        self._calls = 0

    def install(self) -> None:
        sys.setprofile(self._note)
        threading.setprofile(self._note)

    def of(self, send: Send) -> int:
        """Those of one ``send()``, warm: the median of some."""
        for _ in range(WARM_UP):
            send()
        return sorted(self._count(send) for _ in range(COUNTED))[COUNTED // 2]

    def _count(self, send: Send) -> int:
        before = self._calls
        send()
        return self._calls - before

    def _note(self, _frame: object, event: str, _what: object) -> None:
        self._calls += event in ("call", "c_call")


CALLS = Calls()


def _sending(client: Any, url: str, keys: Iterator[str]) -> Send:
    def send() -> None:
        response = client.post(url, json={"amount": 5}, headers={"Idempotency-Key": next(keys)})
        if response.status_code != 201:
            raise RuntimeError(f"{url} answered {response.status}")

    return send


def _seconds(send: Send, queue: Queue) -> tuple[float, float]:
    waited, processor, elapsed = queue.seconds(), time.process_time(), time.perf_counter()
    send()
    elapsed, processor = time.perf_counter() - elapsed, time.process_time() - processor
    # Two may have waited at the same time: but no call is shorter than what this process did in it.
    return elapsed, max(elapsed - (queue.seconds() - waited), processor)


def _post(client: Any, key: str, amount: int = 5) -> Any:
    return client.post("/payments", json={"amount": amount}, headers={"Idempotency-Key": key})


def main() -> None:
    """The process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a package prints is no answer
    app, database_url, redis_url, options = sys.argv[1:5]
    if sys.argv[5:] == ["--calls"]:
        CALLS.install()
    worker = Worker(app, database_url, redis_url, json.loads(options))
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = getattr(worker, asked.pop("do"))(**asked)
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # no thread of a package keeps it


if __name__ == "__main__":
    main()
