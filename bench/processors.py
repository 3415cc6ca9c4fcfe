"""How long processes wait for a processor that others have.

On a busy machine that is most of a request's time, and the more the more processes the request needs:
a view with a database waits, an empty one hardly does. Linux counts it for each thread, so it can be
taken off. Other systems do not count it: there the bench needs a quiet machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

import servers

if TYPE_CHECKING:
    from typing_extensions import Self


class Queue:
    """What all threads of this process, and of the processes ``pids``, have waited for so far."""

    def __init__(self, pids: Iterable[int]) -> None:
        files: list[Path] = []
        for pid in (os.getpid(), *pids):
            files += Path(f"/proc/{pid}/task").glob("*/schedstat")
        self._files = [os.open(file, os.O_RDONLY) for file in files if file.exists()]

    def seconds(self) -> float:
        """The sum; 0 on a system that does not count."""
        # The kernel's Documentation/scheduler/sched-stats: time run, time waited, in nanoseconds.
        return sum(int(os.pread(file, 100, 0).split()[1]) for file in self._files) / 1e9

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            os.close(file)


def serving(redis: servers.Redis, *databases: servers.Postgres) -> list[int]:
    """The processes that work for clients now: one for each connection to PostgreSQL, and Redis."""
    return [*backends(*databases), *filter(None, [redis.pid])]


def backends(*databases: servers.Postgres) -> list[int]:
    """The processes that work for clients of PostgreSQL now."""
    children = [child for each in databases for child in psutil.Process(each.pid).children()]
    # Not those that write in the background: no request waits for them.
    return [child.pid for child in children if "127.0.0.1(" in _command(child)]


def worked(pids: Iterable[int]) -> float:
    """Seconds of processor time that processes have had so far; 0 on a system that does not count."""
    files = [Path(f"/proc/{pid}/schedstat") for pid in pids]
    return sum(int(file.read_text().split()[0]) for file in files if file.exists()) / 1e9


def _command(process: psutil.Process) -> str:
    """How a process was started; empty for one that has just ended."""
    try:
        return "".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def wanted() -> str:
    """How busy the machine is, in words; the system's average of the last minute."""
    return f"{os.getloadavg()[0]:.1f} programs wanted the {os.cpu_count()} processors"
