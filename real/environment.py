"""A package's sources, and an environment of its own for its tests, in ``build/real``."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from real.packages import Package

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "real"

SHARED = ("flask-sqlalchemy>=3.1", "psycopg2-binary", "pytest", "pytest-timeout", "redis")
"""What the extension and its plugin need beside any package."""

SHOWN = ("Flask", "Flask-SQLAlchemy", "SQLAlchemy", "Werkzeug", "psycopg2-binary", "psycopg")
"""Whose versions stand beside the figures, if they are there."""

VERSIONS = """
import sys
from importlib.metadata import PackageNotFoundError, version

for name in sys.argv[1:]:
    try:
        print(name, version(name))
    except PackageNotFoundError:
        pass
"""


class NotInstalled(Exception):
    """The package index does not give what is needed: the last line of pip's error."""


@dataclass(frozen=True)
class Environment:
    """Where a package's tests are, and the interpreter that runs them."""

    sources: Path
    python: Path

    def versions(self) -> str:
        """Of what the package and the extension share."""
        command = [str(self.python), "-c", VERSIONS, *SHOWN]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return ", ".join(found.splitlines())


def environment(package: Package) -> Environment:
    """Downloaded and installed, once. Raises ``NotInstalled``."""
    folder = FOLDER / package.name
    found = Environment(folder / "sources", folder / "venv" / "bin" / "python")
    done = folder / "installed.txt"
    wanted = repr((package.version, package.extras, SHARED, package.needs))
    if done.exists() and done.read_text(encoding="utf-8") == wanted:
        return found
    _run(sys.executable, "-m", "venv", "--clear", str(folder / "venv"))
    pip = (str(found.python), "-m", "pip", "--disable-pip-version-check", "-q")
    sources = _cloned(package) if package.repository else _unpacked(package, pip)
    found.sources.unlink(missing_ok=True)
    found.sources.symlink_to(sources.name)
    (
        found.sources / "pytest.ini"
    ).touch()  # pytest would look further up, and find this project's options
    _run(*pip, "install", f"{sources}{package.extras}", *SHARED, *package.needs)
    done.write_text(wanted, encoding="utf-8")
    return found


def _unpacked(package: Package, pip: tuple[str, ...]) -> Path:
    folder = FOLDER / package.name
    pinned = f"{package.name}=={package.version}"
    _run(*pip, "download", "--no-deps", "--no-binary", package.name, "-d", str(folder), pinned)
    archive = next(folder.glob(f"*-{package.version}.tar.gz"))
    with tarfile.open(archive) as packed:
        # Python 3.10.12 and 3.11.4 brought the filter (PEP 706); Debian 12 has 3.11.2.
        packed.extraction_filter = getattr(tarfile, "data_filter", None)
        packed.extractall(folder)  # noqa: S202
    return folder / archive.name.removesuffix(".tar.gz")


def _cloned(package: Package) -> Path:
    sources = FOLDER / package.name / f"{package.name}-{package.version}"
    if not sources.exists():
        tag = ("--depth", "1", "--branch", f"v{package.version}")
        _run("git", "clone", "-q", *tag, package.repository, str(sources))
    return sources


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise NotInstalled(lines[-1] if lines else f"exit status {done.returncode}")
