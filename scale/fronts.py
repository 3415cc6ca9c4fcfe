"""Rows about what stands in front of one database: a proxy that sends twice, clocks, two releases."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import servers
from laboratory.running import ROOT, send
from scale.masters import Master, worker_killed
from scale.nginx import NGINX
from scale.programs import program
from scale.topology import Topology
from servers import FaultProxy

WORKER_KILLED = ("worker killed",)
NGINX_FAULTS = ("master killed", "slow database", "rolling restart")
SHIFTS_SECONDS = (300, 900)  # none below zero: a machine may have run for less
SMALL = "scale.small_shop:create_app()"
RELEASE = Path("build/scale/release").absolute()
RELEASE_SECONDS = 2 * 24 * 60 * 60
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


@contextlib.contextmanager
def apart_in_time() -> Iterator[Topology]:
    """Three masters, the clocks of two of which differ from the machine's by minutes.

    Time namespaces shift CLOCK_MONOTONIC and CLOCK_BOOTTIME only, never CLOCK_REALTIME: all three
    agree on the time of day. What this tries is that nobody compares seconds of two masters.
    """
    masters = [Master(), *(Master(before=shifted(each)) for each in SHIFTS_SECONDS)]
    with plain(masters) as topology:
        topology.counts = lambda: {
            "masters with clocks of their own": sum(
                Path(f"/proc/{each.pid}/ns/time").readlink() != Path("/proc/self/ns/time").readlink()
                for each in masters
            )
        }
        yield topology


def shifted(seconds: int) -> tuple[str, ...]:
    """The words that give a command clocks of its own."""
    user = () if os.geteuid() == 0 else ("--user", "--map-current-user")
    clocks = ("--time", "--monotonic", str(seconds), "--boottime", str(seconds))
    return (program("unshare"), *user, *clocks)


@contextlib.contextmanager
def two_releases() -> Iterator[Topology]:
    """Two masters of one shop, one with the package as it was two days before, on one table."""
    release = archived()
    masters = [Master(SMALL), Master(SMALL, arguments=("--pythonpath", str(release)))]
    with plain(masters) as topology:
        topology.counts = lambda: {
            "masters of the older release": sum(
                json.loads(send(each.url, "GET", "/", {}).body)["release"] == str(release)
                for each in masters
            )
        }
        yield topology


def archived() -> Path:
    """Where the package lies as it was two days before the present commit."""

    def git(*words: str) -> bytes:
        return subprocess.run(
            [program("git"), *words], cwd=ROOT, check=True, capture_output=True
        ).stdout

    try:
        now = int(git("log", "-1", "--format=%ct"))
        before = f"--before={now - RELEASE_SECONDS}"
        commit = git("log", "-1", "--first-parent", "--format=%H", before).decode().strip()
        archive = git("archive", commit, "flask_idempotency")
    except (OSError, subprocess.CalledProcessError) as error:
        raise servers.Unavailable(f"the history has no older release: {error}") from None
    RELEASE.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(RELEASE / "flask_idempotency", ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        # Python 3.10.12 and 3.11.4 brought the filter (PEP 706); Debian 12 has 3.11.2.
        packed.extraction_filter = getattr(tarfile, "data_filter", None)
        packed.extractall(RELEASE)  # noqa: S202
    return RELEASE


@contextlib.contextmanager
def plain(masters: Sequence[Master]) -> Iterator[Topology]:
    """One database, and workers that die."""
    settings = {"max_connections": 200}
    with servers.Postgres(settings=settings) as postgres, servers.Redis() as redis:
        faults = dict(zip(WORKER_KILLED, (worker_killed(masters),), strict=True))
        yield Topology(postgres.url, redis.url, lambda: postgres.url, faults, masters=list(masters))
