"""What an application's tests call: what a client or a queue may do, tried on one operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from flask import Flask
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from .effects import Effects
from .operations import Calls, Requests
from .procedure import TIMEOUT_SECONDS, Check

__tracebackhide__ = True  # pytest shows the test's line and the message, not what is in between


def assert_idempotent(
    client: FlaskClient,
    method: str,
    path: str,
    *,
    effects: Effects | None = None,
    status: int | None = None,
    duplicates: int = 3,
    changed: Mapping[str, Any] | bool = True,
    other: Mapping[str, Any] | FlaskClient | None = None,
    ignore_headers: Sequence[str] = (),
    timeout: float = TIMEOUT_SECONDS,
    **kwargs: Any,
) -> TestResponse:
    """Send one operation in all the ways in which a client may, and assert one effect and one response.

    It sends the request, ``duplicates`` of it while the first is still in its view, a retry, the same
    key with another body, and one more retry.

    * ``kwargs`` are those of ``client.open``, with ``io.BytesIO(...)`` for a file. Without an
      idempotency key in ``headers`` a new one is sent.
    * ``effects`` counts, in an application context, what one operation does: a number, or several by
      name: ``lambda: {"payments": count(), "mails": len(outbox)}``. Each must change with the first
      request, and by nothing else. Left out, the rows of the application's own tables are counted, and
      one count must change. ``dict`` says that there is nothing to count.
    * ``status`` is that of the operation's response; left out, any below 400. With 400 or above, an
      effect may be missing, and an operation that ``on_interrupted`` holds (409) is not replayed.
    * ``changed`` makes the other body: arguments in place of those in ``kwargs``. True makes one up,
      False leaves this check out.
    * ``other`` makes the request another user's: such arguments, or a client that has signed in. It
      must get a response and have an effect of its own.
    * ``ignore_headers`` may differ between the responses, as ``Date``, ``Set-Cookie``, ``Vary`` and
      ``Cache-Control`` always may.
    * ``timeout`` is how many seconds each request may take.

    Returns the first response. Raises ``AssertionError``, which says what differs, ``TypeError`` if
    ``effects`` counts no numbers, and ``ConfigurationError`` if the test has bound ``db.session`` to
    one connection: then pass ``duplicates=0``.
    """
    requests = Requests(client, method, path, kwargs, changed, other, status, ignore_headers)
    return cast("TestResponse", Check(requests, effects, timeout).run(duplicates))


def assert_idempotent_call(
    app: Flask,
    call: Callable[[], Any],
    *,
    effects: Effects | None = None,
    changed: Callable[[], Any] | None = None,
    other: Callable[[], Any] | None = None,
    raises: type[Exception] | None = None,
    duplicates: int = 3,
    timeout: float = TIMEOUT_SECONDS,
) -> Any:
    """Deliver one message in all the ways in which a queue may, and assert one effect and one result.

    As :func:`assert_idempotent`, for what consumes a message by ``idempotency.run``. ``call`` is called
    once, by ``duplicates`` other threads while the first is still in its function, and once more.

    * ``call`` takes no arguments, and uses the same key each time: ``lambda: invoice("alice", 7)``. A
      duplicate beside a running call must raise, as a queue takes a call that returns for done.
    * ``changed`` is as ``call``, with the same key and another payload: it must be rejected.
    * ``other`` consumes another message, with a key and an effect of its own.
    * ``raises`` is what the call raises in the end, such as ``OperationInterrupted``: an effect may
      then be missing.

    Returns what the first call returned. Raises ``AssertionError``, which says what differs.
    """
    calls = Calls(app, call, changed, other, raises)
    return Check(calls, effects, timeout).run(duplicates)
