"""The Sphinx extension that writes settings, options and commands into the pages, without Sphinx."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any
from unittest.mock import patch

from tests.docs.pages import ROOT


def reference() -> Any:
    """The Sphinx extension that makes the lists, without Sphinx."""
    path = ROOT / "docs/_ext/reference.py"
    spec = importlib.util.spec_from_file_location("reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, {"reference": module, **_without_sphinx()}):
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
