"""The pictures of the pages: each can be read, takes nothing from elsewhere, and is true."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from flask_idempotency.cli.listing import STATES
from flask_idempotency.core.machine import Situation
from flask_idempotency.core.storable import NOT_STORED
from flask_idempotency.web.settings import SETTINGS, Settings
from tests.docs.pages import PAGES, ROOT

PICTURES = sorted((ROOT / "docs/pictures").glob("*.svg"))
SCREENSHOTS = sorted((ROOT / "docs/figures").glob("*.png"))
SVG = "{http://www.w3.org/2000/svg}"


def parsed(picture: Path) -> ET.Element:
    return ET.parse(picture).getroot()  # noqa: S314  # a file of ours


def texts(name: str, kind: str = "") -> list[str]:
    """The texts of a picture, or those of one class."""
    found = parsed(ROOT / f"docs/pictures/{name}.svg").iter(f"{SVG}text")
    return [str(text.text) for text in found if kind in (text.get("class") or "").split() or not kind]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_says_what_it_shows_and_stands_alone(picture: Path):
    root = parsed(picture)
    named = [root.findtext(f"{SVG}title"), root.findtext(f"{SVG}desc")]
    assert all(named)
    assert (root.tag, root.get("role")) == (f"{SVG}svg", "img")
    source = picture.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in source
    assert "<script" not in source
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg\")|href|@import|url\((?!#)", source)
    assert len(source) < 12_000


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_on_a_page_with_its_words(picture: Path):
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    [alternative] = re.findall(rf"!\[([^\]]+)\]\(pictures/{picture.name}\)", "\n".join(pages))
    assert len(alternative) > 100


def test_there_are_screenshots():
    assert len(SCREENSHOTS) >= 3


@pytest.mark.parametrize("picture", SCREENSHOTS, ids=lambda path: path.name)
def test_a_screenshot_is_small_and_on_a_page_with_its_words_and_has_a_script(picture: Path):
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    [alternative] = re.findall(rf"!\[([^\]]+)\]\(figures/{picture.name}\)", "\n".join(pages))
    assert len(alternative) > 60
    assert picture.stat().st_size < 200_000
    assert f'"{picture.name}"' in (ROOT / "laboratory/screenshots.py").read_text(encoding="utf-8")


def test_the_states_are_those_of_a_record():
    assert set(texts("states", "state")) == set(STATES)
    written = " ".join(texts("states")).replace("_", " ")
    assert [s.value for s in Situation if s.value not in written] == []
    arrows = parsed(ROOT / "docs/pictures/states.svg").iter(f"{SVG}path")
    moved = {(arrow.get("data-from"), arrow.get("data-to")) for arrow in arrows} - {(None, None)}
    ends = " ".join(f"{start} {end}" for start, end in moved).split()
    assert set(ends) == {*STATES, "absent", "expired"} - {"observed", "erased"}
    unstored = re.findall(r"\b4\d\d\b", " ".join(texts("states")))
    assert set(map(int, unstored)) == set(NOT_STORED)


def test_each_renewal_of_the_lease_is_counted_from_its_own_time():
    [lease] = (int(n) for n in re.findall(r"lease=(\d+)", " ".join(texts("lease"))))
    assert lease == Settings.lease
    renewed = [int(text.removesuffix(" s")) for text in texts("lease", "renewal")]
    assert texts("lease", "end")[-1] == f"{renewed[-1] + lease} s"
    assert {f"until {at + lease} s" for at in renewed} <= set(texts("lease"))


def test_each_store_can_be_chosen():
    is_allowed = SETTINGS["IDEMPOTENCY_STORE"].metadata["is_allowed"]
    assert all(map(is_allowed, texts("which-store", "store")))
    columns = (ROOT / "docs/for-you.md").read_text(encoding="utf-8").partition("\n| | ")[2]
    named = re.findall(r"`(\w+)`", columns.partition("\n")[0])
    assert sorted(texts("which-store", "store")) == sorted(named)


def test_the_killed_worker_leaves_two_payments_without_and_one_with():
    assert texts("killed-worker", "lane") == ["Without", "With Flask-Idempotency"]
    assert texts("killed-worker", "strong") == ["two payments", "one payment"]
    boxes = [
        rect.get("class")
        for rect in parsed(ROOT / "docs/pictures/killed-worker.svg").iter(f"{SVG}rect")
    ]
    assert boxes == ["paper", "twice", "once"]


def test_the_killed_worker_stands_still_for_who_wants_no_motion():
    source = (ROOT / "docs/pictures/killed-worker.svg").read_text(encoding="utf-8")
    [moves] = re.findall(r"animation[^;}]*", source)
    assert source.index("(prefers-reduced-motion: no-preference)") < source.index(moves)


def test_the_readme_shows_the_killed_worker_with_its_words():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [alternative] = re.findall(r"!\[([^\]]+)\]\(docs/pictures/killed-worker\.svg\)", readme)
    assert all(word in alternative for word in ("killed", "twice", "once"))
