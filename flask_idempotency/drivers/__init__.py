"""What differs between PostgreSQL's drivers: one file for each, and nobody else imports one."""

from __future__ import annotations

import importlib
from functools import cache
from typing import cast

from sqlalchemy import Dialect

from .port import Driver

NAMES = ("psycopg2", "psycopg")
"""SQLAlchemy's names of the drivers that there is a file for. The others share one."""


def driver_of(dialect: Dialect) -> Driver:
    """The driver's file. Raises ``ModuleNotFoundError`` if the driver is not installed."""
    if dialect.name == "sqlite":
        return _file("sqlite")
    return _file(dialect.driver if dialect.driver in NAMES else "any")


@cache
def _file(name: str) -> Driver:
    return cast("Driver", importlib.import_module(f"{__name__}.{name}"))
