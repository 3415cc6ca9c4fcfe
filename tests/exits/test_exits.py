"""An exit or a time limit inside a statement, or anywhere in our code, spoils nothing of ours."""

import gc
import http.client
import json
import linecache
import os
import signal
import subprocess
import sys
import threading
import warnings
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa
from billiard.exceptions import SoftTimeLimitExceeded
from rq.timeouts import JobTimeoutException

import flask_idempotency
from flask_idempotency import RequestInProgress
from laboratory import running
from tests.drivers import each_unless_named, ways, with_driver
from tests.exits import shop
from tests.integration.apps import gunicorn_conf
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]

pytest_generate_tests = each_unless_named


@pytest.fixture
def database(databases, driver, tmp_path, monkeypatch):
    """The shop's, with its tables; its address is in the environment."""
    url = databases.take()
    monkeypatch.setenv("DATABASE_URL", with_driver(url, driver))
    monkeypatch.setenv("CHARGES", str(tmp_path / "charges"))
    app = shop.create_app()
    with app.app_context():
        shop.db.create_all()
        shop.db.engine.dispose()
    yield url
    databases.give_back(url)


@pytest.fixture
def shop_app(database):
    """The shop. After the test its connection must be in the pool, and no transaction be open."""
    app = shop.create_app()
    yield app
    with app.app_context():
        assert shop.db.engine.pool.checkedout() == 0, "a connection was not given back"
        shop.db.engine.dispose()
    wait_until(lambda: not shop.select(shop.OPEN), "no transaction is open")


# Inside a statement: it passes as itself; the retry books and charges once.

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


def test_a_timeout_of_gevent(database, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-m", "tests.exits.greenlets"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: expected(name) for name in shop.CALLS}


# SystemExit can come between many statements; in psycopg2's one, SIGKILL comes a second later.
SLEEPS = {"many statements": (0.05, 1000), "one statement": (30, 1)}
CONFIG = ("--config", gunicorn_conf.__file__, "--workers", "1", "--timeout", "1")


@ways("sleep", SLEEPS)
@pytest.mark.parametrize("kind", ["atomic", "leased"])
def test_the_time_out_of_gunicorn(database, monkeypatch, kind, sleep):
    monkeypatch.setenv("LEASE", "2")  # for a worker that was killed in psycopg2's one statement
    seconds, times = sleep
    with running.gunicorn("tests.exits.shop:create_app()", os.environ, *CONFIG) as (url, _):

        def post(**headers):
            return running.send(url, "POST", f"/{kind}", {"Idempotency-Key": "order-1", **headers})

        with suppress(OSError, http.client.HTTPException):  # no response at all is as good
            assert post(**{"X-Seconds": str(seconds), "X-Times": str(times)}).status == 500
        assert shop.done() == {"payments": 0, "charges": int(kind == "leased")}
        told = []
        wait_until(lambda: told.append(post()) or told[-1].status != 409, "the retry has a response")
        retry, again = told[-1], post()
        assert (retry.status, json.loads(retry.body)) == (201, {"attempt": 2})
        assert (again.headers["Idempotent-Replayed"], again.body) == ("true", retry.body)
        assert shop.done() == {"payments": 1, "charges": int(kind == "leased")}
        assert running.send(url, "POST", "/plain", {}).status == 201


# At any line: at the n-th of the package that a request runs, for n = start, start + stride … until the
# request ends before. Each kind of view has its own: together they meet more lines.

OURS = str(Path(flask_idempotency.__file__).parent)
UNHEARD = ("try:", "with ")
"""Lines where a tracer is called and no signal is heard: what is raised at a ``try:``, or at a ``with``
whose block has ended, passes the end of the ``with`` around it, or its own."""
END_LEASES = sa.text("""
    update idempotency_record set lease_expires_at = now()
    where key in (select key from idempotency_record for update skip locked) returning 1
""")
COUNT = sa.select(sa.func.count()).select_from(shop.Payment)


class TimedOut(BaseException):
    """As ``gevent.Timeout`` is one."""


def interrupted_at(at, call):
    """Raise at the ``at``-th line of ours that ``call`` runs: where, and if only that error passed.

    None if it runs fewer. Then the error has gone with its traceback, as in a server that logged it.
    """
    lines, where, passed, others = 0, "", False, []

    def line(frame, event, _):
        nonlocal lines, where
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not source.lstrip().startswith(UNHEARD):
            lines += 1
            if lines == at:
                where = f"{frame.f_code.co_filename[len(OURS) :]}:{frame.f_lineno}"
                raise TimedOut
        return line

    def function(frame, *_):
        return line if frame.f_code.co_filename.startswith(OURS) else None

    def unraisable(seen):  # Python lets none pass that comes in __del__
        nonlocal passed
        passed = passed or isinstance(seen.exc_value, TimedOut)
        if not isinstance(seen.exc_value, TimedOut):
            others.append(seen.exc_value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", unraisable)
        before = sys.gettrace()
        sys.settrace(function)
        try:
            call()
        except TimedOut:
            passed = True
        finally:
            sys.settrace(before)
        gc.collect()  # a connection in a transaction is a cycle, as SQLAlchemy makes it
    return (where, passed and not others) if where else None


@pytest.fixture
def new_garbage_only():
    """A collection looks at what was made since: after thousands of tests each would take a second.

    What it closes are sockets that a time-out of the test before has left: nobody else has them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("new_garbage_only")
@pytest.mark.timeout(180)  # a driver may wait for ever for a reply that was taken
@pytest.mark.parametrize(("kind", "start", "stride"), [("atomic", 3, 5), ("leased", 5, 11)])
def test_a_plain_request_and_a_retry_work_after_a_time_out_at_any_line(shop_app, kind, start, stride):
    def execute(statement):
        with shop_app.app_context(), shop.db.engine.begin() as connection:  # the only one in the pool
            return connection.scalar(statement)

    post, at, payments = partial(shop.call, shop_app, kind), start, 1
    post(key="warm")
    while found := interrupted_at(at, partial(post, key=(key := f"key-{at}"))):
        assert shop_app.test_client().post("/plain").status_code == 201, found
        try:
            post(key=key)
        except RequestInProgress:  # the error may come where the lease would be ended
            assert kind == "leased", found
            execute(END_LEASES)
            post(key=key)
        at, payments = at + stride, payments + 2
        assert (found[1], execute(COUNT)) == (True, payments), found
    assert at > start + 50 * stride, "few lines of ours were met"
