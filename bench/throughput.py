"""Requests under gunicorn: how long one takes when eight clients send them, with and without."""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from itertools import repeat
from urllib.parse import urlsplit

from flask import Flask

from laboratory import running

from .app import make_client
from .paths import PATIENCE_SECONDS, new_keys
from .report import Figure
from .times import Turns

CLIENTS = 8
TURNS = 5
SECONDS = 2.0

PATHS = {"first, hybrid": ("/payments", "/bare"), "replay, hybrid": ("/payments", "/empty")}
"""Each path, and the view that it is compared with on a server without the extension."""


def create_app() -> Flask:
    """The measured application in a worker, with a page for whoever waits until it answers."""
    given = os.environ
    protect, redis_url = given["PROTECT"] == "yes", given["REDIS_URL"]
    application = make_client(given["DATABASE_URL"], redis_url=redis_url, protect=protect).application
    application.add_url_rule("/", endpoint="ready", view_func=lambda: "ready")
    with application.app_context():  # gunicorn forks its workers from here
        application.extensions["sqlalchemy"].engine.dispose()
    return application


def measure(protected_url: str, unprotected_url: str, redis_url: str) -> dict[str, Figure]:
    """A request's time by path, against that without the extension; the two servers take turns."""
    patient = f"{redis_url}?socket_timeout={PATIENCE_SECONDS}"
    with ExitStack() as stack, ThreadPoolExecutor(CLIENTS) as clients:
        hosts = []
        for protect, database_url in ("yes", protected_url), ("no", unprotected_url):
            environment = {"DATABASE_URL": database_url, "REDIS_URL": patient, "PROTECT": protect}
            server = running.gunicorn(f"{__name__}:create_app()", environment)
            hosts.append(urlsplit(stack.enter_context(server)[0]).netloc)
        figures = {}
        for path, views in PATHS.items():
            keys = repeat(next(new_keys())) if path.startswith("replay") else new_keys()
            sent = [partial(_send, host, view, keys) for host, view in zip(hosts, views, strict=True)]
            turns = Turns()
            for _ in range(TURNS):
                for send, taken in zip(sent, (turns.path, turns.base), strict=True):
                    done = sum(clients.map(lambda _, send=send: send(), range(CLIENTS)))
                    taken.append(SECONDS / done)
            figures[path] = turns.ratio
    return figures


def _send(host: str, view: str, keys: Iterator[str]) -> int:
    """Send one request after the other; how many there were."""
    done, ends = 0, time.monotonic() + SECONDS
    with closing(http.client.HTTPConnection(host, timeout=PATIENCE_SECONDS)) as connection:
        while time.monotonic() < ends:
            headers = {"Content-Type": "application/json", "Idempotency-Key": next(keys)}
            connection.request("POST", view, '{"amount": 5}', headers)
            response = connection.getresponse()
            response.read()
            done += response.status == 201
    return done
