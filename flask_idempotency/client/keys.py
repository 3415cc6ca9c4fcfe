"""Keys for the caller: a new one for each call, or one that follows from what the call is about."""

from __future__ import annotations

import base64
import json
import os
import time

from flask_idempotency.core.keys import digest, uuid7


def new_key() -> str:
    """A new idempotency key: make one for each thing to be done, and keep it however the call ends.

    :return: a random UUID of version 7, which begins with the time in milliseconds.
    """
    return uuid7(time.time_ns() // 1_000_000, os.urandom(10))  # no state that a fork would copy


def derive_key(operation: str, params: object) -> str:
    """The idempotency key that follows from an operation and its parameters, the same in every process.

    :param operation: what is done, such as ``"create-payment"``.
    :param params: plain JSON that tells two operations apart that are both meant: the order's number,
        not only the amount. The order of a dict does not matter; ``1``, ``1.0`` and ``"1"`` are three.
    :return: 43 characters of the URL-safe base64 alphabet, which reveal nothing about the parameters.
    :raises ValueError: for NaN and the infinities, and for a circle.
    :raises TypeError: for whatever else is not plain JSON, such as a tuple.
    """
    text = json.dumps(params, sort_keys=True, allow_nan=False, separators=(",", ":"))
    if json.loads(text) != params:  # a tuple or the name 1 would have the key of a list or of "1"
        raise TypeError("The params must be plain JSON: lists, not tuples, and str as names.")
    return base64.urlsafe_b64encode(digest("client", operation, text)).rstrip(b"=").decode()
