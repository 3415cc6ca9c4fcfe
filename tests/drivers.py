"""The drivers for PostgreSQL that a test runs on: one file for each stands in the room ``drivers``."""

from __future__ import annotations

from collections.abc import Mapping
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


def ways(
    name: str,
    both: Mapping[str, Any],
    psycopg2: Mapping[str, Any] | None = None,
    psycopg: Mapping[str, Any] | None = None,
) -> pytest.MarkDecorator:
    """For a test of each way to do something on each driver: those that both have, and its own."""
    own = {"psycopg2": psycopg2 or {}, "psycopg": psycopg or {}}
    found = {
        f"{driver}-{way}": (driver, do) for driver in own for way, do in {**both, **own[driver]}.items()
    }
    return pytest.mark.parametrize(("driver", name), found.values(), ids=found, indirect=["driver"])


def each_unless_named(metafunc: pytest.Metafunc) -> None:
    """For a room whose tests run on each driver, unless they name one."""
    named = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "driver" in metafunc.fixturenames and not any("driver" in names for names in named):
        metafunc.parametrize("driver", EACH.args[1], indirect=True)


def with_driver(url: Any, driver: str) -> Any:
    """A URL for SQLAlchemy; one that names a driver we know has another one from now on."""
    if isinstance(url, URL):  # as text it would hide its password
        return url.set(drivername=f"postgresql+{driver}") if url.drivername in KNOWN else url
    scheme, colon, rest = str(url).partition(":")
    return f"postgresql+{driver}:{rest}" if colon and scheme in KNOWN else url


def connect(url: str, driver: str, **options: Any) -> Any:
    """A connection of the driver itself, to a URL for SQLAlchemy."""
    return {"psycopg2": psycopg2, "psycopg": psycopg}[driver].connect(plain_dsn(url), **options)


def own_cursor(connection: Any) -> Any:
    """A cursor of the driver's own class, past whatever hears the statements of its connection."""
    if isinstance(connection, psycopg.Connection):
        return psycopg.Cursor(connection, row_factory=psycopg.rows.tuple_row)
    return psycopg2.extensions.cursor(connection)


def has_own_cursors(connection: Any) -> bool:
    """Whether a connection makes the driver's own cursors, not ours and no application's."""
    made = {connection.cursor_factory, getattr(connection, "server_cursor_factory", None)}
    return made <= {None, psycopg.Cursor, psycopg.ServerCursor}
