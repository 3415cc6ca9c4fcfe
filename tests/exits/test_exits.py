"""An exit or a time limit inside a statement passes as itself; the retry books and charges once."""

import http.client
import json
import os
import signal
import threading
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from rq.timeouts import JobTimeoutException

from flask_idempotency import RequestInProgress
from laboratory import running
from tests.drivers import each_unless_named
from tests.exits import shop
from tests.integration.apps import gunicorn_conf
from tests.waiting import wait_until

pytest_generate_tests = each_unless_named


LIMITS = SystemExit, SoftTimeLimitExceeded, JobTimeoutException
ERRORS = [*product(shop.JOBS, LIMITS), *product(["atomic", "leased"], [SystemExit, KeyboardInterrupt])]


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
    with pytest.raises(error), interrupted(error()):
        shop.call(shop_app, name, 1)
    assert shop.done()["payments"] == 0

    def retry():
        with suppress(RequestInProgress):  # the server has not noticed that nobody waits for it
            return shop.call(shop_app, name)

    assert wait_until(retry, "the retry has a result") == shop.call(shop_app, name) == 2
    # A charge was made before: were it stored as failed, nobody would ever book it.
    assert shop.done() == {"payments": 1, "charges": int(name in ("job", "leased"))}
    assert shop_app.test_client().post("/plain").status_code == 201


SLEEPS = [(0.05, 1000), (30, 1)]
"""Many statements, or one."""
WORKERS = {
    # SystemExit can come between many statements; in psycopg2's one, SIGKILL comes a second later.
    "gunicorn's": (["--timeout", "1"], {}, {}),
    "gevent's": (["--worker-class=gevent"], {"COOPERATIVE": "1", "PRELOAD": "no"}, {"X-Limit": "0.5"}),
}


@pytest.mark.parametrize("whose", WORKERS)
def test_a_time_out_of_a_worker(database, monkeypatch, whose):
    arguments, environment, limit = WORKERS[whose]
    monkeypatch.setenv("LEASE", "2")  # for a worker that was killed in psycopg2's one statement
    arguments = ("--config", gunicorn_conf.__file__, "--workers", "1", *arguments)
    environment = {**os.environ, **environment}
    with running.gunicorn("tests.exits.shop:create_app()", environment, *arguments) as (url, _):
        for kind, (seconds, times) in product(["atomic", "leased"], SLEEPS):
            key = {"Idempotency-Key": f"{kind}-{times}"}
            post, before = partial(running.send, url, "POST", f"/{kind}"), shop.done()
            with suppress(OSError, http.client.HTTPException):  # no response at all is as good
                asked = {"X-Seconds": str(seconds), "X-Times": str(times), **limit}
                assert post({**key, **asked}).status == 500
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
