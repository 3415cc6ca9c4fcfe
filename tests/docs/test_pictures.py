"""The pictures of the pages: each can be read, takes nothing from elsewhere; the states are ours."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from flask_idempotency.cli.listing import STATES
from flask_idempotency.core.machine import Situation
from flask_idempotency.core.storable import NOT_STORED
from tests.docs.pages import ROOT

PICTURES = sorted((ROOT / "docs/pictures").glob("*.svg"))
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
