"""What the pages must say of settings and options, as the library itself reads them.

A page has it as Markdown, so that it can be read without Sphinx. Where a test finds another text, its
message has the one to paste.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from flask_idempotency.web.settings import OPTIONS, PREFIX, SETTINGS, RouteOptions
from tests.docs.pages import ROOT

_DEFAULTS = {
    "key": "the header `IDEMPOTENCY_HEADER`",
    "scope": "the application's",
    "store": "all except 401, 403, 408, 425 and 429, and in atomic operations those of 500 and above",
    "max_request_bytes": "the application's limits",
    "name": "the endpoint",
    "authorize_replay": "every replay is allowed",
    "other_binds": "none",
}
"""Where neither a setting of the same name nor the value in ``Route`` says it."""


def settings() -> Iterator[str]:
    """The row of every setting, in the order of the code, as :func:`without_prose` leaves it."""
    for name, row in SETTINGS.items():
        yield _row(name, _shown(row.default), "…", _allowed(row))


def without_prose(row: str) -> str:
    """The row of a setting without what it means, which the page alone says."""
    name, default, meaning = row.removeprefix("| ").split(" | ")
    return f"| {name} | {default} | … Allowed: {meaning.rpartition('Allowed: ')[2]}"


def options() -> Iterator[str]:
    """The row of every option, in the order of ``RouteOptions``."""
    for name, meaning in re.findall(
        r"\* ``(\w+)``: (.*?)(?=\n\s*\n|\n\s*\* ``|\Z)", RouteOptions.__doc__ or "", re.DOTALL
    ):
        if name in _DEFAULTS:
            default = _DEFAULTS[name]
        elif f"{PREFIX}{name.upper()}" in SETTINGS:
            default = f"`{PREFIX}{name.upper()}`"
        else:
            default = f"`{OPTIONS[name].default!r}`"
        text = " ".join(meaning.split())
        yield _row(name, default, text[0].upper() + text[1:], _allowed(OPTIONS[name]))


def _allowed(row: Any) -> str:
    return str(row.metadata["allowed"])


def _row(name: str, default: str, meaning: str, allowed: str) -> str:
    cells = [f"`{name}`", default, f"{meaning} Allowed: {allowed}."]
    assert not any("|" in cell for cell in cells), f"{name}: it would end its cell"
    return f"| {' | '.join(cells)} |"


def _shown(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = f"`{value!r}`"
    if value == 86400:
        return f"{text} (one day)"
    if isinstance(value, int) and value and value % 1024**2 == 0:
        return f"{text} ({value // 1024**2} MiB)"
    return text


def extension(name: str) -> Any:
    """The module of a Sphinx extension of ``docs/_ext``, without Sphinx."""
    path = ROOT / f"docs/_ext/{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, {name: module, **_without_sphinx()}):
        spec.loader.exec_module(module)
    return module


def _without_sphinx() -> dict[str, Any]:
    """What the extension imports for its events only; the tests do without Sphinx."""
    names = ("docutils", "docutils.nodes", "sphinx", "sphinx.application")
    stubs: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    stubs["docutils"].nodes = stubs["docutils.nodes"]
    stubs["sphinx.application"].Sphinx = object
    return stubs
