"""What an import brings along: the client must work where the server's packages are not."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import flask_idempotency

ROOT = Path(__file__).parents[2]
BLOCK = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None  # an import of it fails, as if it were not installed
"""
SERVER = (
    "flask",
    "werkzeug",
    "flask_sqlalchemy",
    "sqlalchemy",
    "redis",
    "psycopg2",
    "psycopg",
    "blinker",
    "click",
)


def run(code: str, *blocked: str, cwd: Path = ROOT) -> str:
    """Run code in a new Python that cannot import what is blocked; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCK.format(blocked=blocked) + code],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_client_needs_nothing_of_the_server():
    code = """
from flask_idempotency import client
import flask_idempotency.client
from flask_idempotency.client import *
assert client.new_key() != client.new_key()
print(IdempotentSession.__name__, IdempotentTransport.__name__)
"""
    assert run(code, *SERVER) == "IdempotentSession IdempotentTransport\n"


@pytest.mark.parametrize(
    ("name", "missing", "other"),
    [
        ("IdempotentSession", "requests", "IdempotentTransport"),
        ("IdempotentTransport", "httpx", "IdempotentSession"),
    ],
)
def test_each_client_needs_its_own_http_library_only(name, missing, other):
    code = f"""
from flask_idempotency.client import {other}
try:
    from flask_idempotency.client import {name}
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert run(code, *SERVER, missing) == f"{missing}\n"


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("integrations.wtf", "wtforms", "wtf"),
    ],
)
def test_a_module_without_its_package_names_the_extra(module, missing, extra):
    code = f"""
try:
    import flask_idempotency.{module}
except ImportError as error:
    print(error)
"""
    said = run(code, missing)
    assert missing in said
    assert said.endswith(f": pip install 'flask-idempotency[{extra}]'\n")


def test_the_public_names_come_with_a_star_and_are_the_same_for_a_type_checker():
    import ast

    names: dict[str, object] = {}
    exec("from flask_idempotency import *", names)  # noqa: S102
    tree = ast.parse(Path(flask_idempotency.__file__).read_text(encoding="utf-8"))
    typed = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.col_offset]
    seen: dict[str, object] = {}
    for node in typed:
        home = vars(import_module("." * node.level + node.module, "flask_idempotency"))
        named = {alias.name for alias in node.names}
        seen |= {name: home[name] for name in (home if named == {"*"} else named)}
    assert set(flask_idempotency.__all__) <= set(names)
    for name in flask_idempotency.__all__:
        assert seen[name] is names[name]
