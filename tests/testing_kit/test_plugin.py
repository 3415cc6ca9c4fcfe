"""The plugin of pytest gives the fixture, and costs nothing until it is used."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

from flask_idempotency.testing import age


def test_the_fixture_is_there(idempotency_age):
    assert idempotency_age is age


def test_what_pytest_imports_at_its_start_imports_nothing_else():
    (plugin,) = entry_points(group="pytest11", name="flask_idempotency")
    loads = f"import sys, {plugin.value}; print({{'flask', 'flask_idempotency'}} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", loads], text=True).strip() == "set()"
