"""Tries the package of an environment that has nothing else: ``python -I .ci/smoke.py``.

It runs the quickstart of the README, on SQLite, and the commands.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
FILES = ["py.typed", "console/static/console.css", "console/templates/base.html"]
"""A file of each kind that is no module."""


def installed() -> None:
    """The package comes from the environment, whole and of one version."""
    import flask_idempotency

    for module in ("flask_idempotency", "pytest_flask_idempotency"):
        spec = find_spec(module)
        assert spec, f"{module} is missing"
        assert Path(str(spec.origin)).is_relative_to(sys.prefix), f"{module} is {spec.origin}"
    assert flask_idempotency.__version__ == version("flask-idempotency")
    missing = [file for file in FILES if not files("flask_idempotency").joinpath(file).is_file()]
    assert not missing, f"the package lacks {missing}"
    for name in flask_idempotency.__all__:
        getattr(flask_idempotency, name)


def quickstart(folder: Path) -> None:
    """A payment that is sent twice is made once."""
    [source] = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    (folder / "app.py").write_text(source, "utf-8")
    sys.path.insert(0, str(folder))
    from app import app  # type: ignore[import-not-found]

    client = app.test_client()
    headers = {"X-Account": "me", "Idempotency-Key": "1"}
    first, retry = (client.post("/payments", json={"amount": 5}, headers=headers) for _ in range(2))
    other = client.post("/payments", json={"amount": 6}, headers=headers)
    without = client.post("/payments", json={"amount": 5}, headers={"X-Account": "me"})
    answers = [answer.status_code for answer in (first, retry, other, without)]
    assert answers == [201, 201, 422, 400], answers
    assert retry.data == first.data
    assert retry.headers["Idempotent-Replayed"] == "true"


def commands(folder: Path) -> None:
    """The entry point of Flask's commands is there, and finds the payment."""
    flask = [sys.executable, "-m", "flask", "--app", "app", "idempotency"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command, shown in {"check": "1 of 1 endpoints", "list": "completed"}.items():
        done = subprocess.run(
            [*flask, command], cwd=folder, env=environment, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, f"flask idempotency {command}: {done.stdout}{done.stderr}"
        assert shown in done.stdout, f"flask idempotency {command}: {done.stdout}"


def main() -> None:
    """Try all of it, in a folder of its own."""
    installed()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        try:
            quickstart(Path(name))
            commands(Path(name))
        finally:
            os.chdir(ROOT)
    sys.stdout.write(
        f"flask-idempotency {version('flask-idempotency')} works: {sys.version.split()[0]}\n"
    )


if __name__ == "__main__":
    main()
