"""The plugin of pytest."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(*arguments, **environment):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def plugin():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    name, _, module = setup["options.entry_points"]["pytest11"].strip().partition(" = ")
    assert name == "flask_idempotency"
    assert module in setup["options"]["py_modules"].split()
    return module


def test_it_costs_nothing_until_it_is_used():
    said = python(
        "-c",
        f"import sys, pytest; before = set(sys.modules); import {plugin()};"
        "print(sorted(set(sys.modules) - before))",
    )
    assert said.stdout == f"['{plugin()}']\n", said.stderr


def test_it_gives_the_fixture(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "from flask_idempotency.testing import age\n\n"
        "def test_it(idempotency_age):\n"
        "    assert idempotency_age is age\n"
    )
    said = python(
        "-m", "pytest", "-q", "-p", plugin(), "-p", "no:cacheprovider", str(tmp_path),
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
    )  # fmt: skip
    assert "1 passed" in said.stdout, said.stdout
