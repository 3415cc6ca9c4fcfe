"""The bench finds the highest rate that a server sustains: on a simulated one, whose rate is known."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from bench.climb import BURST, RISE, Climber, climb
from bench.load import Replies
from bench.workers_report import Measured, Storm


class OneAtATime:
    """Clients of servers that serve ``port`` requests a second, one after the other.

    ``stalls`` are the numbers of the steps before which all of them stand still for a second.
    """

    def __init__(self, *, stalls: tuple[int, ...] = (), reply: str = "201") -> None:
        self.asked: list[int] = []
        self._stalls, self._reply, self._step = stalls, reply, 0

    def send(self, port: int, path: str, due: list[float], **_: object) -> Replies:
        self.asked.append(port)
        self._step += len(due) != BURST
        free, milliseconds = float(self._step in self._stalls), []
        for moment in due:
            free = max(free, moment) + 1 / port
            milliseconds.append((free - moment) * 1000)
        return Replies(milliseconds, {self._reply: len(due)}, free, 0.0)


def test_the_highest_rate_is_that_of_the_server():
    climbers = [Climber({"server": name}, rate, "/") for name, rate in (("a", 400), ("b", 1000))]
    climb(climbers, OneAtATime(), turns=5, seconds=2)
    for climber in climbers:
        assert len(climber.highest) == 5
        assert climber.figure.value == pytest.approx(climber.port, rel=RISE - 1)
        assert climber.at_half["p50"] < 2000 / climber.port
    assert climbers[0].against(climbers[1]).value == pytest.approx(0.4, rel=RISE - 1)


def test_a_step_that_was_disturbed_is_taken_again():
    for stall in range(1, 12):
        disturbed = Climber({}, 400, "/")
        climb([disturbed], OneAtATime(stalls=(stall,)), turns=1, seconds=2)
        assert disturbed.highest[0] > 400 / RISE**2, f"disturbed in step {stall}"


def test_climbers_take_turns_after_each_step():
    clients = OneAtATime()
    climb([Climber({}, 400, "/"), Climber({}, 500, "/")], clients, turns=1, seconds=1)
    steps = [port for before, port in pairwise(clients.asked) if before != port]
    assert len(steps) > 5


def test_a_server_that_gives_the_wrong_reply_sustains_no_rate():
    with pytest.raises(RuntimeError, match="sustains no rate"):
        climb([Climber({}, 400, "/")], OneAtATime(reply="500"), turns=1, seconds=1)


def test_rates_are_held_against_the_unprotected_ones_of_the_same_workers():
    measured = Measured(notes=["on a quiet machine"])
    for workers, rates in (("sync", (400, 380, 250)), ("gthread", (800, 700, 480))):
        for server, rate in zip(("unprotected", "hybrid", "postgres"), rates, strict=True):
            name = {"workers": workers, "request": "first", "server": server}
            measured.climbers.append(Climber(name, rate, "/"))
            kinds = {"201": 1, "201 replayed": 199}
            measured.storms.append(Storm(workers, server, kinds, 1, milliseconds=300.0))
    climb(measured.climbers, OneAtATime(), turns=3, seconds=1)
    rows = [line.split(" | ") for line in measured.markdown().splitlines() if "| first |" in line]
    assert [row[6] for row in rows] == ["–", "reached", "**missed**"] * 2
    assert "| sync | hybrid | 1 | 1 × 201, 199 × 201 replayed | 300.0 |" in measured.markdown()
    plotted = json.loads(json.dumps(measured.data()))["rates"][0]["steps"]
    assert {"offered", "achieved", "p50", "p99", "p99.9", "kinds"} <= plotted[0].keys()
