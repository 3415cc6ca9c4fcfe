"""What differs between PostgreSQL's drivers: one file for each, and nobody else imports one."""

from __future__ import annotations

import importlib
from functools import cache
from typing import cast

from sqlalchemy import Dialect

from .port import Driver

NAMES = ("psycopg2", "psycopg")
"""SQLAlchemy's names of the drivers that there is a file for."""


def driver_of(dialect: Dialect) -> Driver:
    """The driver's file. Raises ``ModuleNotFoundError`` if there is none, or it is not installed."""
    return _file(dialect.driver)


@cache
def _file(name: str) -> Driver:
    return cast("Driver", importlib.import_module(f"{__name__}.{name}"))


def known_driver(dialect: Dialect) -> Driver | None:
    """As :func:`driver_of`; None for a driver that there is no file for."""
    is_known = dialect.name == "postgresql" and dialect.driver in NAMES and not dialect.is_async
    return driver_of(dialect) if is_known else None
