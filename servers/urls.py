"""The two spellings of a PostgreSQL URL: SQLAlchemy's, which names the driver, and psycopg2's."""

from __future__ import annotations

from sqlalchemy.engine import make_url

from servers.errors import Unavailable

driver = "psycopg2"
"""SQLAlchemy's name of the driver in the URLs that are made from now on."""


def sqlalchemy_url(url: str, *, database: str | None = None) -> str:
    """``postgres://…`` or ``postgresql://…`` with the driver named: ``postgresql+psycopg2://…``.

    Without a name SQLAlchemy 2.1 would take psycopg 3.

    Args:
        url: any of the spellings.
        database: the database to name instead of the URL's.

    Raises:
        Unavailable: it is no PostgreSQL URL; the message does not show it, nor its password.
    """
    parsed = make_url(url)
    if parsed.drivername.partition("+")[0] not in ("postgres", "postgresql"):
        raise Unavailable(f"PostgreSQL is needed, but the URL begins with {parsed.drivername}://")
    parsed = parsed.set(drivername=f"postgresql+{driver}", database=database or parsed.database)
    return parsed.render_as_string(hide_password=False)


def plain_dsn(url: str) -> str:
    """The URL for psycopg2 itself, which knows only ``postgresql://…``."""
    return sqlalchemy_url(url).replace(f"postgresql+{driver}", "postgresql", 1)
