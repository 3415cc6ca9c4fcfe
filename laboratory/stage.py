"""Everything that the stories are played on: servers, two shops under gunicorn, their card provider."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import servers
from laboratory.lanes import Lane
from laboratory.results import Result, play
from laboratory.running import CannotStart, gunicorn, make_tables
from laboratory.stories import MOST, Story
from servers.watchdog import Watchdog

OPERATOR_PASSWORD = "operator-demo-password"  # public because it is for the demo
NAMES = ("without", "with")


@dataclass
class Stage:
    """The two lanes, and what only one story at a time may break."""

    lanes: list[Lane]
    servers: Mapping[str, Any]
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def lane(self, name: str) -> Lane:
        return next(lane for lane in self.lanes if lane.name == name)

    def play(self, story: Story) -> tuple[list[Result], bool]:
        """Play a story in both lanes; also says whether they had to be started over before."""
        with self._turn:
            is_new = not all(lane.can_go_on(MOST) for lane in self.lanes)
            if is_new:
                self._start_over()
            try:
                return play(story, self.lanes, self.servers), is_new
            finally:  # a story that failed half way may have left one stopped
                for server in self.servers.values():
                    if server.pid is None:
                        server.start()

    def start_over(self) -> None:
        with self._turn:
            self._start_over()

    def _start_over(self) -> None:
        for lane in self.lanes:
            lane.start_over()


@contextlib.contextmanager
def open_stage() -> Iterator[Stage]:
    """Start everything in order; the block ends it in reverse.

    The servers are always its own, since two of the stories stop them.
    """
    with contextlib.ExitStack() as stack:
        postgres = stack.enter_context(servers.Postgres())
        redis = stack.enter_context(servers.Redis())
        folder = stack.enter_context(_folder())

        def serve(application: str, name: str, *arguments: str, **environment: str) -> str:
            """What it says goes into a file: that its worker was killed is no news here."""
            log = folder / f"{name}.log"
            quiet = ("--error-logfile", str(log), "--capture-output")
            try:
                served = gunicorn(application, environment, *quiet, *arguments)
                return stack.enter_context(served)[0]
            except CannotStart:
                print(log.read_text() if log.exists() else "", file=sys.stderr)
                raise

        provider = serve(
            "laboratory.shops:create_providers()",
            "provider",
            "--workers",
            "1",
            LABORATORY_FOLDER=str(folder),
        )
        lanes = []
        for name in NAMES:
            url = postgres.database(f"shop_{name}")
            make_tables(url)
            cable = stack.enter_context(servers.FaultProxy(url))
            events = folder / f"{name}.events"
            events.touch()
            shop = serve(
                "laboratory.shops:create_app()",
                name,
                DATABASE_URL=cable.url,
                REDIS_URL=redis.url if name == "with" else "",
                SECRET_KEY=secrets.token_hex(),
                OPERATOR_PASSWORD=OPERATOR_PASSWORD,
                PROVIDER_URL=f"{provider}/{name}",
                LABORATORY_LANE=name,
                LABORATORY_EVENTS=str(events),
            )
            network = stack.enter_context(servers.FaultProxy(shop))
            database = servers.plain_dsn(url)
            ledger = folder / f"{name}.db"
            lanes.append(Lane(name, shop, network, cable, database, ledger, events))
        stage = Stage(lanes, {"postgres": postgres, "redis": redis})
        stage.start_over()
        yield stage


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """For the provider's ledgers and the events. It is removed even after a kill -9."""
    folder = Path(tempfile.mkdtemp(prefix="throwaway-laboratory-"))
    watchdog = Watchdog(folder)
    watchdog.note([])
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        watchdog.close()
