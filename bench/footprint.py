"""What the package adds to a worker that uses Flask, Flask-SQLAlchemy and redis-py anyway.

Each figure comes from new processes, and the same work happens in those without the package.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import psutil
import redis

from .app import make_client
from .paths import new_keys, sending
from .report import Figure

ROUNDS = 7
"""The least and the greatest of so many enclose the median with 98 % certainty."""

REQUESTS = 200
"""Enough for all that is imported, compiled and kept when it is first used."""


def memory(database_url: str, redis_url: str) -> Figure:
    """MiB of a process' own memory that it takes more, after some requests."""

    def mebibytes(what: str) -> float:
        return int(_run(what, database_url, redis_url)) / 2**20

    return _middle([mebibytes("protected") - mebibytes("bare") for _ in range(ROUNDS)])


def imports(database_url: str, redis_url: str) -> tuple[Figure, float]:
    """Milliseconds of processor time to import all modules that a protected request needs.

    The second is what Python took with the others, from its start: a busy machine slows both.
    """
    names = _run("names", database_url, redis_url).split()
    runs = [_run("import", database_url, redis_url, *names).split() for _ in range(ROUNDS)]
    added, base = zip(*runs, strict=True)
    return _middle(list(map(float, added))), statistics.median(map(float, base))


def _middle(values: list[float]) -> Figure:
    return Figure(statistics.median(values), min(values), max(values))


def _run(*arguments: str) -> str:
    command = [sys.executable, "-m", __name__, *arguments]
    # Bytecode is written, as by an installer: compiling is no part of an import then.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        command,
        cwd=Path(__file__).parent.parent,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def main(what: str, database_url: str, redis_url: str, *names: str) -> None:
    """The process: print what is asked for."""
    base = time.process_time()
    redis.Redis.from_url(redis_url).ping()

    def send(count: int, *, protect: bool) -> None:
        client = make_client(database_url, redis_url=redis_url, protect=protect)
        send_one = sending(client, "/payments" if protect else "/bare", new_keys())
        for _ in range(count):
            send_one()

    if what in ("bare", "protected"):
        send(REQUESTS, protect=what == "protected")
        gc.collect()
        print(psutil.Process().memory_full_info().uss)
        return
    send(1, protect=False)
    before = set(sys.modules)
    if what == "names":
        send(1, protect=True)
        print(*(name for name in sys.modules if name not in before))
        return
    spent = time.process_time()
    for name in names:
        import_module(name)
    print((time.process_time() - spent) * 1000, base * 1000)


if __name__ == "__main__":
    main(*sys.argv[1:])
