"""The settings and the options, written into the page from the tables that the library reads.

Two directives, both without content: ``settings`` lists ``flask_idempotency.config.SETTINGS``, and
``options`` lists what ``flask_idempotency.options.RouteOptions`` says. Nothing is said twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from flask_idempotency.config import PREFIX, SETTINGS
from flask_idempotency.options import _CHECKS, Route, RouteOptions


@dataclass(frozen=True)
class Entry:
    """One setting or option: all four are Markdown."""

    name: str
    default: str
    allowed: str
    meaning: str

    def markdown(self) -> str:
        """The entry as a ``confval`` directive, which gives it an anchor and a place in the index."""
        return (
            f"````{{confval}} {self.name}\n:type: {json.dumps(self.allowed)}\n"
            f":default: {json.dumps(self.default)}\n\n{self.meaning}\n````\n"
        )


def settings() -> Iterator[Entry]:
    """Every setting, in the order of the table."""
    for setting in SETTINGS:
        yield Entry(PREFIX + setting.name, _shown(setting), setting.allowed, setting.meaning)


def options() -> Iterator[Entry]:
    """Every option, in the order of ``RouteOptions``."""
    of_app = {setting.name.lower(): setting.name for setting in SETTINGS}
    allowed = {name: text for name, _, text in _CHECKS}
    for name, meaning in re.findall(
        r"\* ``(\w+)``: (.*?)(?=\n\s*\* ``|\Z)", RouteOptions.__doc__ or "", re.DOTALL
    ):
        if name in _DEFAULTS:
            default = _DEFAULTS[name]
        elif name in of_app:
            default = f"`{PREFIX}{of_app[name]}`"
        else:
            default = f"`{getattr(Route, name)!r}`"
        text = " ".join(meaning.split())
        yield Entry(name, default, allowed[name], text[0].upper() + text[1:])


_DEFAULTS = {
    "key": "the header `IDEMPOTENCY_HEADER`",
    "scope": "the application's",
    "store": "below 500, except 401, 403, 408, 425 and 429",
    "name": "the endpoint",
    "authorize_replay": "every replay is allowed",
    "other_binds": "none",
}
"""Where neither a setting of the same name nor the value in ``Route`` says it."""


def _shown(setting: Any) -> str:
    value = setting.default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = f"`{value!r}`"
    if value == 86400:
        return f"{text} (one day)"
    if isinstance(value, int) and value and value % 1024**2 == 0:
        return f"{text} ({value // 1024**2} MiB)"
    return text


class SettingsDirective(SphinxDirective):
    """Lists every setting."""

    def run(self) -> list[nodes.Node]:
        """Parse the entries in place."""
        return self.parse_text_to_nodes("\n".join(entry.markdown() for entry in settings()))


class OptionsDirective(SphinxDirective):
    """Lists every option."""

    def run(self) -> list[nodes.Node]:
        """Parse the entries in place."""
        return self.parse_text_to_nodes("\n".join(entry.markdown() for entry in options()))


def setup(app: Sphinx) -> dict[str, Any]:
    """Tell Sphinx about the directives."""
    app.add_directive("settings", SettingsDirective)
    app.add_directive("options", OptionsDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
