"""PostgreSQL under Patroni: etcd and three nodes, each behind cables that can be cut."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import URLError
from urllib.request import Request, urlopen

import psutil
import psycopg2

from scale.programs import Program, program
from servers import FaultProxy, free_port
from servers.find import postgres_major

LEASE_SECONDS = 20  # Patroni's ttl: the least that it takes; its default is 30
LOOP_SECONDS = 2  # its default is 10
RETRY_SECONDS = 5  # its default is 10
PATIENCE_SECONDS = 90.0
PASSWORD = "scale"  # of a throwaway server on 127.0.0.1
T = TypeVar("T")
SUPERUSER, DATABASE = "postgres", "postgres"


class Etcd(Program):
    """Who leads, as Patroni's nodes have agreed."""

    kind = "etcd"

    def _command(self) -> list[str]:
        own, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{free_port()}"
        given = {
            "data-dir": "etcd",
            "listen-client-urls": own,
            "advertise-client-urls": own,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            "enable-v2": "true",  # what Debian's Patroni 3.0 does with v3 loses the synchronous standby
            "log-level": "error",
        }
        return [program("etcd"), *(f"--{name}={value}" for name, value in given.items())]


class Node(Program):
    """Patroni with its PostgreSQL. Other nodes reach it, and it reaches etcd, by cables of its own."""

    kind = "patroni"

    def __init__(self, name: str, etcd: FaultProxy, *, synchronous: bool, lease: int) -> None:
        super().__init__(timeout=60)
        self.name, self.synchronous, self.lease = name, synchronous, lease
        self.rest = free_port()
        replication = FaultProxy(f"postgresql://127.0.0.1:{self.port}")
        # Nobody is elected while a node that is ahead, the one that led, still answers the others.
        self.cables = (etcd, replication, FaultProxy(f"http://127.0.0.1:{self.rest}"))

    def _configuration(self) -> str:
        user = {"username": SUPERUSER, "password": PASSWORD}
        etcd, replication, rest = (f"127.0.0.1:{cable.port}" for cable in self.cables)
        return json.dumps(  # JSON is YAML
            {
                "scope": "shop",
                "name": self.name,
                "restapi": {
                    "listen": f"127.0.0.1:{self.rest}",
                    "connect_address": rest,
                },
                # As a proxy: else Patroni goes to the address that etcd names, past the cable.
                "etcd": {"hosts": [etcd], "use_proxies": True},
                "bootstrap": {
                    "dcs": {
                        "ttl": self.lease,
                        "loop_wait": LOOP_SECONDS,
                        "retry_timeout": RETRY_SECONDS,
                        "synchronous_mode": self.synchronous,
                        "postgresql": {
                            "use_pg_rewind": True,
                            "parameters": {"max_connections": 200, "wal_log_hints": "on"},
                        },
                    },
                    "initdb": [{"encoding": "UTF8"}, {"locale": "C"}],
                },
                "postgresql": {
                    "listen": f"127.0.0.1:{self.port}",
                    "connect_address": replication,
                    "data_dir": "postgresql",
                    "bin_dir": str(_postgresql()),
                    "pgpass": "pgpass",
                    # What an operator would do with a node that cannot follow any more.
                    "remove_data_directory_on_rewind_failure": True,
                    "remove_data_directory_on_diverged_timelines": True,
                    "authentication": {"superuser": user, "replication": user, "rewind": user},
                    "parameters": {"unix_socket_directories": str(self.data)},
                    "pg_hba": [
                        "local all all trust",
                        "host all all 127.0.0.1/32 scram-sha-256",
                        "host replication all 127.0.0.1/32 scram-sha-256",
                    ],
                },
            },
            indent=1,
        )

    def _command(self) -> list[str]:
        return [program("patroni"), str(self.config)]

    def _ping(self) -> bool:
        return self.told("liveness")[0] == 200

    def told(self, what: str) -> tuple[int, dict[str, Any]]:
        """What Patroni says of itself; 0 if it does not answer."""
        try:
            with urlopen(f"http://127.0.0.1:{self.rest}/{what}", timeout=2) as answer:
                text = answer.read()
                return answer.status, json.loads(text) if text else {}
        except URLError as error:
            return getattr(error, "code", 0) or 0, {}
        except (OSError, ValueError):
            return 0, {}

    def order(self, what: str, how: dict[str, Any]) -> None:
        """Ask Patroni to do something. What it refuses, it has refused."""
        where = f"http://127.0.0.1:{self.rest}/{what}"
        wish = Request(where, json.dumps(how).encode(), {"Content-Type": "application/json"})
        with contextlib.suppress(URLError):
            urlopen(wish, timeout=60).read()  # noqa: S310

    @property
    def leads(self) -> bool:
        return self.told("leader")[0] == 200

    @property
    def is_ready(self) -> bool:
        """Whether it leads, or follows without having to catch up."""
        status, said = self.told("patroni")
        running = status == 200 and said.get("state") in ("running", "streaming")
        return running and (said.get("role") in ("master", "primary") or self.follows())

    def follows(self) -> bool:
        """Whether it receives what the leader writes."""
        with contextlib.suppress(psycopg2.Error):
            return bool(
                rows(self.port, "SELECT 1 FROM pg_stat_wal_receiver WHERE status = 'streaming'")
            )
        return False

    def note_family(self) -> None:
        """Let the watchdog know PostgreSQL, too: it is no child of Patroni."""
        self._watchdog.note(process.pid for process in self._family())

    def _family(self) -> list[psutil.Process]:
        """Patroni, and PostgreSQL, which is no child of it."""
        with contextlib.suppress(OSError, ValueError, IndexError, psutil.NoSuchProcess):
            lines = (self.data / "postgresql" / "postmaster.pid").read_text().splitlines()
            postmaster = psutil.Process(int(lines[0]))
            if postmaster.name().startswith("postgres"):
                return [*super()._family(), postmaster, *postmaster.children(recursive=True)]
        return super()._family()


def _postgresql() -> Path:
    """The newest installed one: Patroni's own Python speaks to it."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=postgres_major)
    return found[-1]


def rows(port: int, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """What a statement gives, on a connection of its own."""
    connection = psycopg2.connect(
        host="127.0.0.1",
        port=port,
        user=SUPERUSER,
        password=PASSWORD,
        dbname=DATABASE,
        connect_timeout=3,
        options="-c statement_timeout=5s",
    )
    with contextlib.closing(connection):
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(statement, values or None)
            return list(cursor.fetchall()) if cursor.description else []


@dataclass
class Cluster:
    """Three nodes, and what can happen to the one that leads."""

    etcd: Etcd
    nodes: list[Node]

    def leader(self) -> Node:
        """The node that leads; waits until there is one."""
        [leader] = wait_until(lambda: [each for each in self.nodes if each.leads][:1], "leader")
        return leader

    def wait_for_other(self, than: Node) -> None:
        """Until another node leads."""
        others = [each for each in self.nodes if each is not than]
        wait_until(lambda: any(each.leads for each in others), "other leader")

    def _leaders(self) -> int:
        return sum(each.leads for each in self.nodes)

    def wait_until_whole(self) -> None:
        """Until one node leads and the others follow it."""

        def whole() -> bool:
            for each in self.nodes:
                if each.told("patroni")[1].get("state") == "start failed":
                    each.order("reinitialize", {"force": True})
            well = [each.is_ready for each in self.nodes]
            synchronous = sum(each.told("sync")[0] == 200 for each in self.nodes)
            is_synchronous = self.nodes[0].synchronous
            return all(well) and self._leaders() == 1 and synchronous == is_synchronous

        try:
            wait_until(whole, "whole cluster")
        except TimeoutError as error:
            states = [f"{each.name} {each.told('patroni')}\n{each.log[-1500:]}" for each in self.nodes]
            raise TimeoutError("\n".join([str(error), *states])) from None
        for each in self.nodes:
            each.note_family()

    def switch_over(self) -> None:
        """Let another node lead, as an operator does it."""
        leader = self.leader()
        leader.order("switchover", {"leader": leader.name})

    def url(self) -> str:
        """For SQLAlchemy and either driver: all nodes, of which libpq takes the one that leads."""
        hosts = "&".join(f"host=127.0.0.1:{each.port}" for each in self.nodes)
        return (
            f"postgresql+psycopg2://{SUPERUSER}:{PASSWORD}@/{DATABASE}?{hosts}"
            "&target_session_attrs=read-write"
        )


@contextlib.contextmanager
def cluster(*, synchronous: bool, lease: int = LEASE_SECONDS) -> Iterator[Cluster]:
    """Run etcd and three nodes until the block ends."""
    with contextlib.ExitStack() as stack:
        etcd = stack.enter_context(Etcd())
        nodes = []
        for number in range(3):
            cable = FaultProxy(f"http://127.0.0.1:{etcd.port}")
            node = Node(f"node{number}", cable, synchronous=synchronous, lease=lease)
            stack.callback(node.close)
            for each in node.cables:
                stack.enter_context(each)
            nodes.append(node.start())
        found = Cluster(etcd, nodes)
        found.wait_until_whole()
        yield found


def wait_until(ask: Callable[[], T], what: str, seconds: float = PATIENCE_SECONDS) -> T:
    """What it gives once it is true."""
    ends = time.monotonic() + seconds
    while True:
        if found := ask():
            return found
        if time.monotonic() > ends:
            raise TimeoutError(f"no {what} within {seconds:.0f} s")
        time.sleep(0.05)
