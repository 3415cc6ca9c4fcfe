"""Clients are told of responses what the HTTP reference says; what callers copy stands alone."""

from __future__ import annotations

import re

import pytest

from flask_idempotency.web.settings import Settings
from tests.docs.pages import ROOT, blocks

HTTP = (ROOT / "docs/http.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| .*\]\(#.* \| (\d{3}) \| `([a-z-]+)` \|", HTTP, re.MULTILINE)
STATUS = {problem: status for status, problem in ROWS}
PROBLEM = re.compile(
    r"`((?:key|body|scope|replay|request|response|operation|try|store|transaction)-[a-z-]+)`"
)


CALLERS = "example/recipes/callers.md"
PAGES = ["docs/clients.md", CALLERS]


def _without_code(page: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_each_problem_is_one_of_the_references(page):
    named = PROBLEM.findall(_without_code(page))
    assert len(set(named)) >= 5
    assert set(named) - set(STATUS) == set()


@pytest.mark.parametrize("page", PAGES)
def test_each_problem_beside_a_status_has_that_status(page):
    for status, problem in re.findall(r"\b([45]\d\d) `([a-z-]+)`", _without_code(page)):
        assert STATUS.get(problem) == status, problem


@pytest.mark.parametrize("page", PAGES)
def test_each_status_is_one_of_the_references(page):
    named = set(re.findall(r"(?<![\w/.:])([245]\d\d)(?![\w/.:]\w| %|,\d)", _without_code(page)))
    assert named
    assert named - set(re.findall(r"\b[245]\d\d\b", HTTP)) == set()


def test_each_reason_of_a_409_is_in_the_answer():
    answer = _without_code("docs/http.md").split("(why-409)=")[1].split("\n## ")[1]
    assert set(re.findall(r"^\| 409 `([a-z]+-[a-z-]+)`", answer, re.MULTILINE)) == {
        problem for problem, status in STATUS.items() if status == "409"
    }


def test_what_is_copied_for_callers_leads_nowhere_here():
    """In another documentation, a link to one of these pages would be dead."""
    _own, _, copied = _without_code(CALLERS).partition("\n---\n")
    assert "Sending a request again" in copied
    assert not re.search(r"\]\(|\{\w+\}`|Flask|flask", copied)


def test_every_recipe_of_the_callers_sends_a_key_to_the_example_api():
    page = ROOT / CALLERS
    recipes = [b.text for b in blocks(page, "python", "bash", "javascript") if "api.example" in b.text]
    assert len(recipes) == 6
    assert all(re.search(r"(?i)idempotency[-_]key|sendOnce", recipe) for recipe in recipes)


def test_callers_are_told_how_long_a_key_is_kept():
    hours = re.search(r"remember a key for (\d+) hours", _without_code(CALLERS))
    assert hours
    assert int(hours[1]) * 3600 == Settings.ttl
