"""What `make lowest`, `newest`, `platforms` and `test-ecosystem` note in `works-with.md`."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

pytestmark = pytest.mark.of_tests

ROOT = Path(__file__).parents[2]
SCRIPT = ".ci/works_with.py"
PAGE = "bench/figures/works-with.md"
TESTS = """
def test_it():
    pass
def test_that():
    assert False
"""
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


def script(name):
    """A program of `.ci`. They import each other as programs do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / ".ci")
        spec = importlib.util.spec_from_file_location(f"ci_{name}", ROOT / ".ci" / f"{name}.py")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # for its dataclasses
        spec.loader.exec_module(module)
        return module


works_with, platforms, extensions = map(script, ("works_with", "platforms", "extensions"))


def test_a_run_is_noted_if_it_was_of_all_tests(tmp_path):
    for name in (SCRIPT, PAGE):
        (tmp_path / name).parent.mkdir(parents=True)
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


def test_a_platform_has_one_row_for_a_release_in_the_order_of_the_list():
    page = "before\n\n| Platform | Date |\n|---|---|\n\nafter\n"
    told = [
        "PostgreSQL 14.22",
        "Redis 7.0.15",
        "Flask 3.1.2",
        "PostgreSQL 14.23",
        "Flask 3.0.3",
        "Redis 8.2.3",
    ]
    for name in told:
        page = platforms.noted(page, [name, "2026-11-27"])
    noted = ["Flask 3.0.3", "Flask 3.1.2", "PostgreSQL 14.23", "Redis 7.0.15", "Redis 8.2.3"]
    rows = "".join(f"| {name} | 2026-11-27 |\n" for name in noted)
    assert page == f"before\n\n| Platform | Date |\n|---|---|\n{rows}\nafter\n"


def test_every_run_of_a_platform_notes_what_has_a_place():
    noted = [name for run in platforms.runs() for name in run.notes]
    assert set(noted) == set(platforms.ORDER)


HEAD = "| Extension | Version | Date | Passed | Failed | Tests |\n|---|\n"
RESULTS = ET.fromstring(  # noqa: S314
    """
<testsuite>
  <testcase classname="tests.web.test_order" name="test_with_apiflask"/>
  <testcase classname="tests.web.test_order" name="test_with_flask_smorest"><failure/></testcase>
  <testcase classname="tests.web.test_order_of.TestIt" name="test_with_apiflask"/>
  <testcase classname="tests.web.test_it.TestIt" name="test_it"><error/></testcase>
</testsuite>
"""
)


@pytest.mark.parametrize(
    ("tests", "counted"),
    [
        ("`web/test_order.py[apiflask]`", ["1", "0"]),
        ("`web/test_order.py`", ["1", "1"]),
        ("`web/test_it.py`, `web/test_order.py[smorest]`", ["0", "2"]),
    ],
)
def test_an_extensions_row_gets_what_came_of_its_tests(tests, counted):
    page = f"{HEAD}| flask | | | | | {tests} |\n"
    done = extensions.with_results(page, RESULTS)
    [row] = extensions.table(done, "Extension")[1]
    assert row == ["flask", version("flask"), extensions.today(), *counted, tests]


def test_an_extension_of_which_no_test_has_run_is_no_result():
    page = f"{HEAD}| flask | | | | | `web/no.py` |\n"
    with pytest.raises(SystemExit, match="no test of flask"):
        extensions.with_results(page, RESULTS)


def test_the_page_names_tests_that_are_there():
    for row in extensions.table((ROOT / PAGE).read_text("utf-8"), "Extension")[1]:
        files = [path for path, _ in extensions.TESTS.findall(row[5])]
        assert files, row
        assert [path for path in files if not (ROOT / f"tests/{path}.py").exists()] == []
