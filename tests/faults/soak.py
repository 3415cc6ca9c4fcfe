"""A run: real servers and workers, clients that retry until they know, a nemesis, then the truth."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import psutil

from tests.faults import truth
from tests.faults.checker import Quota, missing
from tests.faults.history import History, Journal, load
from tests.faults.machines import Machines, Plan
from tests.faults.nemesis import harass
from tests.faults.points import TROUBLE

SCOPES = ("alice", "bob")
LONGEST_VIEW_SECONDS = 1.3  # longer than IDEMPOTENCY_PROBE_AFTER, which is one second
GIVE_UP_SECONDS = 12.0
ANSWER_SECONDS = 60.0  # longer than a worker takes to start, or given up requests would still come
WELL_SECONDS = 60.0
MOST_TIMES_AS_LONG = 8  # as planned; a busy machine needs longer to be hit as often


@dataclass(frozen=True)
class Task:
    """A client's errand: get a definite answer, then ask ``again`` times."""

    scope: str
    key: str
    body: int
    again: int


@dataclass
class Soak:
    """A run's servers and what its clients share."""

    plan: Plan
    urls: list[str]
    journal: Journal

    def __post_init__(self) -> None:
        self.faulty, self.over = threading.Event(), threading.Event()
        self.faulty.set()
        self._numbers = itertools.count(1)
        self._on_their_way: set[int] = set()
        self._tasks = self._make_tasks(random.Random(f"{self.plan.seed} tasks"))
        self._lock = threading.Lock()

    def _make_tasks(self, rng: random.Random) -> Iterator[Task]:
        """Each key in both scopes with equal bodies, duplicates side by side; old keys now and then."""
        for number in itertools.count():
            key = f"key-{number}"
            for scope in SCOPES:
                for _ in range(rng.randint(1, self.plan.most_duplicates)):
                    yield Task(scope, key, 0, rng.randint(0, 2))
                if rng.random() < self.plan.changed_share:
                    yield Task(scope, key, 1, 0)  # a changed body under the same key
            if number and rng.random() < 0.7:
                yield Task(rng.choice(SCOPES), f"key-{rng.randrange(number)}", 0, 0)

    def client(self, number: int) -> None:
        """Errands until the run is over; the last one is seen through."""
        rng = random.Random(f"{self.plan.seed} client {number}")
        while not self.over.is_set():
            with self._lock:
                task = next(self._tasks)
            self._pursue(task, rng)
            for _ in range(task.again):
                self._ask(task, rng)

    def _pursue(self, task: Task, rng: random.Random) -> None:
        pause, gives_up = 0.04, None
        while not self._ask(task, rng):
            if self.over.is_set():
                gives_up = gives_up or time.monotonic() + GIVE_UP_SECONDS
                if time.monotonic() > gives_up:
                    return
            time.sleep(rng.uniform(0.5, 1.0) * pause)
            pause = min(0.25, 1.6 * pause)

    def _ask(self, task: Task, rng: random.Random) -> bool:
        """One request; whether its answer is definite."""
        plan, number = self.plan, next(self._numbers)
        fault, sleep = "", rng.choice((0, 0, 2, 10, 20))
        if self.faulty.is_set():
            lot = rng.random()
            if lot < plan.kill_share and plan.points:
                fault = rng.choice(plan.points)
            elif lot > 1 - plan.trouble_share:
                fault = rng.choice(TROUBLE)
            lot = rng.random()
            if lot < plan.slow_share:
                sleep = int(LONGEST_VIEW_SECONDS * 1000)
            elif lot < 0.25:
                sleep = rng.randint(20, 300)
        headers = {
            "Idempotency-Key": task.key,
            "X-User": task.scope,
            "X-Fault": fault,
            "X-Sleep": str(sleep),
            "Content-Type": "application/json",
        }
        asked = {"scope": task.scope, "key": task.key, "body": task.body, "fault": fault}
        if fault:
            self._on_their_way.add(number)
        self.journal.note("invoke", id=number, **asked)
        got = send(rng.choice(self.urls), headers, json.dumps({"body": task.body}).encode())
        self.journal.note("return", id=number, **got)
        self._on_their_way.discard(number)
        return got["status"] in (201, 402, 422)

    def wait_until_well(self, gunicorns: list[psutil.Process]) -> None:
        """Until no request is on its way that would kill its worker, and every worker answers.

        On a busy machine a worker needs seconds to start, and requests wait for it before any code of
        ours sees them. That must not count as time in which a key was blocked.
        """
        deadline = time.monotonic() + WELL_SECONDS
        answered: set[int] = set()
        while self._on_their_way or any(_pids(master) - answered for master in gunicorns):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not every worker answered within {WELL_SECONDS} s")
            for url in self.urls:
                with contextlib.suppress(OSError, ValueError):
                    answered.add(int(urlopen(url, timeout=ANSWER_SECONDS).read()))  # noqa: S310 -- ours
            time.sleep(0.01)


def _pids(master: psutil.Process) -> set[int]:
    return {worker.pid for worker in master.children()} or {0}


def send(url: str, headers: dict[str, str], body: bytes) -> dict[str, Any]:
    """One request on a connection of its own; what came back, for the journal."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=ANSWER_SECONDS)
    try:
        connection.request("POST", "/payments", body, headers)
        response = connection.getresponse()
        answer = response.read()
    except (OSError, http.client.HTTPException):
        return {"status": None}
    finally:
        connection.close()
    said = json.loads(answer) if response.status == 201 else {}
    return {
        "status": response.status,
        "answer": truth.digest(answer),
        "execution": said.get("execution", ""),
        "replayed": response.headers.get("Idempotent-Replayed") == "true",
    }


def run(
    plan: Plan, path: Path, machines: Machines, quota: Quota | None = None
) -> tuple[History, truth.Truth]:
    """Run a plan, its journal in ``path``: what was seen, and what the servers hold at the end.

    With a ``quota`` the faults go on until it is filled, for ``MOST_TIMES_AS_LONG`` at most.
    """
    with machines.serve(plan, path) as (world, urls), contextlib.closing(Journal(path)) as journal:
        soak, stop = Soak(plan, urls, journal), threading.Event()
        rng = random.Random(f"{plan.seed} nemesis")
        with ThreadPoolExecutor(plan.clients + 1) as pool:
            work = [pool.submit(soak.client, number) for number in range(plan.clients)]
            given = (world, journal, plan.faults, rng, plan.pause_seconds, stop)
            nemesis = pool.submit(harass, *given)
            try:
                harassing = plan.seconds - plan.calm_seconds
                give_up = time.monotonic() + MOST_TIMES_AS_LONG * harassing
                time.sleep(harassing)
                while quota and missing(load(path), quota) and time.monotonic() < give_up:
                    time.sleep(1)
                soak.faulty.clear()
                stop.set()
                nemesis.result()
                soak.wait_until_well(world.gunicorns)
                journal.note("healed")
                time.sleep(plan.calm_seconds)
                journal.note("ended")
            finally:
                soak.faulty.clear()
                stop.set()
                soak.over.set()
            for each in work:
                each.result()
        history = load(path)
        return history, truth.read(world, plan.design, history)
