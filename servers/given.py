"""Servers that the environment names: they can be used, not controlled."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, NoReturn

from servers.errors import NotControllable
from servers.postgresql import drop_database, make_database
from servers.urls import plain_dsn, sqlalchemy_url

if TYPE_CHECKING:
    from typing_extensions import Self


class _Given:
    """The face of :class:`servers.process.Server` without its powers."""

    kind: str
    controllable = False
    pid: None = None
    log = ""

    def __init__(self, url: str) -> None:
        self.url = url

    def start(self) -> Self:
        """It runs already."""
        return self

    def stop(self) -> None:
        """Not ours to stop: does nothing."""

    def close(self) -> None:
        """Nothing to remove."""

    def kill(self) -> NoReturn:
        """Raises :class:`NotControllable`."""
        self._refuse()

    def pause(self) -> NoReturn:
        """Raises :class:`NotControllable`."""
        self._refuse()

    def resume(self) -> NoReturn:
        """Raises :class:`NotControllable`."""
        self._refuse()

    def restart(self, *, crash: bool = False) -> NoReturn:  # noqa: ARG002 - Server's signature
        """Raises :class:`NotControllable`."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotControllable(
            f"the {self.kind} server comes from the environment; unset the variable to test faults"
        )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


class GivenPostgres(_Given):
    """The server of ``DATABASE_URL``, in any spelling of a PostgreSQL URL."""

    kind = "postgres"

    def __init__(self, url: str) -> None:
        super().__init__(sqlalchemy_url(url))
        self.dsn = plain_dsn(url)
        self._suffix = secrets.token_hex(4)
        self._made: set[str] = set()

    def database(self, name: str) -> str:
        """Make a fresh empty database, named ``name`` and a random suffix; ``close`` drops it.

        Returns:
            Its URL for SQLAlchemy; ``servers.plain_dsn`` turns it into psycopg2's.
        """
        full_name = f"{name}_{self._suffix}"  # somebody's real database may have the plain name
        make_database(self.dsn, full_name)
        self._made.add(full_name)
        return sqlalchemy_url(self.url, database=full_name)

    def close(self) -> None:
        """Drop the databases made here."""
        while self._made:
            drop_database(self.dsn, self._made.pop())


class GivenRedis(_Given):
    """The server of ``REDIS_URL``."""

    kind = "redis"
