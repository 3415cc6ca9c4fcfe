"""The directive ``command``: what ``flask idempotency NAME --help`` says, as text of the page."""

from __future__ import annotations

import inspect
import re
from typing import Any

import click
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from flask_idempotency.cli import cli


def help_of(name: str, seen: dict[str, str]) -> str:
    """The help of a command, as Markdown: its text, and a list of its options.

    ``seen`` has the options that the page has explained, and by which command: of those only the name
    is said.
    """
    command = cli.commands[name]
    context = click.Context(command, info_name=name)
    own = [param for param in command.params if param.name != "json"]  # which the page says once
    records = filter(None, [param.get_help_record(context) for param in own])
    said = [f"- `{option}`: {_marked(text)}" for option, text in records if text]
    new = [each for each in said if seen.setdefault(each, name) == name]
    for first in dict.fromkeys(seen[each] for each in said if each not in new):
        known = [each for each in said if seen[each] == first]
        names = ", ".join("`" + re.findall("--[a-z-]+", each)[0] + "`" for each in known)
        new.append(f"- {names}: as for [{first}](#{first})")
    return "\n".join([_marked(inspect.cleandoc(command.help or "")), "", *new])


def _marked(text: str) -> str:
    """``text`` with its options as code, where they are not already."""
    return re.sub(r"`[^`]*`|(--[a-z]+(?:-[a-z]+)*)", lambda it: f"`{it[1]}`" if it[1] else it[0], text)


class Command(SphinxDirective):
    """``{command} NAME``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Parse the help as if it stood on the page."""
        whole = nodes.container()
        seen = self.env.temp_data.setdefault("commands", {})
        lines = help_of(self.arguments[0], seen).splitlines()
        self.state.nested_parse(StringList(lines, source=self.env.docname), 0, whole)
        return whole.children


def setup(app: Sphinx) -> dict[str, Any]:
    """Give Sphinx the directive."""
    app.add_directive("command", Command)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
