"""The pages' Python runs or compiles, every mark stands before a block, and what is named is there."""

from __future__ import annotations

import re

import pytest

from flask_idempotency.core.errors import Problem
from tests.docs.pages import PAGES, RECIPES, ROOT, apps, blocks, name_of


@pytest.mark.parametrize(
    ("page", "name"),
    [
        pytest.param(page, name, id=f"{name_of(page)} {name}")
        for page in PAGES
        if page.parent != RECIPES  # each has tests of its own, beside the page that it goes on from
        for name in apps(page)
    ],
)
def test_the_python_of_each_application_runs(page, name, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for files it makes
    for block in apps(page)[name]:
        exec(compile(block.source, str(page), "exec"), names)  # noqa: S102


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_other_python_compiles_and_no_mark_is_in_vain(page):
    """A mark that is misspelt or one line too high would silently mark nothing."""
    for block in blocks(page, "python"):
        compile(block.source, str(page), "exec")
        assert re.match(r"$|fragment$|(new app|file|append): ", block.mark), block.name
    text = page.read_text(encoding="utf-8")
    marked = [block for block in blocks(page, "python", "console", "http", "bash") if block.mark]
    assert len(re.findall(r"(?m)^ *<!-- .* -->$", text)) == len(marked)
    assert not re.search(r"(?m)^ +```(python|http)", text), "indented, so not found"


CALLERS = "example/recipes/callers.md"
EVIDENCE = "bench/figures/evidence.md"
TARGETS = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"))
SECTIONS = re.findall(r"(?m)^\(([a-z-]+)\)=\n## ", (ROOT / "docs/runbook.md").read_text("utf-8"))
STATUS_OF = {problem.type: str(problem.status) for problem in Problem.__subclasses__()}


def is_there(name: str) -> bool:
    """Whether a test, mostly without "tests/", or a file of the package is there."""
    return any((ROOT / place / name).exists() for place in ("", "tests", "flask_idempotency"))


def is_problem(told: str) -> bool:
    status, kind = told.split(" `")
    return STATUS_OF.get(kind) == status


TESTS = r"((?:\w+/)+test_\w+\.py)\b"
FILES = r"`((?!build/)[\w.-]+/[\w./-]+\.(?:py|md|svg))`"


@pytest.mark.parametrize(
    ("page", "pattern", "fewest", "is_known"),
    [
        (
            "docs/monitoring/alerts.yml",
            r"runbook_url: docs/runbook.md#(\S+)",
            10,
            SECTIONS.__contains__,
        ),
        (EVIDENCE, TESTS, 28, is_there),
        (EVIDENCE, r"make test ARGS=(tests/\w+)`", 1, is_there),
        (EVIDENCE, r"`make ([\w-]+)", 12, TARGETS.__contains__),
        ("SECURITY.md", TESTS, 20, is_there),
        ("bench/figures/works-with.md", TESTS, 10, is_there),
        ("CONTRIBUTING.md", FILES, 10, is_there),
        ("docs/clients.md", r"\b([45]\d\d `[a-z]+-[a-z-]+)`", 1, is_problem),
        (CALLERS, r"\b([45]\d\d `[a-z]+-[a-z-]+)`", 1, is_problem),
    ],
)
def test_a_page_names_only_what_is_there(page, pattern, fewest, is_known):
    named = set(re.findall(pattern, (ROOT / page).read_text(encoding="utf-8")))
    assert len(named) >= fewest
    assert {name for name in named if not is_known(name)} == set()
