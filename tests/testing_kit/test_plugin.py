"""The plugin of pytest gives the fixture, and costs nothing until it is used."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points

TEST = """
import sys

def test_it(request):
    assert "flask_idempotency" not in sys.modules
    from flask_idempotency.testing import age
    assert request.getfixturevalue("idempotency_age") is age
"""


def test_it(tmp_path):
    (plugin,) = entry_points(group="pytest11", name="flask_idempotency")
    (tmp_path / "test_it.py").write_text(TEST)
    said = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", plugin.value, "-p", "no:cacheprovider", tmp_path],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": os.getcwd()},  # noqa: PTH109
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in said.stdout, said.stdout
