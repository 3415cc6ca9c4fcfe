"""The built documentation on a phone, in its search, and on paper."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from playwright.sync_api import Browser, Page

from tests.docs.pages import ROOT
from tests.served import served

PAPER = 718  # pixels of 1/96 inch: A4 without the margins of 1 cm that Chromium makes

CUT_OFF = """(paper) => {
  const width = document.documentElement.clientWidth, found = [];
  const scrolls = (it) => /auto|scroll/.test(getComputedStyle(it).overflowX);
  const name = (it) => it.tagName + "." + it.className + ": " + it.textContent.trim().slice(0, 50);
  for (const it of document.querySelectorAll("article *")) {
    const box = it.getBoundingClientRect();
    if (!box.width || !box.height) continue;
    if (paper && scrolls(it) && it.scrollWidth > it.clientWidth + 1) found.push(name(it));
    const code = it.closest("pre");  // where it wraps, the space at the end of a line hangs over
    if (code && it !== code && getComputedStyle(code).whiteSpace === "pre-wrap") continue;
    let above = it.parentElement;
    while (above && !(scrolls(above) && !paper))
      above = above.tagName === "ARTICLE" ? null : above.parentElement;
    if (!above && box.right > width + 1) found.push(name(it));
  }
  return found;
}"""
"""Elements that reach beyond the page; on paper, where nothing scrolls, what would have to, too."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "sphinx", "-q", "-d", folder / "trees", ROOT / "docs"]
    subprocess.run([*command, folder / "html"], check=True)
    return folder / "html"


@pytest.fixture(scope="module")
def pages(built: Path) -> list[str]:
    names = sorted(str(path.relative_to(built)) for path in built.glob("**/*.html"))
    assert "http.html" in names
    return [name for name in names if not name.startswith("_")]


@pytest.fixture
def docs(built: Path, chromium: Browser) -> Iterator[Page]:
    with served(Flask("docs", static_folder=built, static_url_path="")) as url:
        page = chromium.new_page(base_url=url)
        yield page
        page.close()


@pytest.mark.parametrize(("media", "width"), [("screen", 390), ("print", PAPER)])
def test_no_page_is_wider_than_a_phone_or_cut_off_on_paper(docs, pages, media, width):
    cut = {}
    docs.emulate_media(media=media)
    docs.set_viewport_size({"width": width, "height": 1000})
    for name in pages:
        docs.goto(f"/{name}")
        if media == "print":
            for sidebar in (".sidebar-drawer", ".toc-drawer", ".mobile-header"):
                assert not docs.locator(sidebar).is_visible(), (name, sidebar)
        elif docs.evaluate("document.querySelector('.content').scrollWidth") > width:  # furo's
            cut[name] = "scrolls sideways"
        if found := docs.evaluate(CUT_OFF, media == "print"):
            cut[name] = found
    assert cut == {}


def test_the_search_finds_a_status(docs):
    docs.goto("/search.html?q=409")
    docs.get_by_text("Search finished").wait_for()
    links = docs.locator("#search-results li a").evaluate_all("links => links.map(it => it.pathname)")
    assert links[0] == "/http.html"
    assert not [link for link in links if "/decisions/0" in link]
