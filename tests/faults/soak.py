"""A run: real servers and workers, clients that retry until they know, a nemesis, then the truth."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
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
LONGEST_VIEW_SECONDS = 1.3  # longer than a lock in Redis is trusted, which is one second
GIVE_UP_SECONDS = 12.0
ANSWER_SECONDS = 60.0  # longer than a worker takes to start, or given up requests would still come
WELL_SECONDS = 60.0
MOST_TIMES_AS_LONG = 16  # as planned; a busy machine needs longer to be hit as often


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
        self._delivered: list[int] = []
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
            if rng.random() < self.plan.event_share:
                events = self._make_events(rng)
                self._pursue(events, rng)
                self._deliver(events, rng)
                continue
            with self._lock:
                task = next(self._tasks)
            self._pursue([task], rng)
            for _ in range(task.again):
                self._ask(task, rng)

    def _make_events(self, rng: random.Random) -> list[Task]:
        """Three events of one delivery; now and then one that another delivery has brought before."""
        numbers = [next(self._numbers) for _ in range(3)]
        if rng.random() < 0.5:
            numbers[0] = rng.choice(self._delivered or numbers)
        self._delivered = [*self._delivered[-9:], numbers[1]]
        return [Task(rng.choice(SCOPES), f"{self._kind(n)}-{n}", 0, 0) for n in numbers]

    @staticmethod
    def _kind(number: int) -> str:
        return "leased" if number % 2 else "atomic"

    def _pursue(self, tasks: list[Task], rng: random.Random) -> None:
        """Ask until every answer is definite, or the run has long been over."""
        pause, gives_up = 0.04, None
        while tasks := self._ask_for(tasks, rng):
            if self.over.is_set():
                gives_up = gives_up or time.monotonic() + GIVE_UP_SECONDS
                if time.monotonic() > gives_up:
                    return
            time.sleep(rng.uniform(0.5, 1.0) * pause)
            pause = min(0.25, 1.6 * pause)

    def _ask_for(self, tasks: list[Task], rng: random.Random) -> list[Task]:
        """One request for all of them; those whose answer is not definite."""
        if tasks[0].key.startswith("key"):
            return [] if self._ask(tasks[0], rng) else tasks
        return self._deliver(tasks, rng)

    def _deliver(self, events: list[Task], rng: random.Random) -> list[Task]:
        """Deliver events in one request; those whose answer is not definite."""
        numbers = {next(self._numbers): event for event in events}
        fault, sleep = self._fault_and_sleep(rng, ())
        if fault:
            self._on_their_way |= numbers.keys()
        for number, event in numbers.items():
            asked = {"scope": event.scope, "key": event.key, "body": event.body, "fault": fault}
            self.journal.note("invoke", id=number, **asked)
        headers = {"X-Fault": fault, "X-Sleep": str(sleep), "Content-Type": "application/json"}
        body = json.dumps([vars(event) for event in events]).encode()
        status, answer, _ = send(rng.choice(self.urls) + "/events", headers, body)
        results = json.loads(answer) if status == 200 else [{"status": status}] * len(events)
        for number, got in zip(numbers, results, strict=True):
            facts = {
                "status": got["status"],
                "answer": truth.digest(got.get("answer", "").encode()),
                "execution": got.get("execution", ""),
                "replayed": got.get("replayed", False),
            }
            self.journal.note("return", id=number, **facts)
        self._on_their_way -= numbers.keys()
        return [
            event
            for event, got in zip(events, results, strict=True)
            if got["status"] not in (201, 402, 422)
        ]

    def _fault_and_sleep(self, rng: random.Random, trouble: Sequence[str]) -> tuple[str, int]:
        """What is to go wrong in a request, and how many milliseconds its view takes."""
        plan, fault, sleep = self.plan, "", rng.choice((0, 0, 2, 10, 20))
        if self.faulty.is_set():
            lot = rng.random()
            if lot < plan.kill_share and plan.points:
                fault = rng.choice(plan.points)
            elif trouble and lot > 1 - plan.trouble_share:
                fault = rng.choice(trouble)
            lot = rng.random()
            if lot < plan.slow_share:
                sleep = int(LONGEST_VIEW_SECONDS * 1000)
            elif lot < 0.25:
                sleep = rng.randint(20, 300)
        return fault, sleep

    def _ask(self, task: Task, rng: random.Random) -> bool:
        """One request; whether its answer is definite."""
        number = next(self._numbers)
        fault, sleep = self._fault_and_sleep(rng, TROUBLE)
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
        status, answer, replayed = send(
            rng.choice(self.urls) + "/payments", headers, json.dumps({"body": task.body}).encode()
        )
        execution = json.loads(answer).get("execution", "") if status == 201 else ""
        got = {"status": status, "answer": truth.digest(answer), "execution": execution}
        self.journal.note("return", id=number, replayed=replayed, **got)
        self._on_their_way.discard(number)
        return status in (201, 402, 422)

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


def send(url: str, headers: dict[str, str], body: bytes) -> tuple[int | None, bytes, bool]:
    """One request on a connection of its own: status (None: no whole answer), body, replayed."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.netloc, timeout=ANSWER_SECONDS)
    try:
        connection.request("POST", where.path, body, headers)
        response = connection.getresponse()
        answer = response.read()
        if (
            "Content-Length" not in response.headers
        ):  # cut in the headers: nothing tells it from a whole one
            return None, b"", False
    except (OSError, http.client.HTTPException):
        return None, b"", False
    finally:
        connection.close()
    return response.status, answer, response.headers.get("Idempotent-Replayed") == "true"


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
