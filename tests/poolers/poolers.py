"""Poolers in front of a database: PgBouncer, and Pgpool-II."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import servers

SERVER_CONNECTIONS = 3
"""Of PgBouncer: fewer than the clients, so each transaction may run on another of them."""

CLIENTS = 30
"""Connections that Pgpool-II takes, each with one of its own to the server."""


def program(name: str) -> str:
    """A pooler's program."""
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    found = shutil.which(os.environ.get(name.upper(), name), path=places)
    if found is None:
        pytest.fail(f"There is no {name}: install it, or name the program in {name.upper()}.", False)
    return found


@contextmanager
def _running(command: Sequence[str], folder: Path, port: int, **identity: Any) -> Iterator[None]:
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, **identity)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline, f"{command[0]} does not answer"
                time.sleep(0.02)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
        shutil.rmtree(folder)


@contextmanager
def pgbouncer(url: sa.URL, mode: str = "transaction") -> Iterator[int]:
    """PgBouncer in front of a database; its port."""
    port = servers.free_port()
    folder = Path(tempfile.mkdtemp(prefix="throwaway-pgbouncer-"))
    ini, users = folder / "pgbouncer.ini", folder / "users.txt"
    users.touch(mode=0o600)
    users.write_text(f'"{url.username}" "{url.password}"\n')
    ini.write_text(
        f"[databases]\n{url.database} = host={url.host} port={url.port}\n[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
        f"auth_type = scram-sha-256\nauth_file = {users}\npool_mode = {mode}\n"
        f"default_pool_size = {SERVER_CONNECTIONS}\nmax_client_conn = 100\n"
        "log_connections = 0\nlog_disconnections = 0\n"
    )
    identity: dict[str, Any] = {}
    if os.geteuid() == 0:  # it refuses to run as root
        nobody = pwd.getpwnam("nobody")
        identity = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        for path in (folder, ini, users):
            os.chown(path, nobody.pw_uid, nobody.pw_gid)
    with _running([program("pgbouncer"), "-q", str(ini)], folder, port, **identity):
        yield port


@contextmanager
def pgpool(url: sa.URL) -> Iterator[int]:
    """Pgpool-II in front of one server; its port."""
    port, control = servers.free_port(), servers.free_port()
    folder = Path(tempfile.mkdtemp(prefix="throwaway-pgpool-"))
    passwords, clients, conf = folder / "passwords", folder / "pool_hba.conf", folder / "pgpool.conf"
    passwords.touch(mode=0o600)
    passwords.write_text(f"{url.username}:TEXT{url.password}\n")
    clients.write_text("host all all 127.0.0.1/32 trust\n")
    settings = {
        "backend_clustering_mode": "raw",
        "backend_hostname0": url.host,
        "backend_port0": url.port,
        "backend_flag0": "DISALLOW_TO_FAILOVER",  # else it gives its only server up for ever
        "listen_addresses": "127.0.0.1",
        "port": port,
        "pcp_listen_addresses": "127.0.0.1",
        "pcp_port": control,
        **dict.fromkeys(("socket_dir", "pcp_socket_dir", "wd_ipc_socket_dir", "logdir"), folder),
        "pid_file_name": folder / "pid",
        "num_init_children": CLIENTS,
        "max_pool": 1,
        "enable_pool_hba": "on",
        "pool_passwd": passwords,
        "load_balance_mode": "off",
    }
    conf.write_text("".join(f"{name} = '{value}'\n" for name, value in settings.items()))
    command = [program("pgpool"), "-n", "-f", str(conf), "-a", str(clients)]
    with _running(command, folder, port):
        yield port


POOLERS = {"pgbouncer": pgbouncer, "pgpool": pgpool}
