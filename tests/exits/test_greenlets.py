"""``gevent.Timeout`` inside a statement: it passes as itself, and the retry books."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.exits import greenlets

ROOT = Path(__file__).parents[2]


def test_a_timeout_of_gevent_inside_a_statement_passes_as_itself(database, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, greenlets.__file__]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    retried = {"ends": "Timeout", "left": 0, "result": 2, "payments": 1}
    assert json.loads(done.stdout) == {
        "job": {**retried, "charges": 1},
        "atomic_job": {**retried, "charges": 0},
        "atomic": {**retried, "charges": 0},
        "leased": {**retried, "charges": 1},
        "plain": {"status": 201},
    }
