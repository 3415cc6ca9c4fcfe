"""One run: the same measurement for every contender, in turns, on the same servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import servers
from bench.network import Network
from bench.report import write_both
from bench.times import WARM_UP, Turns

from . import environments
from .crashes import EXPERIMENTS, QUICK, WAITING, Outcome
from .process import Died, Place, Places, Running
from .result import BASE, HASTY, Result, data, markdown
from .table import CONTENDERS, PACKAGES, Contender

BLOCKS = 20
"""Every contender has so many turns, each of a twentieth of the rounds."""

COLD = 2
"""So many rounds of each turn do not count: the others have had the caches."""

TRIES = 5
"""So many requests are watched for round trips."""

TOGETHER = 12
"""So many experiments that wait run at once."""


Ask = Callable[..., list[list[float]]]


def compare(packages: Iterable[str], rounds: int, folder: Path) -> str:
    """Measure ours and the packages, all if none is named: Markdown, and peers.json in the folder."""
    comparison = Comparison(packages, rounds, folder)
    comparison.run()
    found = comparison.results, comparison.versions, comparison.notes
    write_both(folder, "peers", markdown(*found), data(*found))
    return markdown(*found)


class Comparison:
    """The contenders of some packages, ours always among them.

    Attributes:
        results: by contender.
        versions: what is installed for each package.
        notes: what a reader needs to know beside the figures.
    """

    def __init__(self, packages: Iterable[str], rounds: int, folder: Path) -> None:
        chosen = {"ours", *packages} if packages else set(PACKAGES)
        self._contenders = {n: each for n, each in CONTENDERS.items() if each.package in chosen}
        self._rounds = rounds
        self._logs = folder / "peers"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._pythons: dict[str, Path] = {}
        self.results = {name: Result(each.package) for name, each in self._contenders.items()}
        self.versions: dict[str, dict[str, str]] = {}
        self.notes: list[str] = []

    def run(self) -> None:
        """Measure everything; what cannot be installed or started says why in its result."""
        self._install()
        settings = {"autovacuum": "off", "max_connections": 400}
        with (
            servers.Postgres(settings=settings) as postgres,
            servers.Postgres(fsync=False, settings=settings) as hasty,
            servers.Redis(settings={"databases": 200}) as redis_server,
        ):
            self._places = Places(postgres, redis_server)
            self._time({path: path for path in BASE}, self._places)
            self._time({HASTY: "first"}, Places(hasty, redis_server))
            load, processors = os.getloadavg()[0], os.cpu_count()
            self.notes.append(f"{load:.1f} programs wanted the {processors} processors")
            self._count()
            self._crash()
        self.versions = {name: environments.versions(each) for name, each in self._pythons.items()}

    def _install(self) -> None:
        for name, contender in self._contenders.items():
            package = contender.package
            try:
                python = environments.python(package, PACKAGES[package].requirements)
            except environments.NotInstalled as error:
                self.results[name].error = str(error)
            else:
                self._pythons[package] = python

    def _running(self) -> dict[str, Contender]:
        return {n: each for n, each in self._contenders.items() if not self.results[n].error}

    def _start(self, name: str, place: Place, *arguments: str) -> Running:
        contender = self._contenders[name]
        log = self._logs / f"{place.database}.log"
        return Running(self._pythons[contender.package], contender, place, log, *arguments)

    def _time(self, paths: dict[str, str], places: Places) -> None:
        """Time paths, by the names of their figures, in turns with their bases and with the others."""
        with ExitStack() as stack:
            workers = {}
            for name in self._running():
                place = places.new()
                try:
                    worker = stack.enter_context(self._start(name, place))
                    timed = self._prepare(self.results[name], worker, paths)
                except Died as error:
                    self.results[name].error = str(error)
                else:
                    workers[name] = timed, partial(worker.ask, pids=places.serving(place))
            for _ in range(BLOCKS):
                for name, (timed, ask) in workers.items():
                    self._block(self.results[name], timed, ask)

    def _prepare(self, result: Result, worker: Running, paths: dict[str, str]) -> dict[str, str]:
        """Warm up the paths that work: these; and note what becomes of the others."""
        for figure, path in paths.items():
            statuses = worker.ask("check", path=path)
            wrong = {status: n for status, n in statuses.items() if status != "201"}
            if wrong:
                of = sum(statuses.values())
                result.refused[figure] = ", ".join(f"{n} of {of}: {s}" for s, n in wrong.items())
            else:
                result.turns[figure], result.clock[figure] = Turns(), Turns()
                worker.ask("measure", path=path, base=BASE[path], rounds=WARM_UP, pids=[])
        return {figure: path for figure, path in paths.items() if figure in result.turns}

    def _block(self, result: Result, paths: dict[str, str], ask: Ask) -> None:
        rounds = max(self._rounds // BLOCKS, 1)
        for figure, path in paths.items():
            turns, by_clock = result.turns[figure], result.clock[figure]
            taken = ask("measure", path=path, base=BASE[path], rounds=rounds + COLD)[COLD:]
            for clock, without_waits, base_clock, base in taken:
                turns.path.append(without_waits)
                turns.base.append(base)
                by_clock.path.append(clock)
                by_clock.base.append(base_clock)

    def _count(self) -> None:
        for name in self._running():
            result = self.results[name]
            bases = {path: base for path, base in BASE.items() if path in result.turns}
            paths = [*bases, *bases.values()]
            place = self._places.new()
            with (
                Network(place.database_url, place.redis_url) as network,
                self._start(name, place.through(network), "--calls") as worker,
            ):
                calls = worker.ask("calls", paths=paths)
                trips = {path: _round_trips(network, worker, path) for path in paths}
            for path, base in bases.items():
                result.calls[path] = calls[path] - calls[base]
                result.trips[path] = [a - b for a, b in zip(trips[path], trips[base], strict=True)]

    def _crash(self) -> None:
        crashing = [name for name, contender in self._running().items() if contender.crash]
        for experiments, together in ((QUICK, 1), (WAITING, TOGETHER)):
            with ThreadPoolExecutor(together) as pool:
                jobs = {
                    (name, what): pool.submit(self._experiment, name, what)
                    for what in experiments
                    for name in crashing
                }
            for (name, what), job in jobs.items():
                self.results[name].outcomes[what] = job.result()

    def _experiment(self, name: str, what: str) -> Outcome:
        place = self._places.new()
        try:
            return EXPERIMENTS[what](partial(self._start, name, place), place)
        except Died as error:
            return Outcome(0, f"the process ended: {error}")


def _round_trips(network: Network, worker: Running, path: str) -> list[int]:
    """Those of one request to each server: the fewest seen, as some packages poll meanwhile."""
    counts = []
    for _ in range(TRIES):
        before = network.round_trips()
        worker.ask("go", path=path)
        counts.append([b - a for a, b in zip(before, network.round_trips(), strict=True)])
    return [min(each) for each in zip(*counts, strict=True)]
