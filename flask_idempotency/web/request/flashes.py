"""Flashed messages are given again with a replay.

They live in the session, and so in a ``Set-Cookie``, which is never stored. But who clicks twice sees
only the second answer: a replayed redirect, after which the message would be missing. So what the view
flashed is stored with its answer, and flashed anew in the session of whoever gets the replay.
"""

from __future__ import annotations

from typing import Any

from flask import Flask, current_app, flash, has_request_context, message_flashed, session
from flask.json.tag import TaggedJSONSerializer

from flask_idempotency.core.errors import RecordBroken
from flask_idempotency.core.records import Headers
from flask_idempotency.core.storable import FLASHES

from .state import present_operation, this_request


def watch(app: Flask) -> None:
    """Hear of every message that a protected view flashes."""
    message_flashed.connect(_note, app)


def stored() -> Headers:
    """What the view flashed and did not show in its own answer, as a header line that is not sent."""
    flashed = this_request().flashes
    if not flashed:
        return ()
    left = session.get("_flashes", [])
    kept = [pair for pair in flashed if pair in left]
    if not kept:
        return ()
    try:
        return ((FLASHES, _JSON.dumps(kept)),)
    except TypeError:  # a lazy translation, for example, in a session that is not JSON
        return ((FLASHES, _JSON.dumps([(category, str(message)) for category, message in kept])),)


def flash_again(headers: Headers) -> None:
    """Flash what was stored, except what the session still holds. Raises ``RecordBroken``."""
    texts = [value for name, value in headers if name == FLASHES]
    if not texts or not has_request_context() or _has_no_session():
        return
    waiting = [*map(tuple, session.get("_flashes", []))]  # some sessions make lists of them
    try:
        flashed = [(category, message) for category, message in _JSON.loads(texts[0])]
    except (TypeError, ValueError) as error:
        raise RecordBroken("its flashed messages cannot be read") from error
    for category, message in flashed:
        if (category, message) not in waiting:
            flash(message, category)


_JSON = TaggedJSONSerializer()
"""As Flask's own sessions have it: it keeps tuples, and Markup apart from text."""


def _note(_app: Flask, message: Any, category: str, **_: Any) -> None:
    if present_operation() is not None:
        this_request().flashes.append((category, message))


def _has_no_session() -> bool:
    # Behind the proxy: asking through it would count as use, and set a Vary header.
    return current_app.session_interface.is_null_session(session._get_current_object())  # type: ignore[attr-defined]  # noqa: SLF001
