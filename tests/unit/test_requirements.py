"""What the package imports is required: by ``setup.cfg``, or an extra of it."""

from __future__ import annotations

import configparser
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

from tests.unit.test_architecture import FILES, imports

ROOT = Path(__file__).parents[2]
CALLED_OTHERWISE = {"opentelemetry": "opentelemetry-api", "psycopg2": "psycopg2-binary"}
FOR_TYPES = {"typing_extensions"}

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


EXTRAS = {
    "client.new_keys": "requests",
    "client.session": "requests",
    "client.transport": "httpx",
    "drivers.psycopg": "psycopg",
    "stores.sealing": "encryption",
    "web.views": "async",
    "integrations.opentelemetry": "opentelemetry",
    "integrations.prometheus": "prometheus",
    "integrations.wtf": "wtf",
}
"""The modules that need an extra, and which."""


def test_the_package_imports_what_it_requires():
    for name in FILES:
        foreign = imports(name)[1] - sys.stdlib_module_names - FOR_TYPES
        imported = {CALLED_OTHERWISE.get(each, each.replace("_", "-")) for each in foreign}
        assert imported <= names(*filter(None, [EXTRAS.get(name)])), name


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
