"""The floors: a module imports only what lies below it, and each library has its rooms."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import flask_idempotency

ROOT = Path(flask_idempotency.__file__).parent

FLOORS = [
    {"errors"},
    {
        "core.keys",
        "core.fingerprint",
        "core.records",
        "core.machine",
        "core.policy",
        "core.ports",
        "core.sqltext",
    },
    {"session_statements", "units", "earlier"},
    {
        "sealing",
        "stores.statements",
        "stores.lease_statements",
        "stores.rows",
        "stores.leases",
        "stores.table",
        "stores.failures",
        "stores.savepoints",
        "stores.wire",
        "stores.sql",
        "stores.redis",
        "stores.redis_records",
        "stores.joinable",
        "stores.memory",
        "stores.sqlite",
        "stores.sqlite_statements",
        "stores.shape",
        "stores.admin",
        "stores.admin_statements",
        "stores.table_admin",
        "stores.sql_admin",
        "stores.sqlite_admin",
        "stores.redis_admin",
        "stores.checks",
    },
    {"engine"},
    {
        "config",
        "options",
        "operation",
        "signals",
        "http",
        "session",
        "escapes",
        "server",
        "database",
        "state",
        "routes",
        "forms",
        "flashes",
        "work",
        "steps",
        "attempt",
        "atomic",
        "leased",
        "begin",
        "run",
        "decorator",
        "hooks",
        "extension",
        "__init__",
    },
    {
        "resume",
        "cli.__init__",
        "cli.group",
        "cli.keys",
        "cli.records",
        "cli.routes",
        "cli.upkeep",
        "wtf",
        "published",
        "outcomes",
        "openapi",
        "apispec",
        "client.keys",
        "client.policy",
        "client.session",
        "client.transport",
        "client.__init__",
        "testing.__init__",
        "testing.answers",
        "testing.checks",
        "testing.claims",
        "testing.contract",
        "testing.crashes",
        "testing.memory",
        "testing.transactions",
        "testing.watch",
    },
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

# Who may import what from outside the package (the standard library is free everywhere but in core).
OUTSIDE = {
    0: set(),
    1: set(),
    2: {"sqlalchemy", "psycopg2"},
    3: {"sqlalchemy", "psycopg2", "redis", "cryptography"},
    4: set(),
    5: {
        "flask",
        "werkzeug",
        "itsdangerous",
        "markupsafe",
        "flask_sqlalchemy",
        "sqlalchemy",
        "blinker",
        "redis",
        "typing_extensions",
    },
    6: {
        "flask",
        "flask_sqlalchemy",
        "sqlalchemy",
        "click",
        "psycopg2",
        "redis",
        "werkzeug",
        "markupsafe",
        "wtforms",
        "apispec",
        "pytest",
    },
}
# The client is used where the server's packages are not: it stands on the core alone.
CLIENT = {
    "client.session": {"requests", "urllib3", "typing_extensions"},
    "client.transport": {"httpx", "anyio"},
}
IMPURE = {"time", "datetime", "random", "secrets", "os", "socket", "threading", "logging"}


def rooms():
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if name not in {"core.__init__", "stores.__init__"}:
            yield name, path


def imports(name, path):
    """The modules a room imports: (inside, outside)."""
    inside, outside = set(), set()
    package = name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            outside.add(str(node.module).split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level]
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                full = ".".join([*base, alias.name])
                inside.add(full if full in FLOOR else ".".join(base))
    return inside, outside


def is_outside(module):
    import sys

    return module not in sys.stdlib_module_names


@pytest.mark.parametrize(("name", "path"), list(rooms()))
def test_a_room_imports_only_downwards(name, path):
    assert name in FLOOR, f"{name} has no floor: give it one"
    inside, outside = imports(name, path)
    above = {room for room in inside if FLOOR[room] > FLOOR[name]}
    assert not above
    allowed = CLIENT.get(name, set()) if name.startswith("client.") else OUTSIDE[FLOOR[name]]
    assert {module for module in outside if is_outside(module)} <= allowed
    if name.startswith("client."):
        assert {room for room in inside if FLOOR[room] > 1 and not room.startswith("client.")} == set()
    if FLOOR[name] <= 1:
        assert not outside & IMPURE, "the core has no clock, randomness or input and output"


@pytest.mark.parametrize(("name", "path"), list(rooms()))
def test_only_the_composition_root_and_the_edges_name_a_store(name, path):
    inside, _ = imports(name, path)
    if FLOOR[name] in {4, 5} and name != "extension":
        assert not {room for room in inside if room.startswith("stores.")}


def test_every_floor_has_its_rooms():
    assert {name for name, _ in rooms()} == set(FLOOR)
