"""The pages as a whole: their code runs or compiles, and nothing on them is left out or unknown."""

from __future__ import annotations

import ast
import re

import pytest

import flask_idempotency
from tests.docs.pages import PAGES, ROOT, apps, blocks, name_of


@pytest.mark.parametrize(
    ("page", "name"),
    [pytest.param(page, name, id=f"{name_of(page)} {name}") for page in PAGES for name in apps(page)],
)
def test_the_python_of_each_application_runs(page, name, names):
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


def test_the_api_page_has_every_public_name():
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    shown = re.findall(
        r"(?m)^\.\. (?:py:|auto)(?!currentmodule)\w+:: (?:flask_idempotency\.)?([\w.]+)", text
    )
    elsewhere = {"idempotency_field", *(name for name in shown if "." in name)}
    assert sorted(set(shown) - elsewhere) == sorted(flask_idempotency.__all__)


def test_no_signature_shows_a_name_that_is_not_public():
    """The API page has the defaults as the source has them."""
    for path in sorted((ROOT / "flask_idempotency").rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and re.match(r"[a-z]|__init__$", function.name):
                defaults = [*function.args.defaults, *filter(None, function.args.kw_defaults)]
                assert not any(ast.unparse(default).startswith("_") for default in defaults), (
                    f"{path.name}: {function.name}"
                )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_page_is_in_the_map(page):
    """Sphinx would say so too, but not in the words of the front page."""
    if page.parent == ROOT / "docs" and page.name != "index.md":
        assert f"({page.name})" in (ROOT / "docs/index.md").read_text(encoding="utf-8")


def test_the_guarantees_name_only_tests_that_exist():
    text = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)+test_\w+\.py)`", text))  # in the table without "tests/"
    assert len(named) > 20
    assert {
        name for name in named if not (ROOT / "tests" / name.removeprefix("tests/")).is_file()
    } == set()
