"""The shop with another driver than its own."""

from __future__ import annotations

import os
from typing import Any

from flask import Flask

from example.app import _ENGINE
from example.app import create_app as shop


def with_psycopg(*, prepares: bool = True) -> Flask:
    """The shop with the ``DATABASE_URL`` as it is, for psycopg; ``prepares`` its statements or not."""
    given: Any = _ENGINE["connect_args"]
    connect_args = given if prepares else {**given, "prepare_threshold": None}
    return shop(
        {
            "SQLALCHEMY_DATABASE_URI": os.environ["DATABASE_URL"],
            "SQLALCHEMY_ENGINE_OPTIONS": {**_ENGINE, "connect_args": connect_args},
        }
    )
