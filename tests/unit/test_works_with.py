"""What `make lowest` and `make newest` note in `docs/works-with.md`."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = pytest.mark.of_tests

ROOT = Path(__file__).parents[2]
SCRIPT = ".ci/works_with.py"
PAGE = "docs/works-with.md"
TESTS = """
def test_it():
    pass
def test_that():
    assert False
"""
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}

spec = importlib.util.spec_from_file_location("works_with", ROOT / SCRIPT)
works_with = importlib.util.module_from_spec(spec)
spec.loader.exec_module(works_with)


def test_a_run_is_noted_if_it_was_of_all_tests(tmp_path):
    for name in (SCRIPT, PAGE):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "test_it.py").write_text(TESTS)
    before, command = (tmp_path / PAGE).read_text("utf-8"), [sys.executable, tmp_path / SCRIPT]
    for arguments in ["test_it.py"], []:
        assert (tmp_path / PAGE).read_text("utf-8") == before
        run = subprocess.run([*command, *arguments], env=ENVIRONMENT, check=False, capture_output=True)
        assert run.returncode == 1
    [cells] = [row for row in rows((tmp_path / PAGE).read_text("utf-8")) if row not in rows(before)]
    here = [platform.python_version(), version("flask"), version("werkzeug"), version("sqlalchemy")]
    assert (cells[1:5], cells[-2:]) == (here, ["1", "1"])


def rows(page):
    return [works_with.cells_of(line) for line in page.splitlines() if line.startswith("| 2")]


def row(date, python, flask):
    return [date, python, flask, "3.1.9", "2.1.9", "3.1.1", "2.9.13", "-", "8.1.0", "12000", "0"]


def test_a_row_replaces_that_of_the_same_releases_and_the_newest_is_the_first():
    page = (
        "before\n\n| Date | Python |\n|---|---|\n\nafter\n\n| Other | table |\n|---|---|\n| 2 | 3 |\n"
    )
    old, other = row("2026-11-01", "3.9.1", "3.1.2"), row("2026-11-02", "3.11.7", "3.2.0.dev0")
    noted = works_with.with_row(works_with.with_row(page, old), other)
    assert rows(noted)[:2] == [other, old]
    new = row("2026-11-03", "3.9.2", "3.1.3")
    noted = works_with.with_row(noted, new)
    assert rows(noted)[:2] == [other, new]
    unlike = [line for line in noted.splitlines(keepends=True) if not line.startswith("| 2026")]
    assert "".join(unlike) == page
