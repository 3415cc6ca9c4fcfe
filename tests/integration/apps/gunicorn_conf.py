"""How gunicorn runs ``worker_shop.py``; the kind of worker comes by the command line."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

from packaging.version import Version

workers = 2
preload_app = os.environ.get("PRELOAD") != "no"  # quicker: two workers need not import it each
graceful_timeout = 10
control_socket_disable = True


def post_fork(server: Any, worker: Any) -> None:
    """In a worker, before gevent's patches and before the application is loaded or used."""
    if os.environ.get("COOPERATIVE"):
        from psycopg2 import extensions

        extensions.set_wait_callback(_wait)
        # It would wait in C: no other greenlet would run, and no time limit of gevent's would come.
        if Version(version("psycopg")) < Version("3.1.14"):
            os.environ["PSYCOPG_WAIT_FUNC"] = "wait_selector"


def _wait(connection: Any) -> None:
    """Let other greenlets run while psycopg2 waits; the same as psycogreen does."""
    from gevent.socket import wait_read, wait_write
    from psycopg2 import OperationalError, extensions

    while (state := connection.poll()) != extensions.POLL_OK:
        if state == extensions.POLL_READ:
            wait_read(connection.fileno())
        elif state == extensions.POLL_WRITE:
            wait_write(connection.fileno())
        else:
            raise OperationalError(f"poll() said {state}")
