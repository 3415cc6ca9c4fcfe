"""A time-out by signal spoils nothing of ours, wherever in our code it comes.

It is raised at the n-th line of the package that a request runs, for n = start, start + STRIDE … until
the request ends before. Each kind of view has a start of its own: together they meet more lines.
"""

from __future__ import annotations

import gc
import linecache
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import sqlalchemy as sa

import flask_idempotency
from flask_idempotency import RequestInProgress
from tests.exits import shop

OURS = str(Path(flask_idempotency.__file__).parent)
STRIDE = 5
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


def interrupted(call: Callable[[], Any], at: int) -> tuple[str, bool] | None:
    """Raise at the ``at``-th line of ours that ``call`` runs: where, and whether the error passed.

    None if it runs fewer. The error has gone with its traceback, as in a server that logged it, and so
    has what only the error held: no finalizer may raise another one.
    """
    lines, where, passed, others = 0, "", False, []

    def line(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines, where
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not source.lstrip().startswith(UNHEARD):
            lines += 1
            if lines == at:
                where = f"{frame.f_code.co_filename[len(OURS) :]}:{frame.f_lineno}"
                raise TimedOut
        return line

    def function(frame: FrameType, *_: object) -> Any:
        return line if frame.f_code.co_filename.startswith(OURS) else None

    def unraisable(seen: Any) -> None:  # Python lets none pass that comes in __del__
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
def new_garbage_only() -> Iterator[None]:
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
@pytest.mark.parametrize(("kind", "start"), [("atomic", 3), ("leased", 5)])
def test_a_plain_request_and_a_retry_work_after_a_time_out_at_any_line(shop_app, kind, start):
    def execute(statement: Any) -> Any:
        with shop_app.app_context(), shop.db.engine.begin() as connection:  # the only one in the pool
            return connection.scalar(statement)

    post, at, payments = partial(shop.call, shop_app, kind), start, 1
    post(key="warm")
    while found := interrupted(partial(post, key=(key := f"key-{at}")), at):
        assert shop_app.test_client().post("/plain").status_code == 201, found
        try:
            post(key=key)
        except RequestInProgress:  # the error may come where the lease would be ended
            assert kind == "leased", found
            execute(END_LEASES)
            post(key=key)
        at, payments = at + STRIDE, payments + 2
        assert (found[1], execute(COUNT)) == (True, payments), found
    assert at > start + 50 * STRIDE, "few lines of ours were met"
