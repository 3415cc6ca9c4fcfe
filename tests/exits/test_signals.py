"""An exit, or a time limit, inside a statement: it passes as itself, and the retry books once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from rq.timeouts import JobTimeoutException

from tests.exits import greenlets, shop

ROOT = Path(__file__).parents[2]
ERRORS = {
    "job": [SystemExit, SoftTimeLimitExceeded, JobTimeoutException],
    "atomic_job": [SystemExit, SoftTimeLimitExceeded, JobTimeoutException],
    "atomic": [SystemExit, KeyboardInterrupt],
    "leased": [SystemExit, KeyboardInterrupt],
}


def expected(name: str) -> dict[str, int]:
    """A charge was made before: were it stored as failed, nobody would ever book it."""
    return {"left": 0, "attempt": 2, "payments": 1, "charges": int(name in ("job", "leased"))}


@pytest.mark.parametrize(
    ("name", "error"), [(name, error) for name, errors in ERRORS.items() for error in errors]
)
def test_a_signal_inside_a_statement(shop_app, interrupted, name, error):
    def cut_off() -> None:
        with pytest.raises(error), interrupted(error()):
            shop.call(shop_app, name, 1)

    assert shop.cut_off_and_retried(shop_app, name, cut_off) == expected(name)


def test_a_timeout_of_gevent_inside_a_statement(database, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, greenlets.__file__]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: expected(name) for name in shop.CALLS}
