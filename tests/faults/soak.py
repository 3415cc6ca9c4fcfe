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
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

import servers
import tests.sessions
from laboratory import running
from tests.faults.app import POINTS, TROUBLE, create_tables
from tests.faults.checker import missing
from tests.faults.history import History, Journal, Truth, digest, endpoint_of, load, read
from tests.faults.nemesis import FAULTS, World, flush, harass
from tests.integration.apps import gunicorn_conf

COOPERATIVE = {"COOPERATIVE": "yes", "PRELOAD": "no"}
"""Lets greenlets change places while psycopg2 waits; see ``gunicorn_conf``. The application is loaded
after gevent's patches: what a request asks for (``app.py``) is then its greenlet's own."""

KINDS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "sync": ((), {}),
    "gthread": (("--threads", "3"), {}),
    "gevent": (("--config", gunicorn_conf.__file__), COOPERATIVE),
}
"""Kinds of workers, their arguments and environment. All serve the same keys.

Flask-SQLAlchemy-Lite 0.2.1 closes its asynchronous sessions in an event loop at the end of a context,
and the loops of two greenlets are in one another's way: it runs without gevent.
"""

SCOPES = ("alice", "bob")
CLIENTS, WORKERS = 12, 6
EVENT_SHARE = 0.3  # of the keys: handled by run(), half of them leased
LONGEST_VIEW_SECONDS = 1.3  # longer than a lock in Redis is trusted, which is one second
GIVE_UP_SECONDS, WELL_SECONDS = 12.0, 60.0
MOST_TIMES_AS_LONG = 16  # as planned; a busy machine needs longer to be hit as often


@dataclass(frozen=True)
class Plan:
    """What a run is made of. A share is one of the requests (``changed_share``: of the keys).

    ``kill_share`` asks to die at a point, ``trouble_share`` for a view that raises or declines,
    ``slow_share`` for one that takes longer than the probe age.
    ``wait`` is IDEMPOTENCY_WAIT: with it, duplicates wait in Postgres and not before it.
    """

    seconds: float = 60.0
    seed: int = 1
    design: str = ""
    faults: tuple[str, ...] = tuple(FAULTS)
    points: tuple[str, ...] = tuple(POINTS)
    kill_share: float = 0.15
    slow_share: float = 0.03
    trouble_share: float = 0.03
    changed_share: float = 0.15
    pause_seconds: float = 0.7
    wait: float = 0.0

    def quota(self, points: int = 1, faults: int = 1) -> dict[str, int]:
        """How often each point and each fault must have been hit."""
        return {**dict.fromkeys(self.points, points), **dict.fromkeys(self.faults, faults)}


class Machines(ExitStack):
    """A PostgreSQL and a Redis of our own, for one run or several, each on a database of its own."""

    def __enter__(self) -> Machines:
        # A crash should lose what was not flushed: claims are committed asynchronously.
        lazy: dict[str, servers.process.Setting] = {"max_connections": 100, "wal_writer_delay": "10s"}
        self.postgres = self.enter_context(servers.Postgres(fsync=False, settings=lazy))
        self.redis = self.enter_context(servers.Redis())
        self._numbers = itertools.count(1)
        return self

    @contextlib.contextmanager
    def serve(self, plan: Plan, path: Path) -> Iterator[tuple[World, list[str]]]:
        """The application under gunicorn, once for each kind of worker."""
        database = self.postgres.database(f"faults_{next(self._numbers)}")
        create_tables(database)
        with ExitStack() as stack:
            proxy = stack.enter_context(servers.FaultProxy(database))
            environment = {
                "DATABASE_URL": proxy.url,
                "REDIS_URL": self.redis.url,
                "FAULTS_DESIGN": plan.design,
                "FAULTS_SESSIONS": tests.sessions.usual,
                "FAULTS_JOURNAL": str(path),
                "FAULTS_WAIT": str(plan.wait),
            }
            world = World(self.postgres, self.redis, proxy, servers.plain_dsn(database), [])
            urls = []
            kinds = {k: KINDS[k] for k in KINDS if (tests.sessions.usual, k) != ("lite", "gevent")}
            for kind, (more, variables) in kinds.items():
                count = str(WORKERS // len(kinds))
                how = f"--worker-class {kind} --workers {count} --log-level critical".split()
                given = {**environment, **variables}
                gunicorn = running.gunicorn("tests.faults.app:create_app()", given, *how, *more)
                url, process = stack.enter_context(gunicorn)
                urls.append(url)
                world.gunicorns.append(psutil.Process(process.pid))
            world.heal()
            flush(world)
            try:
                yield world, urls
            finally:  # a clean end would take seconds, and shows nothing
                for master in world.gunicorns:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        master.suspend()  # so that no new worker comes
                        for each in (*master.children(), master):
                            each.kill()


class Task(NamedTuple):
    """A client's errand: get a definite answer, then ask ``again`` times."""

    scope: str
    key: str
    body: int
    again: int


class Soak:
    """What the clients of a run share."""

    def __init__(self, plan: Plan, urls: list[str], journal: Journal) -> None:
        self.plan, self.urls, self.journal = plan, urls, journal
        self.faulty, self.over = threading.Event(), threading.Event()
        self.faulty.set()
        self._numbers = itertools.count(1)
        self._on_their_way: set[int] = set()
        self._tasks = self._make_tasks(random.Random(f"{plan.seed} tasks"))
        self._lock = threading.Lock()

    def _make_tasks(self, rng: random.Random) -> Iterator[Task]:
        """Each key in both scopes with equal bodies, duplicates side by side; old keys now and then."""
        keys: list[str] = []
        while True:
            is_event = rng.random() < EVENT_SHARE
            keys.append(f"{rng.choice(('atomic', 'leased')) if is_event else 'key'}-{len(keys)}")
            for scope in SCOPES:
                for _ in range(rng.randint(1, 3)):
                    yield Task(scope, keys[-1], 0, rng.randint(0, 2))
                if rng.random() < self.plan.changed_share:
                    yield Task(scope, keys[-1], 1, 0)  # a changed body under the same key
            if rng.random() < 0.7:
                yield Task(rng.choice(SCOPES), rng.choice(keys), 0, 0)

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
        """Ask until the answer is definite, or the run has long been over."""
        pause, gives_up = 0.04, float("inf")
        while not self._ask(task, rng) and time.monotonic() < gives_up:
            if self.over.is_set():
                gives_up = min(gives_up, time.monotonic() + GIVE_UP_SECONDS)
            time.sleep(rng.uniform(0.5, 1.0) * pause)
            pause = min(0.25, 1.6 * pause)

    def _fault_and_sleep(self, rng: random.Random) -> tuple[str, int]:
        """What is to go wrong in a request, and how many milliseconds its view takes."""
        plan, fault, sleep = self.plan, "", rng.choice((0, 0, 2, 10, 20))
        if self.faulty.is_set():
            lot, slow = rng.random(), rng.random()
            if lot < plan.kill_share and plan.points:
                fault = rng.choice(plan.points)
            elif lot > 1 - plan.trouble_share:
                fault = rng.choice(TROUBLE)
            if slow < 0.25:
                sleep = rng.randint(20, 300)
            if slow < plan.slow_share:
                sleep = int(LONGEST_VIEW_SECONDS * 1000)
        return fault, sleep

    def _ask(self, task: Task, rng: random.Random) -> bool:
        """One request; whether its answer is definite."""
        number = next(self._numbers)
        fault, sleep = self._fault_and_sleep(rng)
        headers = {
            "Idempotency-Key": task.key,
            "X-User": task.scope,
            "X-Fault": fault,
            "X-Sleep": str(sleep),
            "Content-Type": "application/json",
        }
        if fault:
            self._on_their_way.add(number)
        began = time.monotonic()
        path, body = f"/{endpoint_of(task.key)}", json.dumps({"body": task.body})
        name = {"scope": task.scope, "key": task.key, "body": task.body}
        got: dict[str, Any] = {"status": None}
        with contextlib.suppress(OSError, http.client.HTTPException):
            reply = running.send(rng.choice(self.urls), "POST", path, headers, body)
            if "Content-Length" in reply.headers:  # else cut in the headers: nothing else tells it
                made = json.loads(reply.body) if reply.status == 201 else {}
                got = {"status": reply.status, "answer": digest(reply.body.encode())}
                got["replayed"] = "Idempotent-Replayed" in reply.headers
                got["execution"] = made.get("execution", "")
        self.journal.note("request", at=began, returned=time.monotonic(), **name, **got)
        self._on_their_way.discard(number)
        return got["status"] in (201, 402, 422)

    def wait_until_well(self, gunicorns: list[psutil.Process]) -> None:
        """Until no request is on its way that would kill its worker, and every worker answers.

        A busy machine needs seconds to start one: no time in which a key was blocked.
        """
        answered, deadline = set[int](), time.monotonic() + WELL_SECONDS
        pids = [{0}]
        while self._on_their_way or not set().union(*pids) <= answered:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not every worker answered within {WELL_SECONDS} s")
            for url in self.urls:
                with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
                    answered.add(int(running.send(url, "GET", "/", {}).body))
            pids = [{worker.pid for worker in master.children()} or {0} for master in gunicorns]


def run(
    plan: Plan, path: Path, machines: Machines, quota: dict[str, int] | None = None
) -> tuple[History, Truth]:
    """Run a plan, its journal in ``path``: what was seen, and what the database holds at the end.

    With a ``quota`` the faults go on until it is filled, for ``MOST_TIMES_AS_LONG`` at most.
    """
    with machines.serve(plan, path) as (world, urls), contextlib.closing(Journal(path)) as journal:
        soak, stop = Soak(plan, urls, journal), threading.Event()
        rng = random.Random(f"{plan.seed} nemesis")
        with ThreadPoolExecutor(CLIENTS + 1) as pool:
            work = [pool.submit(soak.client, number) for number in range(CLIENTS)]
            given = (world, journal, plan.faults, rng, plan.pause_seconds, stop)
            nemesis = pool.submit(harass, *given)
            try:
                calm_seconds = min(5.0, 0.3 * plan.seconds)
                harassing = plan.seconds - calm_seconds
                give_up = time.monotonic() + MOST_TIMES_AS_LONG * harassing
                time.sleep(harassing)
                while quota and missing(load(path), quota) and time.monotonic() < give_up:
                    time.sleep(1)
                soak.faulty.clear()
                stop.set()
                nemesis.result()
                soak.wait_until_well(world.gunicorns)
                journal.note("healed")
                time.sleep(calm_seconds)
                journal.note("ended")
            finally:
                soak.faulty.clear()
                stop.set()
                soak.over.set()
            for each in work:
                each.result()
        history = load(path)
        return history, read(world.dsn, history)
