"""A throwaway PostgreSQL server."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import psycopg2
from psycopg2 import sql

from servers.errors import Unavailable
from servers.find import find_postgres
from servers.process import Server, Setting
from servers.urls import sqlalchemy_url

_FIRST_DATABASE = "app"


class Postgres(Server):
    """A cluster of its own with one empty database, ``app``."""

    kind = "postgres"
    stop_signal = signal.SIGINT  # "fast": does not wait for clients to leave

    def __init__(
        self,
        *,
        fsync: bool = True,
        settings: Mapping[str, Setting] | None = None,
        port: int | None = None,
        timeout: float = 30.0,
    ) -> None:
        self._bin = find_postgres()
        self._fsync = "on" if fsync else "off"
        super().__init__(settings=settings, port=port, timeout=timeout)

    @property
    def url(self) -> str:
        """The first database for SQLAlchemy: ``postgresql+psycopg2://…``."""
        return sqlalchemy_url(self.dsn)

    @property
    def dsn(self) -> str:
        """The first database for psycopg2 itself: ``postgresql://…``."""
        return f"postgresql://postgres:{self.password}@127.0.0.1:{self.port}/{_FIRST_DATABASE}"

    def database(self, name: str) -> str:
        """Make a fresh empty database; an older one of that name is dropped, its clients cut off.

        Returns:
            Its URL for SQLAlchemy; ``servers.plain_dsn`` turns it into psycopg2's.
        """
        make_database(self.dsn, name, copy_files=self._fsync == "off")
        return sqlalchemy_url(self.dsn, database=name)

    def _prepare(self) -> None:
        if (self.data / "PG_VERSION").exists():
            return
        tree = self._bin.parent
        needs = [tree]
        # A wheel's programs look for their libraries in ../../../PACKAGE.libs.
        libraries = tree.parent.with_name(tree.parent.name + ".libs")
        if libraries.is_dir():
            needs.append(libraries)
        copies = self.folder / "programs"
        self._bin = self._account.reachable(self._bin / "postgres", needs, copies).parent
        self._make_cluster()

    def _make_cluster(self) -> None:
        secret = self.folder / "password"  # a file: arguments show in `ps`
        secret.touch(mode=0o600)
        secret.write_text(self.password)
        self._account.own(secret)
        command: list[str | Path] = [self._bin / "initdb", "-D", self.data, "-U", "postgres"]
        # SCRAM hashes 4096 times to protect weak passwords, at each connect; ours is long and random.
        command += ["-A", "md5", f"--pwfile={secret}", "--no-sync"]
        command += ["-E", "UTF8", "--locale=C"]  # C: the wheels are built without ICU
        done = self._account.run(command, self.folder)
        secret.unlink()
        if done.returncode:
            raise Unavailable(f"initdb failed: {done.stderr.strip() or done.stdout.strip()}")

    def _command(self) -> list[str]:
        # Never synchronous_commit=off here: a kill -9 would lose committed rows.
        settings: dict[str, Setting] = {
            "listen_addresses": "127.0.0.1",
            "fsync": self._fsync,
            "full_page_writes": self._fsync,
            # Files in the data folder: a kill -9 leaves nothing in /dev/shm.
            "dynamic_shared_memory_type": "mmap",
            "shared_buffers": "32MB",
            "log_timezone": "UTC",
            "timezone": "UTC",
            **self.settings,
        }
        command = [str(self._bin / "postgres"), "-D", str(self.data), "-p", str(self.port)]
        command += ["-k", str(self.data)]
        for key, value in settings.items():
            command += ["-c", f"{key}={value}"]
        return command

    def _ping(self) -> bool:
        where = f"host={self.data}&port={self.port}"
        local = f"postgresql://postgres:{self.password}@/postgres?{where}"
        try:
            if self._was_ready:
                psycopg2.connect(local, connect_timeout=2).close()
            else:
                make_database(local, _FIRST_DATABASE)
        except psycopg2.OperationalError:
            return False
        return True

    def _clear_traces(self) -> None:
        """A kill -9 leaves a System V segment of 56 bytes; postmaster.pid names it in line 7."""
        # As the account: it may have written any segment there, or a link to any file.
        script = "ipcrm -m $(sed -n '7s/.* //p' postmaster.pid)"
        with contextlib.suppress(OSError):
            self._account.run(["/bin/sh", "-c", script], self.data)


def make_database(dsn: str, name: str, *, copy_files: bool = False) -> None:
    """Drop the database if it is there, with its clients' connections, and make it anew.

    ``copy_files`` takes a quarter of the time on a server that flushes nothing.
    """
    with _administrator(dsn) as connection:
        _run(connection, _DROP, name)
        # Before 15 there was no other way, and no word for it.
        by_files = copy_files and connection.server_version >= 150000
        _run(connection, f"{_CREATE} STRATEGY file_copy" if by_files else _CREATE, name)


def drop_database(dsn: str, name: str) -> None:
    """Drop the database if it is there, with its clients' connections."""
    with _administrator(dsn) as connection:
        _run(connection, _DROP, name)


_DROP = "DROP DATABASE IF EXISTS {} WITH (FORCE)"
_CREATE = "CREATE DATABASE {} TEMPLATE template0"


@contextlib.contextmanager
def _administrator(dsn: str) -> Iterator[psycopg2.extensions.connection]:
    connection = psycopg2.connect(dsn, connect_timeout=2)
    try:
        connection.autocommit = True  # none of this may run in a transaction
        yield connection
    finally:
        connection.close()


def _run(connection: psycopg2.extensions.connection, statement: str, name: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql.SQL(statement).format(sql.Identifier(name)))
