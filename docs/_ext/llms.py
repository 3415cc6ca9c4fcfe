"""Pages for programs that read: ``llms.txt``, and what ``sphinx_markdown_builder`` needs to know.

``llms.txt`` has the form of https://llmstxt.org: a title, a summary, text without headings, and lists
of links under headings. The text is a recipe of the example; the lists are the navigation and the map
of ``index.md``, so nothing is said twice. Each link leads to what the builder ``markdown`` writes.
"""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

PAGE = "example/recipes/assistants.md"


def llms_txt(docs: Path) -> str:
    """The text of ``llms.txt`` for the pages in ``docs``, with links relative to its own place."""
    setup = configparser.ConfigParser()
    setup.read(docs.parent / "setup.cfg", encoding="utf-8")
    _title, text = _read(docs.parent / PAGE).split("\n", 1)
    text = text.replace("](../../docs/", "](")
    text = re.sub(r"(?m)^<!-- .* -->\n", "", text)
    text = re.sub(r"(?m)^## (.*)$", r"**\1**", text)
    parts = [f"# Flask-Idempotency\n\n> {setup['metadata']['description']}.", text.strip()]
    for section, links in _sections(docs):
        parts.append(f"## {section}\n\n" + "\n".join(links))
    return "\n\n".join(parts) + "\n"


def _sections(docs: Path) -> list[tuple[str, list[str]]]:
    """The sections of the navigation with their links. What is not in it comes last, as optional."""
    index = _read(docs / "index.md")
    notes: dict[str, str] = {}
    for note, read in re.findall(r"(?m)^\| (.+?) \| (\[.+) \|$", index):
        for title, page in re.findall(r"\[([^\]]+)\]\(([\w/-]+\.md)\)", read):
            notes.setdefault(page, f"- [{title}]({page}): {note}")
    found = re.findall(r"```\{toctree\}\n:hidden:\n:caption: (.+)\n\n((?:.+\n)+)```", index)
    sections = [(caption, [notes[f"{name}.md"] for name in names.split()]) for caption, names in found]
    rest = {str(path.relative_to(docs)) for path in docs.glob("**/*.md")} - notes.keys()
    pages = sorted(page for page in rest if not page.startswith(("_", "figures/")))
    return [*sections, ("Optional", [f"- [{_title_of(docs / page)}]({page})" for page in pages])]


def _title_of(page: Path) -> str:
    [title] = re.findall(r"\A(?:\(.*\)=\n)?# (.+)", _read(page))
    return str(title)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def links(text: str) -> list[str]:
    """The files that the links of a Markdown text lead to, in their order."""
    return re.findall(r"\]\((?!https?:)([^)#]+)", text)


def write(app: Sphinx, error: Exception | None) -> None:
    """Write ``llms.txt`` beside the pages. Raises ``FileNotFoundError`` if a link leads nowhere."""
    if error is None and app.builder.name == "markdown":
        text, out = llms_txt(Path(app.srcdir)), Path(app.outdir)
        if missing := [link for link in links(text) if not (out / link).is_file()]:
            raise FileNotFoundError(f"llms.txt leads to what was not built: {', '.join(missing)}")
        (out / "llms.txt").write_text(text, encoding="utf-8")


def prepare(app: Sphinx, doctree: nodes.document, _page: str) -> None:
    """Turn what ``sphinx_markdown_builder`` leaves out into what it writes.

    That is the target of a link to the same page, the ``*`` of a signature, and the HTML's pictures.
    """
    if app.builder.name == "markdown":
        for link in doctree.findall(nodes.reference):
            if "refid" in link:
                link["refuri"] = f"#{link['refid']}"
        for star in list(doctree.findall(nodes.abbreviation)):
            star.replace_self(nodes.Text(star.astext()))
        for image in doctree.findall(nodes.image):
            image["uri"] = f"_images/{Path(image['uri']).name}"


def setup(app: Sphinx) -> dict[str, Any]:
    """Tell Sphinx when to call these."""
    app.connect("doctree-resolved", prepare)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
