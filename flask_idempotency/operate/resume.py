"""Running abandoned operations again, through the application itself, as their client would.

The record of a resumable operation stores its request until the operation ends. That holds the client's
key and the headers that the route names, so it is encrypted if there are encryption keys.

The environ of the new request names its record. It continues that operation as found here, or does
nothing: the hook before the request admits it only to a protected, resumable view of the same
operation, and its claim never begins one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from werkzeug.test import EnvironBuilder, run_wsgi_app

from flask_idempotency.core.errors import ConfigurationError, SealBroken
from flask_idempotency.core.logs import log
from flask_idempotency.core.records import State
from flask_idempotency.stores.admin import Due
from flask_idempotency.web.request.body import REQUEST
from flask_idempotency.web.request.state import RESUMED, Resuming
from flask_idempotency.web.setup.state import AppState

from .find import admin


@dataclass(frozen=True, slots=True)
class Resumed:
    """What came of one operation.

    ``key`` is 8 hex digits of the key's hash, ``attempt`` the last one before; ``status`` is the
    response's, or 409 if the operation could not be run or has not ended.
    """

    key: str
    operation: str
    attempt: int
    status: int


def resume(
    state: AppState, *, limit: int, max_attempts: int, backoff_seconds: float
) -> Iterator[Resumed]:
    """Re-send the requests of at most ``limit`` operations that have no active worker.

    One is due ``backoff_seconds`` after its first attempt, twice that after the second, and so on, an
    hour at most; after ``max_attempts`` it is skipped. A try counts like an attempt. It is counted
    before it is made, because it may be refused or end the process. Several processes may do this at
    once: each operation is claimed like any other. A request that cannot be decrypted is logged and
    gets the status 500. Raises ``StoreUnavailable``, and ``ConfigurationError`` if protection is off.
    """
    if not state.settings.enabled:
        raise ConfigurationError(
            "IDEMPOTENCY_ENABLED is False: what is sent again would run unprotected, so nothing is sent"
        )
    store = admin(state)
    for due in store.resumable(limit, max_attempts, backoff_seconds):
        if not store.count_try(due):
            continue
        status = _try(state, due)
        store.postpone(due.key)
        if status < 500 and not _has_ended(state, due):
            status = 409 if status < 400 else status
            _log_refusal(due, status)
        yield Resumed(due.key[:4].hex(), due.operation, due.attempt, status)


def _try(state: AppState, due: Due) -> int:
    """Return the status of the response to a stored request; 500 if it cannot be sent."""
    try:
        head, _, body = state.sealer.open_bytes(due.request, due.key, REQUEST).partition(b"\n")
        return _send(state, due, json.loads(head), body)
    except SealBroken as error:
        log.error("operation %r: its request cannot be read: %s", due.operation, error)
    except Exception:  # no reason to leave the others unfinished
        log.exception("operation %r cannot be resumed", due.operation)
    return 500


def _send(state: AppState, due: Due, head: dict[str, object], body: bytes) -> int:
    resuming = Resuming(due.operation, due.key, due.owner)
    builder = EnvironBuilder(
        base_url=str(head["base_url"]),
        query_string=str(head["query"]),
        method=str(head["method"]),
        headers=head["headers"],  # type: ignore[arg-type]
        data=body,
    )
    try:
        environ = builder.get_environ()
        environ["PATH_INFO"] = str(head["path"]).encode().decode("latin-1")  # as PEP 3333 has it
        environ[RESUMED] = resuming
        # Not through the middleware around app.wsgi_app: the request was stored as it came out of that,
        # and an application that is mounted there by now would run whatever it has at this URL.
        send = partial(type(state.app).wsgi_app, state.app)
        _, status, _ = run_wsgi_app(send, environ, buffered=True)
    finally:
        builder.close()
    if resuming.refusal:
        log.error("operation %r was not resumed: %s", due.operation, resuming.refusal)
    return int(status.split()[0])


_REFUSED = {
    400: "its key was not found: IDEMPOTENCY_HEADER or the route's key may have changed since",
    401: "its stored headers do not authenticate its caller, or the route's namespace has changed",
}


def _log_refusal(due: Due, status: int) -> None:
    """Say why a request was refused that is refused again each time. 409 is a matter of time."""
    if status != 409:
        why = _REFUSED.get(status, "something before its view answered")
        log.warning("operation %r was not resumed, status %s: %s", due.operation, status, why)


def _has_ended(state: AppState, due: Due) -> bool:
    """Return True if the operation has ended, which a response without an error does not prove."""
    record = state.records.look(due.key)
    return record is not None and record.state is not State.IN_PROGRESS
