"""An exit or a time limit inside a statement passes as itself; the retry books and charges once."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from rq.timeouts import JobTimeoutException

from laboratory import running
from tests.drivers import each_unless_named
from tests.exits import shop
from tests.integration.apps import gunicorn_conf
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]

pytest_generate_tests = each_unless_named


LIMITS = SystemExit, SoftTimeLimitExceeded, JobTimeoutException
ERRORS = [(name, error) for name in shop.JOBS for error in LIMITS]
ERRORS += [(name, error) for name in ("atomic", "leased") for error in (SystemExit, KeyboardInterrupt)]


def expected(name):
    """A charge was made before: were it stored as failed, nobody would ever book it."""
    return {"left": 0, "attempt": 2, "payments": 1, "charges": int(name in ("job", "leased"))}


@contextmanager
def interrupted(error):
    """In the block, a signal raises ``error`` in this thread once the server runs ``pg_sleep``."""

    def on_signal(*_):
        raise error

    def send():
        wait_until(lambda: over.is_set() or shop.select(shop.SLEEPING), "a statement sleeps")
        if not over.is_set():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

    over, sender = threading.Event(), threading.Thread(target=send)
    before = signal.signal(signal.SIGALRM, on_signal)  # pytest-timeout's, whose timer goes on
    try:
        sender.start()
        yield
    finally:
        over.set()
        sender.join()
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("name", "error"), ERRORS)
def test_a_signal(shop_app, name, error):
    def cut_off():
        with pytest.raises(error), interrupted(error()):
            shop.call(shop_app, name, 1)

    assert shop.cut_off_and_retried(shop_app, name, cut_off) == expected(name)


def test_a_timeout_of_gevent(database):
    command = [sys.executable, "-m", "tests.exits.greenlets"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: expected(name) for name in shop.CALLS}


# SystemExit can come between many statements; in psycopg2's one, SIGKILL comes a second later.
SLEEPS = [(0.05, 1000), (30, 1)]
CONFIG = ("--config", gunicorn_conf.__file__, "--workers", "1", "--timeout", "1")


def test_the_time_out_of_gunicorn(database, monkeypatch):
    monkeypatch.setenv("LEASE", "2")  # for a worker that was killed in psycopg2's one statement
    with running.gunicorn("tests.exits.shop:create_app()", os.environ, *CONFIG) as (url, _):
        for kind, (seconds, times) in product(["atomic", "leased"], SLEEPS):
            key = {"Idempotency-Key": f"{kind}-{times}"}
            post, before = partial(running.send, url, "POST", f"/{kind}"), shop.done()
            with suppress(OSError, http.client.HTTPException):  # no response at all is as good
                assert post({**key, "X-Seconds": str(seconds), "X-Times": str(times)}).status == 500
            left = {**before, "charges": before["charges"] + (kind == "leased")}
            assert shop.done() == left, key
            retry = wait_until(partial(finished, post, key), "the retry has a response")
            again = post(key)
            assert (retry.status, json.loads(retry.body)) == (201, {"attempt": 2}), key
            assert (again.headers["Idempotent-Replayed"], again.body) == ("true", retry.body)
            assert shop.done() == {**left, "payments": before["payments"] + 1}, key
            assert running.send(url, "POST", "/plain", {}).status == 201, key


def finished(post, key):
    reply = post(key)
    return None if reply.status == 409 else reply
