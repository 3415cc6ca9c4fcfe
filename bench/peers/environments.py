"""A virtual environment for each package, in ``build/peers``, made when it is first needed.

What a package shares with this project (Flask, SQLAlchemy, the drivers …) has the same versions there
as here, so that the packages differ and nothing else.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "build" / "peers"

SHARED = ("flask", "flask-sqlalchemy", "sqlalchemy", "psycopg2-binary", "redis", "psutil")
"""What the worker needs in every environment."""


class NotInstalled(Exception):
    """A package could not be installed: the last line of pip's error."""


def python(name: str, requirements: tuple[str, ...]) -> Path:
    """The interpreter of the environment ``name``; the present one if nothing is required."""
    if not requirements:
        return Path(sys.executable)
    folder = FOLDER / name
    program, done = folder / "bin" / "python", folder / "installed.txt"
    here = "\n".join(sorted({f"{one.name}=={one.version}" for one in distributions()}))
    wanted = "\n".join([*SHARED, *requirements, here])
    if not done.exists() or done.read_text(encoding="utf-8") != wanted:
        _run(sys.executable, "-m", "venv", "--clear", str(folder))
        constraints = folder / "constraints.txt"
        constraints.write_text(here, encoding="utf-8")
        pip = (str(program), "-m", "pip", "install", "-q", "--disable-pip-version-check")
        _run(*pip, "-c", str(constraints), *SHARED, *requirements)
        done.write_text(wanted, encoding="utf-8")
    return program


def versions(interpreter: Path) -> dict[str, str]:
    """The packages that an environment has, with their versions."""
    command = [str(interpreter), "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(line.split("==", 1) for line in listed.splitlines() if "==" in line)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise NotInstalled(lines[-1] if lines else f"exit status {done.returncode}")
