"""How long each command takes on many records, with interrupted operations and a dead Redis."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from flask import Flask, request
from flask.typing import ResponseReturnValue
from flask_sqlalchemy import SQLAlchemy
from prometheus_client import CollectorRegistry, generate_latest

import servers
from flask_idempotency import Idempotency, current_operation, idempotent
from flask_idempotency.cli import cli
from flask_idempotency.core.keys import SCOPE_BYTES, SHOWN, hash_key, scope_tail
from flask_idempotency.integrations.prometheus import RecordsCollector

from . import report
from .growth import SETTINGS
from .records import NAME, Table

SIZES = (10_000, 1_000_000)
TENANT = "acme"

TENANTS = 1024
"""One record in so many is the tenant's, whose records ``forget`` erases."""

EXPIRED = 0.01
"""The share of records that have expired, for ``purge``: a quarter of an hour of a day."""

SCRAPE = "scrape of the metrics"
"""What stands in place of a command in the row of the collector."""

LEASE_SECONDS = 1
"""The shortest there is: the interrupted operations are not waited for."""

LINES = 15
"""How many lines of a command's output are shown."""

ROUNDS = 3
"""How often a command that changes nothing runs; the fastest counts."""


def make_app(database_url: str, redis_url: str) -> Flask:
    """An application whose views that are not atomic never end: their process is killed."""
    app = Flask("shop")
    app.config.update(SQLALCHEMY_DATABASE_URI=database_url, IDEMPOTENCY_REDIS_URL=redis_url)
    db = SQLAlchemy(app)
    Idempotency(app, db, scope=lambda: request.headers["X-Account"])

    def die() -> ResponseReturnValue:
        current_operation.step("reserve", lambda: {"id": 7})
        if current_operation.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}, 201

    lease: Any = {"atomic": False, "lease": LEASE_SECONDS}
    app.post("/text", endpoint="text")(idempotent(lambda: ({}, 201)))
    app.post("/charges", endpoint="charge")(idempotent(**lease)(die))
    return app


@dataclass(frozen=True)
class Command:
    """A command line; ``{charge}`` and ``{other}`` are digits. One that ``changes`` runs once."""

    line: str
    changes: bool = False


COMMANDS = (
    Command("create-table"),
    Command("check"),
    Command("list"),
    Command("list --state interrupted"),
    Command("show {charge}"),
    Command("release {charge} --why 'no charge at the provider' --by ann", changes=True),
    Command(
        "resolve {other} --status 201 --body '{{\"id\": 7}}' --why 'charged as ch_7' --by ann --yes",
        changes=True,
    ),
    Command("show {other}"),
    Command("purge", changes=True),
    Command("forget --key 1 --operation charge --scope acme --yes", changes=True),
    Command("forget --scope acme --yes", changes=True),
    Command("purge --older-than 12h --yes", changes=True),
)


@dataclass(frozen=True)
class Ran:
    """What a command took and wrote; ``status`` is that of its process."""

    command: str
    seconds: float
    status: int
    output: str


def measure(sizes: Iterable[int], folder: Path) -> str:
    """Write what each command took and wrote to ``operate.*``; as Markdown."""
    with servers.Redis() as redis:
        redis_url = redis.url
    sizes = sorted(sizes)
    with servers.Postgres(settings=SETTINGS) as postgres:
        ran = [_at(size, postgres.database(f"operate_{size}"), redis_url) for size in sizes]
    text = _table(sizes, ran)
    data = {size: [vars(each) for each in found] for size, found in zip(sizes, ran, strict=True)}
    report.write_both(folder, "operate", text, data)
    return text


def _at(size: int, url: str, redis_url: str) -> list[Ran]:
    """Fill a table, interrupt operations, and run every command."""
    with closing(Table(url, size)) as table:
        table.add_expired(int(size * EXPIRED))
        table.ask(
            f"UPDATE {NAME} SET key = substring(key FOR length(key) - %(bytes)s) || %(tail)s"
            " WHERE (get_byte(key, 0) * 256 + get_byte(key, 1)) %% %(tenants)s = 0",
            {"bytes": SCOPE_BYTES, "tail": scope_tail(TENANT), "tenants": TENANTS},
        )
        table.ask(f"VACUUM (ANALYZE) {NAME}")
    for path, key in ("/charges", "1"), ("/charges", "2"):
        _interrupt((url, redis_url), path, key)
    time.sleep(LEASE_SECONDS)
    app = make_app(url, redis_url)
    digits = {
        name: hash_key("", "charge", TENANT, key).hex()[:SHOWN]
        for name, key in (("charge", "1"), ("other", "2"))
    }
    return [_scrape(app), *(_run(app, command, digits) for command in COMMANDS)]


def _interrupt(urls: tuple[str, str], path: str, key: str) -> None:
    """Kill a worker in the middle of an operation."""
    process = get_context("spawn").Process(target=_send, args=(urls, path, key))
    process.start()
    process.join()
    if process.exitcode != -signal.SIGKILL:
        raise RuntimeError(f"the request to {path} ended with {process.exitcode}")


def _send(urls: tuple[str, str], path: str, key: str) -> None:
    headers = {"Idempotency-Key": key, "X-Account": TENANT}
    make_app(*urls).test_client().post(path, headers=headers, json={"amount": 5})


def _run(app: Flask, command: Command, digits: dict[str, str]) -> Ran:
    line = command.line.format(**digits)
    taken = []
    for _ in range(1 if command.changes else ROUNDS):
        began = time.perf_counter()
        result = app.test_cli_runner().invoke(cli, shlex.split(line))
        taken.append(time.perf_counter() - began)
    return Ran(f"flask idempotency {line}", min(taken), result.exit_code, result.output)


def _scrape(app: Flask) -> Ran:
    """What a scrape of the metrics asks about the records."""
    taken = []
    for _ in range(ROUNDS):
        registry = CollectorRegistry()
        registry.register(RecordsCollector(app))  # a new one each time: it remembers
        began = time.perf_counter()
        text = generate_latest(registry).decode()
        taken.append(time.perf_counter() - began)
    said = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    return Ran(SCRAPE, min(taken), 0, said)


def _table(sizes: list[int], ran: list[list[Ran]]) -> str:
    """What each command took, and the first lines that it wrote on the largest table."""
    [unit] = [each.seconds for each in ran[0] if each.command.endswith(" list")]
    lines = [
        f"The unit is `list` on {sizes[0]:,} records, which took {unit * 1000:.0f} ms. Redis is dead.",
        "",
        f"| command | {' | '.join(f'{size:,} records' for size in sizes)} | exit |",
        f"|---|{'---:|' * len(sizes)}---:|",
    ]
    for of_sizes in zip(*ran, strict=True):
        last = of_sizes[-1]
        times = " | ".join(f"{each.seconds / unit:.1f}" for each in of_sizes)
        lines.append(f"| `{last.command}` | {times} | {last.status} |")
    for each in ran[-1]:
        shown = each.output.rstrip().splitlines()
        more = ["..."] if len(shown) > LINES else []
        lines += ["", "```text", f"$ {each.command}", *shown[:LINES], *more, "```"]
    return "\n".join([*lines, ""])
