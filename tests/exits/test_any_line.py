"""A time-out at the n-th line of the package that a request runs spoils nothing of ours.

For n = start, start + stride … until the request ends before. Each kind of view has its own: together
they meet more lines.
"""

import gc
import linecache
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa

import flask_idempotency
from flask_idempotency import RequestInProgress
from tests.drivers import each_unless_named
from tests.exits import shop

pytest_generate_tests = each_unless_named

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
@pytest.mark.parametrize(("kind", "start", "stride"), [("atomic", 3, 13), ("leased", 5, 29)])
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
    assert at > start + 20 * stride, "few lines of ours were met"
