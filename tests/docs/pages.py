"""The pages of the documentation, and the blocks of code on them.

How a block is marked, in a comment on the line before it:

* a ``python`` block without a mark runs, after the blocks before it on its page;
* ``<!-- new app: NAME -->``: so does this one, as the first of another application;
* ``<!-- fragment -->``: a piece that cannot run alone; it is compiled;
* ``<!-- file: NAME -->`` and ``<!-- append: NAME -->``: a file that the page's reader writes;
* a ``console`` block of the tutorial is typed, ``<!-- not run -->`` is left out, ``<!-- server -->``
  starts the application in the background, and ``<!-- on servers -->`` is typed where there are some;
* a ``console`` block of the page of commands is run on a shop with seven records;
* an ``http`` block is a request, or the answer to the last request before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BUILT = ROOT / "docs/_build"
RECIPES = ROOT / "example/recipes"
PAGES = [p for p in sorted(ROOT.glob("docs/**/*.md")) if _BUILT not in p.parents]
PAGES += [ROOT / "CONTRIBUTING.md", ROOT / "bench/figures/works-with.md", *sorted(RECIPES.glob("*.md"))]

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^(?P<fence>`{3,})(?P<language>[a-z]+)\n"
    r"(?P<text>.*?)^(?P=fence)$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A block of code on a page; ``line`` is where its text begins."""

    page: Path
    line: int
    language: str
    mark: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def source(self) -> str:
        """The text with as many lines before it as on its page, so that errors name the right one."""
        return "\n" * (self.line - 1) + self.text


def blocks(page: Path, *languages: str) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        if found["language"] in languages:
            line = text.count("\n", 0, found.start("text")) + 1
            yield Block(page, line, found["language"], found["mark"] or "", found["text"])


def apps(page: Path) -> dict[str, list[Block]]:
    """The blocks that run, by the name of their application. That of the first is empty."""
    name, found = "", {"": list[Block]()}
    for block in blocks(page, "python"):
        kind, _, new = block.mark.partition(": ")
        if kind == "new app":
            name, found[new] = new, []
        if kind in {"", "new app"}:
            found[name].append(block)
    return found


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each ``$ command`` of a block with the answer that is shown below it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


def looks_like(answer: str, shown: str) -> bool:
    """Whether the answer is the one shown; ``...`` stands for anything, white space counts little.

    What is ``0 s`` old may be older: the machine may be busy.
    """
    lines = [" ".join(line.split()) for line in shown.splitlines() if line.strip()]
    pattern = "\n".join(
        r"(?:[^\n]*\n)*?[^\n]*" if line == "..." else re.escape(line).replace(r"\.\.\.", "[^\n]*")
        for line in lines
    )
    real = "\n".join(" ".join(line.split()) for line in answer.splitlines() if line.strip())
    return re.fullmatch(pattern.replace(r"\ 0\ s", r"\ \d+\ s"), real) is not None
