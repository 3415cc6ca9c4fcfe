"""Each path of the front page, for somebody with one part in a project, takes half an hour to read."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT

WORDS_A_MINUTE = 230
"""What grown-ups read of English that is not fiction, silently: 238, by the meta-analysis of Brysbaert
(2019), https://doi.org/10.1016/j.jml.2019.104047; a little less, for the code."""
MINUTES = 30

INDEX = (ROOT / "docs/index.md").read_text(encoding="utf-8")
PATHS = dict(re.findall(r"^\| (.+?) \| (\[.+) \|$", INDEX.partition("| You | Read,")[2], re.MULTILINE))


def page(name: str) -> str:
    """A page with what it includes."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert name != "index.md", "it includes a part of another page"
    return re.sub(
        r"```\{include\} \.\./(\S+)\n(?:[^`]*\n)?```",
        lambda found: (ROOT / found[1]).read_text(encoding="utf-8"),
        text,
    )


def slug(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def section(text: str, anchor: str) -> str:
    """From a heading, or its label, to the next one that is not below it."""
    bare = re.sub(
        r"^```.*?^```$",
        lambda code: code[0].replace("\n#", "\n\0"),
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
    for found in re.finditer(r"(?m)^(?:\(([\w-]+)\)=\n)?(#+) (.+)$", bare):
        if anchor in {found[1], slug(found[3])}:
            end = re.search(rf"(?m)^#{{1,{len(found[2])}}} ", bare[found.end() :])
            return bare[found.start() : found.end() + end.start() if end else None]
    raise AssertionError(f"no section {anchor}")


def minutes(path: str) -> float:
    """All words count, those of code, too."""
    links = re.findall(r"\]\(([\w-]+\.md)#?([\w-]*)\)", path)
    assert len(links) == path.count("](")
    parts = [section(page(name), anchor) if anchor else page(name) for name, anchor in links]
    return sum(len(part.split()) for part in parts) / WORDS_A_MINUTE


def test_there_is_a_path_for_each_of_five():
    assert len(PATHS) == 5


@pytest.mark.parametrize("who", PATHS)
def test_a_path_takes_half_an_hour_at_most(who):
    assert 10 <= minutes(PATHS[who]) <= MINUTES
