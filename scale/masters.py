"""gunicorn masters of the shop, each on an address that it keeps, and what can happen to them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import servers
from laboratory.running import gunicorn, wait_until_it_answers

LOGS = Path("build/scale/logs").absolute()
WORKERS = 2  # of each master
PATIENCE_SECONDS = 30.0


@dataclass(eq=False)
class Master:
    """A gunicorn master, not started yet.

    :param application: what it runs.
    :param own: its own part of the environment.
    :param arguments: more of them for gunicorn.
    :param before: words that stand before its command.
    """

    application: str = "example:create_app()"
    own: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    before: Sequence[str] = ()
    port: int = field(default_factory=servers.free_port)

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._running = contextlib.ExitStack()

    def start(self) -> None:
        """Start it on its port; returns when it answers."""
        LOGS.mkdir(parents=True, exist_ok=True)
        log = LOGS / f"{os.getpid()}-{self.port}.log"
        quiet = ("--error-logfile", str(log), "--capture-output", *self.arguments)
        environment = {"WEB_CONCURRENCY": str(WORKERS), **self.environment, **self.own}
        _url, self._process = self._running.enter_context(
            gunicorn(self.application, environment, *quiet, port=self.port, before=self.before)
        )

    def stop(self) -> None:
        """Send it SIGTERM; returns when its requests have finished."""
        self._running.close()

    def kill(self) -> None:
        """End it and its workers with kill -9."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._running.close()

    @property
    def pid(self) -> int | None:
        """Its process id, once it was started."""
        return self._process.pid if self._process else None

    def workers(self) -> list[psutil.Process]:
        """Those that live."""
        if self._process is None:
            return []
        children = psutil.Process(self._process.pid).children()
        return [each for each in children if each.status() != psutil.STATUS_ZOMBIE]

    def wait_until_whole(self) -> None:
        """Until it has all its workers and answers."""
        ends = time.monotonic() + PATIENCE_SECONDS
        while len(self.workers()) < WORKERS:
            if time.monotonic() > ends:
                raise TimeoutError(f"a master has {len(self.workers())} workers")
            time.sleep(0.05)
        wait_until_it_answers(self.url)


def worker_killed(masters: Sequence[Master]) -> Callable[[], None]:
    """One worker of any master dies of kill -9; its master makes another."""

    def happen() -> None:
        master = random.choice(masters)  # noqa: S311 -- no secret
        random.choice(master.workers()).kill()  # noqa: S311
        master.wait_until_whole()

    return happen
