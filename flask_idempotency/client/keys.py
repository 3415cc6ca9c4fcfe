"""Keys for the caller: a new one for each call, or one that follows from what the call is about."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable
from importlib import import_module
from typing import cast

from flask_idempotency.core.keys import digest


def new_key() -> str:
    """A new idempotency key: make one for each thing to be done, and keep it however the call ends.

    Only something new has a new key. After an error, a 401 or a 409 the first attempt may have worked.

    :return: a random UUID. It is of version 7, which begins with the time, so that keys sort in the
        order they were made, if Python makes that (3.14 and later) or uuid-utils is installed, which
        comes with the extras ``requests`` and ``httpx``; otherwise of version 4.
    """
    return str(_uuid_maker()())


def _uuid_maker() -> Callable[[], object]:
    if hasattr(uuid, "uuid7"):
        return cast("Callable[[], object]", uuid.uuid7)
    try:
        library = import_module("uuid_utils")
    except ImportError:
        return uuid.uuid4
    # Before 0.14, processes that were forked made the same ones: two calls with one key.
    first, second, *_ = library.__version__.split(".")
    return library.uuid7 if (int(first), int(second)) >= (0, 14) else uuid.uuid4


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
    _refuse_what_json_changes(params)
    return base64.urlsafe_b64encode(digest("client", operation, text)).rstrip(b"=").decode()


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
