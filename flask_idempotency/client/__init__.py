"""The caller's half: keys, and calls that are sent again with the same key until they have a response.

Nothing here needs Flask. :class:`IdempotentSession` needs requests, :class:`IdempotentTransport` httpx;
each is imported when it is first used.
"""

from __future__ import annotations

import base64
import json
import os
import time
from importlib import import_module
from typing import TYPE_CHECKING

from flask_idempotency.core.keys import digest, uuid7

if TYPE_CHECKING:
    from .session import IdempotentSession
    from .transport import IdempotentTransport

__all__ = ["IdempotentSession", "IdempotentTransport", "derive_key", "new_key"]


def new_key() -> str:
    """A new idempotency key: make one for each thing to be done, and keep it however the call ends.

    Only something new has a new key. After an error, a 401 or a 409 the first attempt may have worked.

    :return: a random UUID of version 7, which begins with the time in milliseconds: keys sort by it,
        and a server that has forgotten an old one can refuse it (``key-expired``).
    """
    return uuid7(time.time_ns() // 1_000_000, os.urandom(10))  # no state that a fork would copy


def derive_key(operation: str, params: object) -> str:
    """The idempotency key that follows from an operation and its parameters.

    It is the same in every process and after every restart, so nothing has to be stored. The parameters
    must tell two operations apart that are both meant: put the order's number in, not only the amount.

    :param operation: what is done, such as ``"create-payment"``. It keeps the keys of different
        operations apart.
    :param params: plain JSON: None, bool, int, float, str, list and dict with str as names. The order
        of a dict does not matter; ``1``, ``1.0`` and ``"1"`` are three.
    :return: 43 characters of the URL-safe base64 alphabet, which reveal nothing about the parameters.
    :raises ValueError: for NaN and the infinities, which are not JSON, and for a circle.
    :raises TypeError: for whatever else is not plain JSON. Its text is never guessed: it might differ
        after a restart.
    """
    text = json.dumps(params, sort_keys=True, allow_nan=False, separators=(",", ":"))
    if json.loads(text) != params:  # a tuple or the name 1 would have the key of a list or of "1"
        raise TypeError("The params must be plain JSON: lists, not tuples, and str as names.")
    return base64.urlsafe_b64encode(digest("client", operation, text)).rstrip(b"=").decode()


if not TYPE_CHECKING:  # a type checker would take every name for one of ours

    def __getattr__(name: str) -> object:
        modules = {"IdempotentSession": ".session", "IdempotentTransport": ".transport"}
        if name not in modules:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(modules[name], __name__), name)
