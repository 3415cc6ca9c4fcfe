"""Settings, options and commands, written into the pages from what the library itself reads.

Three directives without content: ``settings`` lists ``flask_idempotency.web.setup.settings.SETTINGS``,
``options`` lists what ``flask_idempotency.web.setup.options.RouteOptions`` says, and ``command`` with
the name of a command shows its help. Nothing is said twice.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import click
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from flask_idempotency.cli import cli
from flask_idempotency.web.setup import options as route_options
from flask_idempotency.web.setup import settings as config
from flask_idempotency.web.setup.options import CHECKS, Route, RouteOptions
from flask_idempotency.web.setup.settings import PREFIX, SETTINGS


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
    for name, meaning in re.findall(
        r"\* ``(\w+)``: (.*?)(?=\n\s*\n|\n\s*\* ``|\Z)", RouteOptions.__doc__ or "", re.DOTALL
    ):
        if name in _DEFAULTS:
            default = _DEFAULTS[name]
        elif name in of_app:
            default = f"`{PREFIX}{of_app[name]}`"
        else:
            default = f"`{getattr(Route, name)!r}`"
        text = " ".join(meaning.split())
        yield Entry(name, default, CHECKS[name][1], text[0].upper() + text[1:])


_DEFAULTS = {
    "key": "the header `IDEMPOTENCY_HEADER`",
    "scope": "the application's",
    "store": "all except 401, 403, 408, 425 and 429, and in atomic operations those of 500 and above",
    "name": "the endpoint",
    "fingerprint": "`'request'`, or what `IDEMPOTENCY_PROFILE` fixes",
    "authorize_replay": "every replay is allowed",
    "other_binds": "none",
    "resumable": "`False`",
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


def command(name: str) -> str:
    """What ``flask idempotency NAME --help`` says, as Markdown."""
    of_group = cli.commands[name]
    context = click.Context(of_group, info_name=name)
    records = [param.get_help_record(context) for param in of_group.params]
    lines = [f"- `{option}`: {_marked(text)}" for option, text in filter(None, records) if text]
    text = _marked(inspect.cleandoc(of_group.help or ""))
    return text + "\n\n" + "\n".join(lines)


def _marked(text: str) -> str:
    """``text`` with its options as code, where they are not already."""
    return re.sub(r"`[^`]*`|(--[a-z]+(?:-[a-z]+)*)", lambda it: f"`{it[1]}`" if it[1] else it[0], text)


class _Directive(SphinxDirective):
    """Parses Markdown in place, and again when the module that it comes from has changed."""

    source: ModuleType

    def markdown(self) -> str:
        """The text of the directive."""
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        """Parse the text in place."""
        self.env.note_dependency(str(self.source.__file__))
        return self.parse_text_to_nodes(self.markdown())


class SettingsDirective(_Directive):
    """Lists every setting."""

    source = config

    def markdown(self) -> str:
        """All settings."""
        return "\n".join(entry.markdown() for entry in settings())


class OptionsDirective(_Directive):
    """Lists every option."""

    source = route_options

    def markdown(self) -> str:
        """All options."""
        return "\n".join(entry.markdown() for entry in options())


class CommandDirective(_Directive):
    """Shows a command's help."""

    required_arguments = 1

    @property
    def source(self) -> ModuleType:
        """The module that has the command."""
        return sys.modules[cli.commands[self.arguments[0]].callback.__module__]

    def markdown(self) -> str:
        """The command's help."""
        return command(self.arguments[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Tell Sphinx about the directives."""
    app.add_directive("settings", SettingsDirective)
    app.add_directive("options", OptionsDirective)
    app.add_directive("command", CommandDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
