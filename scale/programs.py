"""Installed programs as servers of our own: each in a throwaway folder, on 127.0.0.1, ended with us."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path

from servers.errors import Unavailable
from servers.process import Server

PACKAGES = {
    "patroni": "patroni",
    "etcd": "etcd-server",
    "haproxy": "haproxy",
    "pgbouncer": "pgbouncer",
    "pgpool": "pgpool2",
    "nginx": "nginx-light",
    "unshare": "util-linux",
    "git": "git",
}
"""The Debian package of each program."""

_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])


def program(name: str) -> str:
    """Where a program is; the environment variable of its name (``PGBOUNCER``) may say it."""
    found = shutil.which(os.environ.get(name.upper().replace("-", "_"), name), path=_PATH)
    if found is None:
        raise Unavailable(f"there is no {name}: apt-get install {PACKAGES[name]}")
    return found


def missing(names: Iterable[str]) -> list[str]:
    """The packages to install, so that all these programs are there."""
    return sorted(PACKAGES[name] for name in names if shutil.which(name, path=_PATH) is None)


class Program(Server):
    """A server that is ready when its port takes connections."""

    def _prepare(self) -> None:
        self._account.write(self.config, self._configuration())

    @property
    def config(self) -> Path:
        """Its configuration, written before each start."""
        return self.data / f"{self.kind}.conf"

    def _configuration(self) -> str:
        return ""

    def _ping(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True
