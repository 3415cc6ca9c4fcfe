"""The rows of the table: each a topology and the faults that it is put through."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import servers
from scale import fronts, poolers
from scale.haproxy import HAProxy
from scale.patroni import DATABASE, PASSWORD, SUPERUSER, Cluster, cluster
from scale.topology import Topology

LEADER = (
    "leader killed",
    "leader paused",
    "switched over",
    "standby lags, leader killed",
    "leader parted",
)
"""What happens to the node of a cluster that leads."""

LONGER_SECONDS = 8  # than the lease: how long a paused leader stays away


@dataclass(frozen=True)
class Row:
    """Topology, and the programs that it needs."""

    name: str
    told: str
    programs: tuple[str, ...]
    faults: tuple[str, ...]
    open: Callable[[], AbstractContextManager[Topology]]


def patroni_faults(found: Cluster) -> dict[str, Callable[[], None]]:
    """What can happen to the leader of a cluster."""

    def killed() -> None:
        leader = found.leader()
        leader.kill()
        found.wait_for_other(leader)
        leader.start()

    def paused() -> None:
        leader = found.leader()
        leader.pause()
        found.wait_for_other(leader)
        time.sleep(LONGER_SECONDS)
        leader.resume()

    def lagging() -> None:
        """A standby receives nothing for a while; as soon as it is back, the leader is killed."""
        leader = found.leader()
        standby = next(each for each in found.nodes if each is not leader)
        standby.pause()
        time.sleep(LONGER_SECONDS)
        standby.resume()
        killed()

    def parted() -> None:
        """The leader loses etcd and the other nodes; its clients still reach it."""
        leader = found.leader()
        for cable in leader.cables:
            cable.cut()
            cable.hang()
        found.wait_for_other(leader)
        time.sleep(LONGER_SECONDS)
        for cable in leader.cables:
            cable.flow()
            cable.cut()

    each = dict(zip(LEADER, (killed, paused, found.switch_over, lagging, parted), strict=True))

    def until_whole(fault: Callable[[], None]) -> Callable[[], None]:
        def happen() -> None:
            fault()
            found.wait_until_whole()

        return happen

    return {name: until_whole(fault) for name, fault in each.items()}


def patroni(*, synchronous: bool, by_proxy: bool) -> Callable[[], AbstractContextManager[Topology]]:
    """Three nodes; behind HAProxy, or with a URL that names all of them."""

    @contextlib.contextmanager
    def opened() -> Iterator[Topology]:
        with cluster(synchronous=synchronous) as found, contextlib.ExitStack() as stack:
            lock = stack.enter_context(servers.Redis())

            def direct(port: int) -> str:
                return f"postgresql://{SUPERUSER}:{PASSWORD}@127.0.0.1:{port}/{DATABASE}"

            url = found.url()
            if by_proxy:
                url = direct(stack.enter_context(HAProxy(found.nodes)).port)
            yield Topology(url, lock.url, lambda: direct(found.leader().port), patroni_faults(found))

    return opened


ROWS = [
    Row(
        f"patroni-{'sync' if synchronous else 'async'}-{'haproxy' if by_proxy else 'hosts'}",
        f"Patroni, {'synchronous' if synchronous else 'asynchronous'},"
        f" {'HAProxy' if by_proxy else 'multi-host URL'}",
        ("patroni", "etcd", *(("haproxy",) if by_proxy else ())),
        LEADER,
        patroni(synchronous=synchronous, by_proxy=by_proxy),
    )
    for synchronous in (True, False)
    for by_proxy in (True, False)
]

ROWS += [
    Row(
        "nginx",
        "three masters behind nginx, which sends again",
        ("nginx",),
        fronts.NGINX_FAULTS,
        fronts.behind_nginx,
    ),
    Row(
        "clocks",
        "three masters, monotonic clocks minutes apart",
        ("unshare",),
        fronts.WORKER_KILLED,
        fronts.apart_in_time,
    ),
    Row(
        "two-releases",
        "two masters, one of a release two days older",
        ("git",),
        fronts.WORKER_KILLED,
        fronts.two_releases,
    ),
]

ROWS += [
    Row(
        f"{pooler}-{driver}",
        f"{told}, {driver}",
        (pooler,),
        poolers.FAULTS,
        poolers.pooled(pooler, driver),
    )
    for pooler, told in (("pgbouncer", "PgBouncer"), ("pgpool", "Pgpool-II"))
    for driver in ("psycopg2", "psycopg")
]
