"""PostgreSQL behind a pooler: PgBouncer, or Pgpool-II."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import psycopg2
import sqlalchemy as sa

import servers
from scale import load
from scale.masters import Master
from scale.patroni import wait_until
from scale.programs import Program, program
from scale.topology import Topology, ask
from servers.process import Server, Setting

FAULTS = ("pooler restarted", "server restarted")
SERVER_CONNECTIONS = 4  # of PgBouncer: a transaction may run on any of them
CLIENTS = 40  # of Pgpool-II, each with a connection of its own: the pools of the shop hold 32
PREPARED = 200  # statements that PgBouncer keeps for each connection, from 1.21 on
LIMITS = {"statement_timeout": "10s", "idle_in_transaction_session_timeout": "30s"}
"""The shop's own, set for the server: PgBouncer before 1.20 ignores a client's ``options`` at best."""


class Pooler(Program):
    """What stands between the shop and a database."""

    def __init__(self, url: sa.URL, **settings: Setting) -> None:
        super().__init__(settings=settings)
        self.behind = url

    @staticmethod
    def prepares() -> bool:
        """Whether a client may prepare statements."""
        return True

    def _prepare(self) -> None:
        for name, text in self._files().items():
            self._account.write(self.data / name, text)

    def _files(self) -> Mapping[str, str]:
        """The text of each of its files."""
        return {}


class PgBouncer(Pooler):
    """By transaction, with fewer connections than there are clients."""

    kind = "pgbouncer"

    @staticmethod
    def prepares() -> bool:
        """Whether a client may prepare statements: from 1.21 on."""
        said = subprocess.check_output([program("pgbouncer"), "--version"], text=True)
        [major, minor] = map(int, re.findall(r"\d+", said)[:2])
        return (major, minor) >= (1, 21)

    def _files(self) -> Mapping[str, str]:
        where = f"host={self.behind.host} port={self.behind.port}"
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "scram-sha-256",
            "auth_file": "users.txt",
            "pool_mode": "transaction",
            "default_pool_size": SERVER_CONNECTIONS,
            "ignore_startup_parameters": "options",
            "server_login_retry": 1,  # second; by default it refuses everybody for 15 after a failure
            **({"max_prepared_statements": PREPARED} if self.prepares() else {}),
            **self.settings,
        }
        lines = [f"{name} = {value}" for name, value in settings.items()]
        head = ["[databases]", f"{self.behind.database} = {where}", "[pgbouncer]"]
        return {
            "pgbouncer.ini": "\n".join([*head, *lines, ""]),
            "users.txt": f'"{self.behind.username}" "{self.behind.password}"\n',
        }

    def _command(self) -> list[str]:
        return [program("pgbouncer"), "pgbouncer.ini"]


class Pgpool(Pooler):
    """One server, in raw mode."""

    kind = "pgpool"

    def __init__(self, url: sa.URL, **settings: Setting) -> None:
        super().__init__(url, **settings)
        self.control = servers.free_port()

    def _files(self) -> Mapping[str, str]:
        settings = {
            "backend_clustering_mode": "raw",
            "backend_hostname0": self.behind.host,
            "backend_port0": self.behind.port,
            # Otherwise its only server counts as down until an operator attaches it again.
            "backend_flag0": "DISALLOW_TO_FAILOVER",
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "pcp_listen_addresses": "127.0.0.1",
            "pcp_port": self.control,
            **dict.fromkeys(("socket_dir", "pcp_socket_dir", "wd_ipc_socket_dir", "logdir"), self.data),
            "pid_file_name": self.data / "pid",
            "num_init_children": CLIENTS,
            "max_pool": 1,
            "enable_pool_hba": "on",
            "pool_passwd": self.data / "passwords",
            "load_balance_mode": "off",
            "memqcache_total_size": "1MB",  # of a cache that is off, and yet allocated: 64 MB
            **self.settings,
        }
        return {
            "pgpool.conf": "".join(f"{name} = '{value}'\n" for name, value in settings.items()),
            "passwords": f"{self.behind.username}:TEXT{self.behind.password}\n",
            "pool_hba.conf": "host all all 127.0.0.1/32 trust\n",
        }

    def _command(self) -> list[str]:
        return [program("pgpool"), "-n", "-f", "pgpool.conf", "-a", "pool_hba.conf"]

    def kill(self) -> None:
        """End it, and remove the shared memory and the semaphores that outlive a kill -9."""
        family = {str(each.pid) for each in self._family()}
        super().kill()
        memory = [each[1] for each in _system_v("shm") if each[4] in family]
        # Nobody says who made semaphores, but who has set each last.
        arrays = [each[1] for each in _system_v("sem")]
        semaphores = [each for each in arrays if family & {*self._said("ipcs", "-s", "-i", each)}]
        words = [*(f"-m{each}" for each in memory), *(f"-s{each}" for each in semaphores)]
        if words:
            self._said("ipcrm", *words)

    def _said(self, *command: str) -> list[str]:
        return self._account.run(command, self.data).stdout.split()


def _system_v(kind: str) -> list[list[str]]:
    """What the kernel keeps of a kind, without the headings."""
    lines = Path("/proc/sysvipc", kind).read_text().splitlines()
    return [line.split() for line in lines[1:]]


POOLERS: Mapping[str, type[Pooler]] = {"pgbouncer": PgBouncer, "pgpool": Pgpool}


def answers(url: sa.URL) -> bool:
    """Whether a database answers a statement."""
    try:
        ask(url.set(drivername="postgresql").render_as_string(hide_password=False), "SELECT 1")
    except psycopg2.Error:
        return False
    return True


def application(pooler: str, driver: str) -> str:
    """What gunicorn runs: psycopg 3 prepares its statements where the pooler knows them."""
    if driver == "psycopg2":
        return Master.application
    return f"scale.apps:with_psycopg(prepares={POOLERS[pooler].prepares()})"


def pooled(name: str, driver: str) -> Callable[[], AbstractContextManager[Topology]]:
    """One PostgreSQL behind a pooler, for one driver."""

    @contextlib.contextmanager
    def opened() -> Iterator[Topology]:
        with servers.Postgres(settings=LIMITS) as database, servers.Redis() as lock:
            truth = sa.make_url(database.url)
            # A request holds a connection, as its caller was looked up, while its claim needs another.
            settings = {"default_pool_size": load.CLIENTS + 1} if name == "pgbouncer" else {}
            with POOLERS[name](truth, **settings) as pooler:
                url = truth.set(drivername=f"postgresql+{driver}", port=pooler.port)

                def restarted(server: Server) -> Callable[[], None]:
                    def happen() -> None:
                        server.restart(crash=True)
                        wait_until(lambda: answers(url), "answer behind the pooler")

                    return happen

                faults = dict(zip(FAULTS, map(restarted, (pooler, database)), strict=True))
                yield Topology(
                    url.render_as_string(hide_password=False),
                    lock.url,
                    lambda: database.url,
                    faults,
                    masters=[Master(application(name, driver)) for _ in range(2)],
                )

    return opened
