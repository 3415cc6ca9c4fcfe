"""Keys for the caller: a new one for each call, or one that follows from what the call is about."""

from __future__ import annotations

import base64
import json
import os
import time
from datetime import datetime, timedelta, timezone

from flask_idempotency.core.keys import digest, uuid7

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def new_key() -> str:
    """A new idempotency key: make one for each thing to be done, and keep it however the call ends.

    Only something new has a new key. After an error, a 401 or a 409 the first attempt may have worked.

    :return: a random UUID of version 7, which begins with the time in milliseconds: keys sort by it,
        and a server that has forgotten an old one can refuse it (``key-expired``).
    """
    return uuid7(time.time_ns() // 1_000_000, os.urandom(10))  # no state that a fork would copy


def derive_key(operation: str, params: object, *, born: datetime | None = None) -> str:
    """The idempotency key that follows from an operation and its parameters.

    It is the same in every process and after every restart, so nothing has to be stored. The parameters
    must tell two operations apart that are both meant: put the order's number in, not only the amount.

    :param operation: what is done, such as ``"create-payment"``. It keeps the keys of different
        operations apart.
    :param params: plain JSON: None, bool, int, float, str, list and dict with str as names. The order
        of a dict does not matter; ``1``, ``1.0`` and ``"1"`` are three.
    :param born: when the operation was first wanted, with a time zone and from 1970 on; the same for
        every attempt. Then the key says its age to a server that refuses old ones, in milliseconds.
    :return: 43 characters of the URL-safe base64 alphabet, which reveal nothing about the parameters;
        with ``born``, a UUID of version 7, which reveals that alone.
    :raises ValueError: for NaN and the infinities, which are not JSON, for a circle, and for a ``born``
        without a time zone or before 1970.
    :raises TypeError: for another type of ``born``, and for whatever else is not plain JSON. Its text
        is never guessed: it might differ after a restart.
    """
    text = json.dumps(params, sort_keys=True, allow_nan=False, separators=(",", ":"))
    _refuse_what_json_changes(params)
    derived = digest("client", operation, text)
    if born is None:
        return base64.urlsafe_b64encode(derived).rstrip(b"=").decode()
    if not isinstance(born, datetime):
        raise TypeError(f"born must be a datetime with a time zone, not {type(born).__name__}")
    if born.utcoffset() is None or (since := born - _EPOCH) < timedelta():
        raise ValueError("born must be a datetime with a time zone, from 1970 on")
    return uuid7(since // timedelta(milliseconds=1), derived[:10])


def _refuse_what_json_changes(value: object) -> None:
    # json writes tuples as lists, and the names 1, True and None as text: different parameters would
    # be alike.
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise TypeError(f"The names in params must be str, not {type(name).__name__}.")
            _refuse_what_json_changes(item)
    elif isinstance(value, list):
        for item in value:
            _refuse_what_json_changes(item)
    elif isinstance(value, tuple):
        raise TypeError("The params must hold lists, not tuples.")
