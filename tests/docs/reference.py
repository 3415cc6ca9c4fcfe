"""The Sphinx extensions of ``docs/_ext``, without Sphinx."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any
from unittest.mock import patch

from tests.docs.pages import ROOT


def reference() -> Any:
    """The one that writes settings, options and commands into the pages."""
    return extension("reference")


def extension(name: str) -> Any:
    """The module of an extension."""
    path = ROOT / f"docs/_ext/{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, {name: module, **_without_sphinx()}):
        spec.loader.exec_module(module)
    return module


def _without_sphinx() -> dict[str, Any]:
    """What the extension imports for its directives only; the tests do without Sphinx."""
    names = ("docutils", "docutils.nodes", "sphinx", "sphinx.application", "sphinx.util",
             "sphinx.util.docutils")  # fmt: skip
    stubs: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    stubs["docutils"].nodes = stubs["docutils.nodes"]
    stubs["sphinx.application"].Sphinx = object
    stubs["sphinx.util.docutils"].SphinxDirective = object
    return stubs
