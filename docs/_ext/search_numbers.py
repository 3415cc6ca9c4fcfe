"""The search finds numbers, such as 409, and no decisions.

Sphinx leaves numbers out of its index, and of what was asked.
"""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.search.en import SearchEnglish

SKIPS = r" || queryTerm.match(/^\d+$/)"


class WithNumbers(SearchEnglish):
    """English, with words that are numbers."""

    def word_filter(self, word: str) -> bool:
        """Return True if a word belongs in the index."""
        return word not in self.stopwords


def let_numbers_pass(app: Sphinx, exception: Exception | None) -> None:
    """Take the condition out of the script that searches; fails if another Sphinx has another one."""
    script = app.outdir / "_static/searchtools.js"
    if exception or app.builder.format != "html" or not script.exists():
        return
    text = script.read_text(encoding="utf-8")
    if SKIPS in text:
        script.write_text(text.replace(SKIPS, ""), encoding="utf-8")
    elif r"match(/^\d+$/)" in text:
        raise RuntimeError(f"{script.name} skips numbers in a way that {__name__} does not know")


def leave_decisions_out(_app: Sphinx, env: BuildEnvironment) -> None:
    """Keep the reasons out of the search: who asks for a 409 wants the page that says what to do."""
    for page in env.found_docs:
        if page.startswith("decisions/0"):
            env.metadata[page]["nosearch"] = "yes"


def setup(app: Sphinx) -> dict[str, Any]:
    """Give Sphinx the language and the event."""
    app.add_search_language(WithNumbers)
    app.connect("env-updated", leave_decisions_out)
    app.connect("build-finished", let_numbers_pass)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
