"""Runs all tests, and notes in bench/figures/works-with.md with which versions and with what result.

With arguments, which are pytest's, it runs what these say and notes nothing.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "bench" / "figures" / "works-with.md"
COUNTS = ROOT / "build" / "counts.xml"

NAMES = [
    "flask",
    "werkzeug",
    "sqlalchemy",
    "flask-sqlalchemy",
    "psycopg2-binary",
    "psycopg",
    "redis",
]
TELLING = slice(1, 6)
"""The columns by which a row is found again, Python to Flask-SQLAlchemy; a third number is left out."""


def installed(package: str) -> str:
    """The version of a package here."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def today() -> str:
    """As the tables have it."""
    return datetime.now(timezone.utc).date().isoformat()


def counted() -> list[str]:
    """How many tests passed and how many did not, in the run that has just written it."""
    suite = ET.parse(COUNTS).getroot()[0]  # noqa: S314
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return [str(int(suite.attrib["tests"]) - failed - int(suite.attrib["skipped"])), str(failed)]


def table(page: str, first: str) -> tuple[str, list[list[str]], str]:
    """What is before the rows of the table whose first column is this, the rows, and what is after."""
    head, found, tail = re.split(
        rf"^(\| {first} \|(?:.*\n\|)*.*\n)", page, maxsplit=1, flags=re.MULTILINE
    )
    title, line, *rows = found.splitlines()
    return f"{head}{title}\n{line}\n", [cells_of(row) for row in rows], tail


def joined(head: str, rows: list[list[str]], tail: str) -> str:
    """The page that :func:`table` took apart."""
    return "".join([head, *(f"| {' | '.join(row)} |\n" for row in rows), tail])


def with_row(page: str, cells: list[str]) -> str:
    """The page with this row in place of that of the same releases. The newest comes first."""
    head, rows, tail = table(page, "Date")
    others = [row for row in rows if releases(row) != releases(cells)]
    return joined(head, sorted([*others, cells], key=releases, reverse=True), tail)


def cells_of(row: str) -> list[str]:
    """The texts of a row."""
    return [cell.strip() for cell in row.strip("| ").split("|")]


def releases(row: list[str]) -> list[list[int]]:
    """The first two numbers of each version that tells a row."""
    return [[*map(int, re.findall(r"\d+", cell)[:2])] for cell in row[TELLING]]


def main(arguments: list[str]) -> int:
    """Run the tests; returns pytest's status."""
    COUNTS.unlink(missing_ok=True)
    whole = ["-n", "4", "--dist", "loadfile", "--junitxml", str(COUNTS)]
    command = [sys.executable, "-m", "pytest", "-q", *(arguments or whole)]
    status = subprocess.run(command, check=False, cwd=ROOT).returncode
    if COUNTS.exists():
        cells = [today(), platform.python_version(), *map(installed, NAMES), *counted()]
        PAGE.write_text(with_row(PAGE.read_text("utf-8"), cells), "utf-8")
        sys.stdout.write(f"bench/figures/works-with.md: {' | '.join(cells)}\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
