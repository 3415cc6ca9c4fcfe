"""What an import brings along: the client must work where the server's packages are not."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import flask_idempotency
from flask_idempotency import KeyReused

BLOCK = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None  # an import of it fails, as if it were not installed
try:
    {code}
except ImportError as error:
    print(error.name or error)
"""
SERVER = ["flask", "werkzeug", "flask_sqlalchemy", "sqlalchemy", "redis", "blinker"]
SERVER += ["psycopg2", "psycopg"]
CLIENT = "flask_idempotency.client import"


@pytest.mark.parametrize(
    ("code", "blocked", "printed"),
    [
        (f"from {CLIENT} *; print(IdempotentSession.__name__)", [], "IdempotentSession"),
        (
            f"from {CLIENT} derive_key, new_key; print(1)",
            ["requests", "urllib3", "httpx", "anyio"],
            "1",
        ),
        (f"from {CLIENT} IdempotentSession", ["requests"], "requests"),
        (f"from {CLIENT} IdempotentSession; print(1)", ["httpx"], "1"),
        (f"from {CLIENT} IdempotentTransport", ["httpx"], "httpx"),
        (f"from {CLIENT} IdempotentTransport; print(1)", ["requests"], "1"),
        ("from flask_idempotency import idempotent", [], "flask"),
    ],
)
def test_each_client_needs_its_own_http_library_only(code, blocked, printed):
    assert run(code, *SERVER, *blocked) == f"{printed}\n"


def test_a_module_without_its_package_names_the_extra():
    printed = run("import flask_idempotency.integrations.wtf", "wtforms")
    assert printed.endswith(": pip install 'flask-idempotency[wtf]'\n")


def test_where_python_leaves_docstrings_out_a_problem_has_its_title():
    code = "import flask_idempotency as it; print(it.KeyReused().detail)"
    assert run(code, option="-OO") == f"{KeyReused.title}\n"


def run(code: str, *blocked: str, option: str = "-B") -> str:
    """Run code in a new Python that cannot import what is blocked; what it printed."""
    text = BLOCK.format(blocked=blocked, code=code)
    done = subprocess.run(
        [sys.executable, option, "-c", text], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_public_names_come_with_a_star_and_are_the_same_for_a_type_checker():
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
