"""A view that kills its worker, and one worker after another: each forked, for one request.

The arguments are store, database, URL of Redis and ``max_attempts``. A line of output for each worker:
the attempt that it ran and its signal, or the status of its response.
"""

from __future__ import annotations

import os
import signal
import sys

from flask_idempotency import current_operation
from flask_idempotency.stores import lock
from tests.contract.test_requests import Shop


def die() -> None:
    print(current_operation.attempt, end=" ", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    store, uri, redis_url, most = sys.argv[1:]
    lock.PROBE_AFTER_SECONDS = 0  # a dead worker's lock is not believed
    shop = Shop(store, uri, redis_url)
    shop.view(die, max_attempts=int(most))
    for _ in range(int(most) + 2):
        if (worker := os.fork()) == 0:
            print(shop.post().status_code, flush=True)
            os._exit(0)
        _, ended = os.waitpid(worker, 0)
        if os.WIFSIGNALED(ended):
            print(signal.Signals(os.WTERMSIG(ended)).name, flush=True)
