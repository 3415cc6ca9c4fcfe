"""Runs the tests of the extensions in works-with.md, and notes versions and results there.

The rows of that table say which: ``web/test_protect.py[apiflask]`` is what has this word in its name.
With arguments, which are pytest's, it runs what these say and notes nothing.
"""

from __future__ import annotations

import re
import subprocess
import sys
from xml.etree import ElementTree as ET

from works_with import COUNTS, PAGE, ROOT, installed, joined, table, today

TESTS = re.compile(r"`([\w/]+)\.py(?:\[(\w+)\])?`")


def belongs(case: ET.Element, row: list[str]) -> bool:
    """Whether a test is one of a row's."""
    named = f"{case.attrib['classname']}.".casefold(), case.attrib["name"].casefold()
    return any(
        named[0].startswith(f"tests.{path.replace('/', '.')}.".casefold()) and word in f"{named}"
        for path, word in TESTS.findall(row[5])
    )


def with_results(page: str, suite: ET.Element) -> str:
    """The page with what came of the tests. Raises ``SystemExit`` where a row had none."""
    head, rows, tail = table(page, "Extension")
    for row in rows:
        cases = [case for case in suite.iter("testcase") if belongs(case, row)]
        bad = [case for case in cases if {"failure", "error"} & {part.tag for part in case}]
        if not cases:
            raise SystemExit(f"no test of {row[0]} has run")
        row[1:5] = [installed(row[0]), today(), str(len(cases) - len(bad)), str(len(bad))]
    return joined(head, rows, tail)


def main(arguments: list[str]) -> int:
    """Run the tests; returns pytest's status."""
    COUNTS.unlink(missing_ok=True)
    # ddtrace's own plugin changes how this process imports. Agents have processes of their own here.
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:ddtrace"]
    if arguments:
        return subprocess.run([*pytest, *arguments], check=False, cwd=ROOT).returncode
    _, rows, _ = table(PAGE.read_text("utf-8"), "Extension")
    files = {f"tests/{path}.py" for row in rows for path, _ in TESTS.findall(row[5])}
    noting = ["-n", "2", "--dist", "loadfile", "--junitxml", str(COUNTS)]
    status = subprocess.run([*pytest, *noting, *sorted(files)], check=False, cwd=ROOT).returncode
    if COUNTS.exists():
        suite = ET.parse(COUNTS).getroot()[0]  # noqa: S314
        PAGE.write_text(with_results(PAGE.read_text("utf-8"), suite), "utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
