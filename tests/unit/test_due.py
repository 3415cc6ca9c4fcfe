"""When `.ci/run` runs tests with the newest releases, and with the lowest."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = "bench/figures/works-with.md"
DRIVER = "flask_idempotency/drivers/psycopg.py"
ROW = "| 2026-11-24 | 3.11.7 |\n"
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    **dict.fromkeys(["GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"], "somebody"),
    **dict.fromkeys(["GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"], "somebody@example.com"),
}

pytestmark = pytest.mark.of_tests  # not of the package: a bare machine has no git


def run(folder, *command, check=True):
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, check=check, capture_output=True, text=True
    )


def commit(folder, **texts):
    """Append to files, and commit them."""
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    run(folder, "git", "add", ".")
    run(folder, "git", "commit", "-qm", "one")


def due(folder):
    """Whether the tests are due, and what is said."""
    asked = run(folder, ROOT / ".ci/due", check=False)
    assert (asked.stdout.count("\n"), asked.stderr) == (1, "")
    return asked.returncode == 0, asked.stdout


def test_a_change_to_what_meets_other_packages_is_due_until_a_result_is_noted(tmp_path):
    clone = tmp_path / "clone"
    clone.mkdir()
    run(clone, "git", "init", "-q")
    commit(clone, **{PAGE: "# Works with\n", DRIVER: "before\n"})
    commit(clone, **{PAGE: ROW})
    assert due(clone)[0] is False
    commit(clone, **{"README.md": "more\n"})
    assert due(clone)[0] is False
    commit(clone, **{DRIVER: "after\n"})
    commit(clone, **{PAGE: "Words, and no result.\n"})
    is_due, said = due(clone)
    assert is_due
    assert DRIVER in said
    commit(clone, **{PAGE: ROW})
    assert due(clone)[0] is False
