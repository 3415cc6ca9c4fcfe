"""Every client against every fault, with its real waits, and what came of it as tables."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.peers import environments
from bench.report import write_both

from .faults import FAULTS, Server

ROOT = Path(__file__).parents[2]

CLIENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ours_requests": ("ours, requests", ()),
    "ours_httpx": ("ours, httpx", ()),
    "stripe": ("Stripe's SDK", ("stripe==16.1.0", "requests")),
    "botocore": ("botocore, standard mode", ("botocore==1.44.5",)),
    "requests_urllib3": ("requests with urllib3's `Retry`", ("requests", "urllib3")),
    "stamina": ("stamina around requests", ("stamina==26.1.0", "requests")),
    "httpx_retries": ("httpx-retries", ("httpx-retries==0.6.0",)),
}
"""What a client is called, and what its environment needs; the present one for ours."""

AT_ONCE, NEVER, OUTAGE, SILENCE, *OTHERS = FAULTS

TIMES = 10
"""How often an outage is measured: the waits are random, and so is whether a call outlives it."""

MANY = 100
"""Calls of one client during an outage."""

PATIENCE_SECONDS = 100
"""Longer than the longest time-out among the defaults (Stripe's, 80 s)."""

TOGETHER = 8
"""Processes at a time. They sleep most of the time, but starting one takes a processor."""


Line = tuple[str, str, str]
"""Level, logger, and the text with all that was logged along with it."""


@dataclass(frozen=True)
class Outcome:
    """What came of a client's calls: the figures are of all of them together.

    ``waited`` are the seconds between attempts, ``seconds`` all that passed.
    """

    outcome: str
    seconds: float
    waited: float
    attempts: int
    keys: int
    log: list[Line]

    def __str__(self) -> str:
        return f"{self.attempts}: {self.outcome}"


def compare(clients: Iterable[str], folder: Path) -> str:
    """Measure these clients, all if none is named: Markdown, and clients.json in the folder."""
    chosen = list(clients) or list(CLIENTS)
    pythons = {each: environments.python(f"client-{each}", CLIENTS[each][1], ()) for each in chosen}
    asked = [
        *((each, fault, 1) for each in chosen for fault in FAULTS for _ in range(_times(fault))),
        *((each, AT_ONCE, MANY) for each in chosen),
    ]
    with ThreadPoolExecutor(TOGETHER) as pool:
        measured = pool.map(lambda one: measure(pythons[one[0]], *one), asked)
        results: dict[tuple[str, str, int], list[Outcome]] = {}
        for one, outcome in zip(asked, measured, strict=True):
            results.setdefault(one, []).append(outcome)
    text = "\n\n".join([_outages(results), _faults(results), _logs(results), _versions(pythons)])
    data = [[*one, [asdict(each) for each in outcomes]] for one, outcomes in results.items()]
    write_both(folder, "clients", text, data)
    return text


def measure(python: Path, client: str, fault: str, calls: int = 1) -> Outcome:
    """Let a client, in a process of its own, call a server that fails so."""
    with Server(fault) as server:
        url = f"http://127.0.0.1:{server.port}/payments"
        command = [str(python), str(ROOT / "bench/clients/callers.py"), client, url, str(calls)]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT) if client.startswith("ours") else ""},
        )
        for line in process.stderr or ():
            if line == "began\n":
                server.begin()
                break
        try:
            told, _errors = process.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            waiting = f"nothing after {PATIENCE_SECONDS} s"
            attempts = len(server.attempts)
            return Outcome(waiting, PATIENCE_SECONDS, 0, attempts, _keys(server), [])
        return Outcome(keys=_keys(server), **json.loads(told))


def _keys(server: Server) -> int:
    return len({attempt.key for attempt in server.attempts if attempt.key})


def _times(fault: str) -> int:
    return TIMES if fault in (AT_ONCE, NEVER, OUTAGE) else 1


Results = dict[tuple[str, str, int], list[Outcome]]


def _outages(results: Results) -> str:
    lines = [
        f"| | {AT_ONCE} | {NEVER} | {MANY} calls against the 503 | {OUTAGE} | {SILENCE} |",
        "|---|---|---|---|---|---|",
    ]
    for client in _clients(results):
        many = results[client, AT_ONCE, MANY][0].attempts / MANY
        cells = [_mean(results[client, fault, 1]) for fault in (AT_ONCE, NEVER)]
        cells.append(f"{many:.1f} each")
        served = [each.outcome == "201" for each in results[client, OUTAGE, 1]]
        cells.append(f"{sum(served)} of {len(served)} served")
        cells.append(_timed(results[client, SILENCE, 1][0]))
        lines.append(f"| {CLIENTS[client][0]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(outcomes: list[Outcome]) -> str:
    attempts = statistics.mean(each.attempts for each in outcomes)
    waited = statistics.mean(each.waited for each in outcomes)
    return f"{attempts:.3g}, waits {waited:.1f} s"


def _timed(outcome: Outcome) -> str:
    is_known = outcome.seconds < PATIENCE_SECONDS
    return f"{outcome} in {outcome.seconds:.0f} s" if is_known else str(outcome)


def _faults(results: Results) -> str:
    clients = _clients(results)
    names = " | ".join(CLIENTS[each][0] for each in clients)
    lines = [f"| attempts: outcome | {names} |", "|---" * (len(clients) + 1) + "|"]
    for fault in OTHERS:
        cells = [str(results[each, fault, 1][0]) for each in clients]
        lines.append(f"| {fault} | {' | '.join(cells)} |")
    alone = {one: outcomes for one, outcomes in results.items() if one[2] == 1}
    keys = [
        max(each.keys for one, outcomes in alone.items() if one[0] == client for each in outcomes)
        for client in clients
    ]
    lines.append(f"| keys of one call | {' | '.join(map(str, keys))} |")
    return "\n".join(lines)


def _logs(results: Results) -> str:
    lines = [f"| log lines | {AT_ONCE} | {NEVER} | with secrets |", "|---|---|---|---|"]
    for client in _clients(results):
        logs = [results[client, fault, 1][0].log for fault in (AT_ONCE, NEVER)]
        cells = [_levels(log) for log in logs]
        cells.append(", ".join(_secrets([line for log in logs for line in log])) or "–")
        lines.append(f"| {CLIENTS[client][0]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _levels(log: list[Line]) -> str:
    """How many lines of which level and logger; those of DEBUG only if there are no others."""
    told = Counter((level, name) for level, name, _text in log)
    shown = {one: n for one, n in told.items() if one[0] != "DEBUG"} or told
    return ", ".join(f"{n} {level} `{name}`" for (level, name), n in shown.items()) or "none"


def _secrets(log: list[Line]) -> list[str]:
    """What of the request a reader of the log sees who leaves DEBUG out."""
    text = "".join(text for level, _name, text in log if level != "DEBUG")
    return [what for what in ("query", "body", "key") if f"canary-of-the-{what}" in text]


def _clients(results: Results) -> list[str]:
    return list(dict.fromkeys(client for client, *_ in results))


def _versions(pythons: dict[str, Path]) -> str:
    wanted = ("stripe", "botocore", "requests", "urllib3", "stamina", "httpx", "httpx-retries")
    found: dict[str, str] = {}
    for python in pythons.values():
        found |= environments.versions(python)
    return "- " + ", ".join(f"{name} {found[name]}" for name in wanted if name in found)
