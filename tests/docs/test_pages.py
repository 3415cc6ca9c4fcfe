"""The pages' Python runs or compiles, and every mark stands before a block."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import PAGES, RECIPES, apps, blocks, name_of


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
