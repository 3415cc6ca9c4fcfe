"""What the package imports is required: by ``setup.cfg``, or an extra of it."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
OURS = {"flask_idempotency", "pytest_flask_idempotency"}
CALLED_OTHERWISE = {
    "opentelemetry": "opentelemetry-api",
    "psycopg2": "psycopg2-binary",
}

_setup = configparser.ConfigParser()
_setup.read(ROOT / "setup.cfg", encoding="utf-8")


def required(extra: str | None) -> list[Requirement]:
    """The requirements without an extra, or those of an extra and of the extras that it includes."""
    name = "options.extras_require" if extra else "options"
    lines = _setup[name][extra or "install_requires"].split("\n")
    own = [Requirement(line) for line in lines if line and not line.startswith("#")]
    included = [of for one in own if one.name == "flask-idempotency" for of in one.extras]
    return [*own, *(one for other in included for one in required(other))]


def names(*extras: str) -> set[str]:
    return {one.name.lower() for extra in (None, *extras) for one in required(extra)}


def imported(path: Path) -> set[str]:
    """The distributions that a file imports when it runs, named as in ``setup.cfg``."""
    modules = {name.split(".")[0] for name in _imports(ast.parse(path.read_text(encoding="utf-8")))}
    foreign = {name.replace("_", "-") for name in modules - sys.stdlib_module_names - OURS}
    return {CALLED_OTHERWISE.get(name, name) for name in foreign}


def _imports(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Import(names=aliases):
            yield from (alias.name for alias in aliases)
        case ast.ImportFrom(module=str(module), level=0):
            yield module
        case ast.Call(func=ast.Name(id="import_module"), args=[ast.Constant(value=str(module))]):
            yield module
    for child in ast.iter_child_nodes(node):
        yield from _imports(child)


EXTRAS = {
    "client/new_keys.py": "requests",
    "client/session.py": "requests",
    "client/transport.py": "httpx",
    "drivers/psycopg.py": "psycopg",
    "stores/sealing.py": "encryption",
    "web/views.py": "async",
    "integrations/opentelemetry.py": "opentelemetry",
    "integrations/prometheus.py": "prometheus",
    "integrations/wtf.py": "wtf",
}
"""The modules that need an extra, and which."""


def test_the_package_imports_what_it_requires():
    package = ROOT / "flask_idempotency"
    missing = {
        path.name: imported(path) - names(*filter(None, [EXTRAS.get(str(path.relative_to(package)))]))
        for path in package.rglob("*.py")
    }
    assert {name: what for name, what in missing.items() if what} == {}
    assert imported(ROOT / "pytest_flask_idempotency.py") <= names("testing")


def test_what_is_required_to_run_has_a_floor_and_nothing_is_pinned():
    extras = set(_setup["options.extras_require"])
    for extra in (None, *sorted(extras)):
        for one in required(extra):
            operators = {part.operator for part in one.specifier}
            assert ">=" in operators or one.name == "flask-idempotency", f"{one} has no floor"
            assert operators <= {">=", "<"}, f"{one} leaves an application no choice"


def test_the_lowest_versions_are_those_of_all_that_is_required_to_run():
    done = subprocess.run(
        [sys.executable, ROOT / ".ci/lowest.py"], capture_output=True, text=True, check=True
    )
    lowest = {line.split("==")[0] for line in done.stdout.splitlines()}
    extras = set(_setup["options.extras_require"])
    assert lowest == names(*extras) - {"flask-idempotency"}


def test_no_test_skips():
    """A machine that lacks something fails, and says what."""
    skipping = re.compile(r"pytest\.(skip|importorskip)\(|mark\.skip|@unittest\.skip")
    tests = [path for path in ROOT.glob("tests/**/*.py") if path != Path(__file__)]
    plugin = ROOT / "pytest_flask_idempotency.py"
    assert [path.name for path in [*tests, plugin] if skipping.search(path.read_text("utf-8"))] == []
