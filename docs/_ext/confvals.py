"""Gives each row of the tables of settings and options an anchor for the role ``confval``."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

PAGE = "configuration"


def note_rows(app: Sphinx, doctree: nodes.document) -> None:
    """Make a target of the name in the first cell of each row."""
    if app.env.docname != PAGE:
        return
    std = app.env.domains.standard_domain
    for row in doctree.findall(nodes.row):
        if name := next(row[0].findall(nodes.literal), None):
            anchor = f"confval-{name.astext()}"
            name.parent["ids"].append(anchor)
            std.note_object("confval", name.astext(), anchor, location=row)


def setup(app: Sphinx) -> dict[str, Any]:
    """Give Sphinx the event."""
    app.connect("doctree-read", note_rows)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
