"""The drivers for PostgreSQL that a test runs on: one file for each stands in the room ``drivers``."""

from __future__ import annotations

from typing import Any

import psycopg
import psycopg2.extensions
import pytest
from sqlalchemy import URL

from servers import plain_dsn

KNOWN = {"postgresql+psycopg2", "postgresql+psycopg"}


def on(*names: str) -> pytest.MarkDecorator:
    """For a test that runs on these drivers, whatever ``--driver`` says."""
    return pytest.mark.parametrize("driver", names, indirect=True)


PSYCOPG2, PSYCOPG = on("psycopg2"), on("psycopg")
"""For a test of what only one of them has."""

EACH = on("psycopg2", "psycopg")
"""For a test of what passes through the driver's file: also the second one is then in every run."""


def with_driver(url: Any, driver: str) -> Any:
    """A URL for SQLAlchemy; one that names a driver we know has another one from now on."""
    if isinstance(url, URL):  # as text it would hide its password
        return url.set(drivername=f"postgresql+{driver}") if url.drivername in KNOWN else url
    scheme, colon, rest = str(url).partition(":")
    return f"postgresql+{driver}:{rest}" if colon and scheme in KNOWN else url


def connect(url: str, driver: str) -> Any:
    """A connection of the driver itself, to a URL for SQLAlchemy."""
    return {"psycopg2": psycopg2, "psycopg": psycopg}[driver].connect(plain_dsn(url))


def own_cursor(connection: Any) -> Any:
    """A cursor of the driver's own class, past whatever hears the statements of its connection."""
    if isinstance(connection, psycopg.Connection):
        return psycopg.Cursor(connection, row_factory=psycopg.rows.tuple_row)
    return psycopg2.extensions.cursor(connection)
