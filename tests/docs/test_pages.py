"""The pages as a whole: their code runs or compiles, and nothing on them is left out or unknown."""

from __future__ import annotations

import importlib.util
import re
from xml.etree import ElementTree as ET

import pytest

import flask_idempotency
from flask_idempotency.cli.listing import STATES
from flask_idempotency.core.machine import Situation
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
def test_other_python_is_a_fragment_or_a_file_and_compiles(page):
    for block in blocks(page, "python"):
        compile(block.source, str(page), "exec")
        assert re.match(r"$|fragment$|(new app|file|append): ", block.mark), block.name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_mark_stands_before_a_block(page):
    """A mark that is misspelt or one line too high would silently mark nothing."""
    text = page.read_text(encoding="utf-8")
    marks = re.findall(r"^ *<!-- .* -->$", text, re.MULTILINE)
    on_tables = text.count("<!-- counted -->\n|")
    marked = [b for b in blocks(page, "python", "console", "http", "bash") if b.mark]
    assert len(marks) == len(marked) + on_tables
    assert not re.search(r"^ +```(python|http)", text, re.MULTILINE), "indented, so not found"


def test_contributing_names_files_that_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?!build/)[\w.-]+/[\w./-]+\.(?:py|md|svg))`", text)
    places = [ROOT, ROOT / "flask_idempotency"]
    gone = [name for name in named if not any((place / name).exists() for place in places)]
    assert named
    assert gone == []


def test_the_api_page_has_every_public_name():
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    shown = re.findall(
        r"(?m)^\.\. (?:py:|auto)(?!currentmodule)\w+:: (?:flask_idempotency\.)?([\w.]+)", text
    )
    elsewhere = {"idempotency_field", *(name for name in shown if "." in name)}
    assert sorted(set(shown) - elsewhere) == sorted(flask_idempotency.__all__)


SVG = "{http://www.w3.org/2000/svg}"
EVIDENCE = "bench/figures/evidence.md"


@pytest.mark.parametrize(
    ("page", "fewest"), [(EVIDENCE, 28), ("SECURITY.md", 20), ("bench/figures/works-with.md", 10)]
)
def test_a_page_names_only_tests_that_exist(page, fewest):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"((?:\w+/)+test_\w+\.py)\b", text))  # mostly without "tests/"
    folders = set(re.findall(r"make test ARGS=(tests/\w+)`", text))
    assert len(named) >= fewest
    paths = {f"tests/{name.removeprefix('tests/')}" for name in named} | folders
    assert {path for path in paths if not (ROOT / path).exists()} == set()


def test_the_evidence_names_only_commands_that_exist():
    """Each is a target of the Makefile, or a module."""
    text = (ROOT / EVIDENCE).read_text(encoding="utf-8")
    targets = set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    named = set(re.findall(r"`make ([\w-]+)", text))
    assert len(named) >= 12
    assert named - targets == set()
    for module in re.findall(r"`python -m ([\w.]+)", text):
        assert importlib.util.find_spec(module), module


def test_the_pages_are_as_few_and_as_short_as_it_was_decided():
    pages = sorted((ROOT / "docs").glob("*.md"))
    assert len(pages) <= 20
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 30_000


def test_the_picture_of_the_states_has_those_of_a_record():
    picture = ET.parse(ROOT / "docs/pictures/states.svg").getroot()  # noqa: S314  # a file of ours
    texts = [(str(text.text), (text.get("class") or "").split()) for text in picture.iter(f"{SVG}text")]
    assert {text for text, kinds in texts if "state" in kinds} == set(STATES)
    written = " ".join(text for text, _ in texts).replace("_", " ")
    assert [each.value for each in Situation if each.value not in written] == []
