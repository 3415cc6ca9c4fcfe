"""Rows about what stands in front of one database: a proxy that sends twice, clocks, two releases."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import servers
from scale.masters import Master
from scale.nginx import NGINX
from scale.topology import Topology
from servers import FaultProxy

NGINX_FAULTS = ("master killed", "slow database", "rolling restart")
SLOW_SECONDS = 8.0
DELAY_SECONDS = 0.15  # before each piece, both ways: several round trips take longer than nginx waits


@contextlib.contextmanager
def behind_nginx() -> Iterator[Topology]:
    """Three masters behind one nginx, and a proxy that can slow down their database."""
    masters = [Master() for _ in range(3)]
    with (
        servers.Postgres(settings={"max_connections": 200}) as postgres,
        servers.Redis() as redis,
        FaultProxy(postgres.url) as cable,
        NGINX(masters) as nginx,
    ):
        faults = nginx_faults(masters, cable)
        yield Topology(
            cable.url,
            redis.url,
            lambda: postgres.url,
            faults,
            urls=[nginx.url],
            masters=masters,
            counts=nginx.counts,
        )


def nginx_faults(masters: Sequence[Master], cable: FaultProxy) -> Mapping[str, Callable[[], None]]:
    """What can happen behind nginx."""

    def killed() -> None:
        master = random.choice(masters)  # noqa: S311 -- no secret
        master.kill()
        time.sleep(1)
        master.start()

    def slow() -> None:
        cable.delay = DELAY_SECONDS
        time.sleep(SLOW_SECONDS)
        cable.delay = 0
        for master in masters:
            master.wait_until_whole()

    def rolling() -> None:
        for master in masters:
            master.stop()
            master.start()

    return dict(zip(NGINX_FAULTS, (killed, slow, rolling), strict=True))
