"""Redis in several processes: a master and its replicas under Sentinels, or a cluster."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

import servers
from scale.patroni import wait_until
from scale.programs import program
from scale.topology import Topology
from servers.process import Setting

SERVICE = "service"
SENTINELS, REPLICAS, QUORUM = 3, 2, 2
DOWN_MILLISECONDS = 2000  # of silence, until a Sentinel believes that a server is down
FAILOVER_MILLISECONDS = 5000  # Sentinels wait twice as long until they try again
MASTERS = 3  # of a cluster, each with one replica
CLUSTER_MILLISECONDS = 2000  # cluster-node-timeout; the default is 15 s
BUS = 10_000  # from the port of a node to that for other nodes
SLOTS = 2000  # moved at once, of 16384

SENTINEL_FAULTS = ("master killed", "master paused")
CLUSTER_FAULTS = ("node killed", "node paused", "slots moved")


class Node(servers.Redis):
    """A Redis that belongs to others, all with one password."""

    def __init__(self, password: str, port: int | None = None, **settings: Setting) -> None:
        super().__init__(settings={"masterauth": password, **settings}, port=port)
        self._program = Path(program("redis-server"))
        self.password = password

    def ask(self, *command: object) -> Any:
        """What it answers to a command, as Redis sends it. Raises ``RedisError``."""
        client: Any = redis.Redis(
            port=self.port,
            password=self.password or None,
            socket_timeout=2,
            protocol=2,
            decode_responses=True,
            retry=Retry(NoBackoff(), 0),
        )
        with contextlib.closing(client):
            return client.execute_command(*command)

    @property
    def replication(self) -> dict[str, Any]:
        """Its role, and what it says of its master or of its replicas."""
        return dict(self.ask("INFO", "replication"))


class Sentinel(Node):
    """Redis in its other role. It has no password: the library's URL has none for Sentinels."""

    kind = "sentinel"

    def __init__(self, master: Node) -> None:
        super().__init__("", requirepass="")
        del self.settings["masterauth"]
        # A setting's value is quoted, so that it is one word.
        self.settings |= {
            f"sentinel monitor {SERVICE} 127.0.0.1 {master.port}": QUORUM,
            f"sentinel auth-pass {SERVICE}": master.password,
            f"sentinel down-after-milliseconds {SERVICE}": DOWN_MILLISECONDS,
            f"sentinel failover-timeout {SERVICE}": FAILOVER_MILLISECONDS,
        }

    def _command(self) -> list[str]:
        return [*super()._command(), "--sentinel"]

    @property
    def service(self) -> dict[str, str]:
        """What it knows of the master."""
        said = self.ask("SENTINEL", "MASTER", SERVICE)
        return dict(zip(said[::2], said[1::2], strict=True))


@dataclass
class Watched:
    """A master and its replicas, and the Sentinels that watch them."""

    nodes: Sequence[Node]
    sentinels: Sequence[Sentinel]

    def master(self) -> Node:
        """The master that the Sentinels agree on; waits until they do."""
        [found] = wait_until(self._masters, "master of the Sentinels")
        return found

    def _masters(self) -> list[Node]:
        """The master, or nothing if not all name it, or if it is no master yet."""
        with contextlib.suppress(redis.RedisError):
            ports = {int(each.service["port"]) for each in self.sentinels}
            found = [each for each in self.nodes if {each.port} == ports]
            return [each for each in found if each.replication["role"] == "master"]
        return []

    def _is_whole(self) -> bool:
        """Whether all Sentinels see one master, two replicas that follow it, and each other."""
        try:
            if not self._masters():
                return False
            seen = [each.service for each in self.sentinels]
            states = [each.replication for each in self.nodes]
        except redis.RedisError:
            return False
        counts = {(each["num-other-sentinels"], each["num-slaves"]) for each in seen}
        following = [each for each in states if each.get("master_link_status") == "up"]
        return (
            {each["flags"] for each in seen} == {"master"}
            and counts == {(str(SENTINELS - 1), str(REPLICAS))}
            and len(following) == REPLICAS
        )

    def wait_until_whole(self) -> None:
        """Until the others follow the master, and the Sentinels agree."""
        wait_until(self._is_whole, "whole group of Sentinels")

    def wait_for_other(self, than: Node) -> None:
        """Until another node is the master."""
        wait_until(lambda: than not in (self._masters() or [than]), "other master")

    def faults(self) -> dict[str, Callable[[], None]]:
        """What can happen to the master."""
        return _faults(SENTINEL_FAULTS, self.master, self.wait_for_other, self.wait_until_whole)

    def url(self) -> str:
        """For the extension."""
        hosts = ",".join(f"127.0.0.1:{each.port}" for each in self.sentinels)
        return f"redis+sentinel://:{self.nodes[0].password}@{hosts}/{SERVICE}/0"


def _faults(
    names: Sequence[str],
    choose: Callable[[], Node],
    wait_for_other: Callable[[Node], None],
    wait_until_whole: Callable[[], None],
) -> dict[str, Callable[[], None]]:
    """Kill or pause the node of the moment until another has taken over."""

    def killed() -> None:
        node = choose()
        node.kill()
        wait_for_other(node)
        node.start()
        wait_until_whole()

    def paused() -> None:
        node = choose()
        node.pause()
        wait_for_other(node)
        node.resume()
        wait_until_whole()

    return dict(zip(names, (killed, paused), strict=True))


@contextlib.contextmanager
def watched() -> Iterator[Watched]:
    """Run a master, two replicas and three Sentinels until the block ends."""
    password = secrets.token_urlsafe(12)
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(Node(password)) for _ in range(1 + REPLICAS)]
        # At run time: after kill -9 each begins as a master, as its file says in production as well
        # (a Sentinel has it rewritten), and is told by the Sentinels whom to follow.
        for replica in nodes[1:]:
            replica.ask("REPLICAOF", "127.0.0.1", nodes[0].port)
        sentinels = [stack.enter_context(Sentinel(nodes[0])) for _ in range(SENTINELS)]
        found = Watched(nodes, sentinels)
        found.wait_until_whole()
        yield found


class ClusterNode(Node):
    """A node of a cluster."""

    kind = "cluster-node"

    def __init__(self, password: str) -> None:
        # Nodes speak to each other on another one, not among those that the kernel gives away.
        ports = iter(servers.free_port, None)
        port = next(each for each in ports if each + BUS < 32000)
        settings: dict[str, Setting] = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": CLUSTER_MILLISECONDS,
        }
        super().__init__(password, port, **settings)

    @property
    def nodes(self) -> list[Seen]:
        """The cluster as it sees it."""
        return [_seen(line) for line in self.ask("CLUSTER", "NODES").splitlines()]

    @property
    def is_ok(self) -> bool:
        """Whether it serves, as far as it knows: all slots have a node."""
        return "cluster_state:ok" in self.ask("CLUSTER", "INFO")


@dataclass(frozen=True)
class Seen:
    """A node of a cluster, as one of them sees it."""

    name: str
    port: int
    role: str  # its flags, such as "master", "slave" or "master,fail"
    slots: tuple[str, ...]  # "0-5460"; "[93->-…" is on its way
    is_linked: bool

    @property
    def size(self) -> int:
        """How many slots it has."""
        ends = [each.partition("-") for each in self.slots if not each.startswith("[")]
        return sum(int(last or first) - int(first) + 1 for first, _, last in ends)

    @property
    def is_well(self) -> bool:
        """Whether it is what it should be, with no slot on its way."""
        moves = any(each.startswith("[") for each in self.slots)
        return self.role in ("master", "slave") and self.is_linked and not moves


def _seen(line: str) -> Seen:
    name, where, flags, _master, _ping, _pong, _epoch, link, *slots = line.split()
    role = flags.removeprefix("myself,")
    return Seen(
        name, int(where.partition("@")[0].rpartition(":")[2]), role, tuple(slots), link == "connected"
    )


@dataclass
class Cluster:
    """Masters that share the slots, each with a replica."""

    nodes: Sequence[ClusterNode]

    def _masters(self) -> list[Seen]:
        """Those that have slots, the one with most first."""
        seen = [each for each in self.nodes[0].nodes if each.size]
        return sorted(seen, key=lambda each: each.size, reverse=True)

    def master(self) -> ClusterNode:
        """The one with most slots."""
        port = self._masters()[0].port
        return next(each for each in self.nodes if each.port == port)

    def _is_whole(self) -> bool:
        """Whether all nodes have the same picture, and there is nothing wrong with it."""
        try:
            pictures = [each.nodes for each in self.nodes]
            states = [each.replication for each in self.nodes]
            serving = all(each.is_ok for each in self.nodes)
        except redis.RedisError:
            return False
        told = {frozenset((each.name, each.role, each.slots) for each in seen) for seen in pictures}
        following = [each for each in states if each.get("master_link_status") == "up"]
        return (
            serving
            and len(told) == 1
            and all(len(seen) == len(self.nodes) for seen in pictures)
            and all(each.is_well for seen in pictures for each in seen)
            and len(following) == len(self.nodes) - MASTERS
        )

    def wait_until_whole(self) -> None:
        """Until all nodes agree, every slot is served, and each replica follows."""
        wait_until(self._is_whole, "whole cluster of Redis")

    def wait_for_other(self, than: Node) -> None:
        """Until the slots of a node are served by another."""
        others = [each for each in self.nodes if each is not than]

        def served() -> bool:
            with contextlib.suppress(redis.RedisError):
                sizes = [seen.size for each in others for seen in each.nodes if seen.port == than.port]
                return not any(sizes) and all(each.is_ok for each in others)
            return False

        wait_until(served, "other node with its slots")

    def create(self) -> None:
        """Share the slots out, and give each master its replica."""
        where = [f"127.0.0.1:{each.port}" for each in self.nodes]
        self._order("create", *where, "--cluster-replicas", "1")
        self.wait_until_whole()

    def move_slots(self) -> None:
        """Move slots, with the keys in them, from the node with most to the one with fewest."""
        masters = self._masters()
        ends = "--cluster-from", masters[0].name, "--cluster-to", masters[-1].name
        some = f"127.0.0.1:{self.nodes[0].port}"
        self._order("reshard", some, *ends, "--cluster-slots", str(SLOTS))
        self.wait_until_whole()

    def _order(self, what: str, *how: str) -> None:
        """Let ``redis-cli`` do it, as an operator does. Raises with what it said if it cannot."""
        command = [program("redis-cli"), "--cluster", what, *how, "--cluster-yes"]
        environment = {**os.environ, "REDISCLI_AUTH": self.nodes[0].password}
        done = subprocess.run(
            command, capture_output=True, check=False, text=True, timeout=120, env=environment
        )
        if done.returncode:
            raise servers.Unavailable(f"redis-cli {what}: {done.stdout[-2000:]}{done.stderr[-500:]}")

    def faults(self) -> dict[str, Callable[[], None]]:
        """What can happen to a node, and to the slots."""
        *ends, moved = CLUSTER_FAULTS
        found = _faults(ends, self.master, self.wait_for_other, self.wait_until_whole)
        return {**found, moved: self.move_slots}

    def url(self) -> str:
        """For the extension."""
        hosts = ",".join(f"127.0.0.1:{each.port}" for each in self.nodes)
        return f"redis+cluster://:{self.nodes[0].password}@{hosts}"


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Run three masters and three replicas until the block ends."""
    password = secrets.token_urlsafe(12)
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(ClusterNode(password)) for _ in range(2 * MASTERS)]
        found = Cluster(nodes)
        found.create()
        yield found


@contextlib.contextmanager
def behind_sentinels() -> Iterator[Topology]:
    """One PostgreSQL, and a Redis that Sentinels watch."""
    with servers.Postgres() as database, watched() as found:
        yield Topology(database.url, found.url(), lambda: database.url, found.faults())


@contextlib.contextmanager
def on_a_cluster() -> Iterator[Topology]:
    """One PostgreSQL, and a cluster of Redis."""
    with servers.Postgres() as database, cluster() as found:
        yield Topology(database.url, found.url(), lambda: database.url, found.faults())
