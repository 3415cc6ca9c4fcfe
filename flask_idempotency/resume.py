"""Running abandoned operations again, through the application itself, as their client would.

A resumable operation's request is kept in its record until the operation ends. It holds the client's
key and whatever headers the route names, so it is sealed where there are keys to seal with.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from werkzeug.test import EnvironBuilder, run_wsgi_app

from .errors import SealBroken
from .http import REQUEST, RESUMED
from .state import AppState
from .stores.admin import Admin

log = logging.getLogger("flask_idempotency")


@dataclass(frozen=True, slots=True)
class Resumed:
    """What came of one operation.

    ``key`` is 8 hex digits of the key's hash, ``attempt`` the last one before; ``status`` is that of
    the answer, and 409 if it could not be run.
    """

    key: str
    operation: str
    attempt: int
    status: int


def resume(
    state: AppState, store: Admin, *, limit: int, max_attempts: int, backoff_seconds: float
) -> Iterator[Resumed]:
    """Send the requests of at most ``limit`` operations that nobody works on again.

    One is due ``backoff_seconds`` after its first attempt, twice that after the second, and so on, an
    hour at most; after ``max_attempts`` it is left alone. What could not even be begun here is due
    again after the same time, and comes after what has waited longer. Several processes may do this at
    once: each operation is claimed like any other. A request that cannot be unsealed is logged and
    counts as answered with 500. Raises ``StoreUnavailable``.
    """
    for due in store.resumable(limit, max_attempts, backoff_seconds):
        status = 500
        try:
            head, _, body = state.sealer.open_bytes(due.request, due.key, REQUEST).partition(b"\n")
            status = _send(state, due.key, json.loads(head), body)
        except SealBroken as error:
            log.error("operation %s: its request cannot be read: %s", due.operation, error)
        except Exception:  # no reason to leave the others unfinished
            log.exception("operation %s cannot be resumed", due.operation)
        if status >= 400:
            store.put_off(due.key)
        yield Resumed(due.key[:4].hex(), due.operation, due.attempt, status)


def _send(state: AppState, key: bytes, head: dict[str, object], body: bytes) -> int:
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
        environ[RESUMED] = key
        _, status, _ = run_wsgi_app(state.app.wsgi_app, environ, buffered=True)
    finally:
        builder.close()
    return int(status.split()[0])
