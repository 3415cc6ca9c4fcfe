"""The house: who may import whom, room by room, imports for types and inside functions included.

The drawing is in CONTRIBUTING.md. A new file in a room needs no edit here.
"""

import ast
import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import flask_idempotency

ROOT = Path(flask_idempotency.__file__).parent

# What each room may import besides itself.
ROOMS = {
    "core": set(),
    "private": set(),
    "drivers": {"core"},
    "session": {"core", "drivers", "private"},
    "stores": {"core", "drivers", "session"},
    "web": {"core", "private", "session"},
    "client": {"core"},
    "extension": {"core", "drivers", "session", "stores", "web", "console"},
    "operate": {"core", "private", "session", "stores", "web"},
    "cli": {"core", "operate", "stores", "web"},
    "console": {"core", "operate", "stores", "web"},
    "integrations": {"core", "operate", "web"},
    "testing": {"client", "core", "drivers", "session", "stores", "web"},
    "__init__": {"core", "session", "web", "extension"},
}

# The packages that each room may import. The standard library is free, but for what core may not do.
PACKAGES = {
    "core": set(),
    "private": {"flask", "sqlalchemy"},
    "drivers": {"sqlalchemy", "psycopg2", "psycopg"},
    "session": {"sqlalchemy", "flask", "flask_sqlalchemy"},
    "stores": {"sqlalchemy", "redis", "cryptography"},
    # asgiref is Flask's own, for async views
    "web": {"asgiref", "flask", "werkzeug", "itsdangerous", "markupsafe", "flask_sqlalchemy"}
    | {"sqlalchemy", "blinker", "typing_extensions"},
    "client": {"requests", "urllib3", "httpx", "anyio", "typing_extensions"},
    "extension": {"flask", "flask_sqlalchemy", "sqlalchemy", "redis", "typing_extensions"},
    "operate": {"flask", "werkzeug"},
    "cli": {"flask", "click"},
    "console": {"flask", "werkzeug", "jinja2", "itsdangerous", "markupsafe"},
    "integrations": {"flask", "wtforms", "markupsafe", "opentelemetry", "prometheus_client"},
    "testing": {"flask", "flask_sqlalchemy", "sqlalchemy", "werkzeug", "pytest"},
    "__init__": set(),
}
IMPURE = {"time", "datetime", "random", "secrets", "os", "socket", "logging"}


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports(name):
    """The files that a file imports, wherever in it, and the modules of others."""
    path = FILES[name]
    inside, outside = set(), set()
    package = list(path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            if node.level:
                base = ["flask_idempotency", *package[: len(package) + 1 - node.level], *base]
            found = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for parts in found:
            if parts[0] != "flask_idempotency":
                outside.add(parts[0])
                continue
            below = parts[1:]
            while below and ".".join(below) not in FILES:
                below.pop()
            inside.add(".".join(below) or "__init__")
    return inside - {name}, outside


def room_of(name):
    return name.split(".")[0]


@pytest.mark.parametrize("name", FILES)
def test_a_file_imports_only_what_its_room_may(name):
    inside, outside = imports(name)
    room = room_of(name)
    assert {room_of(each) for each in inside} <= {room, *ROOMS[room]}
    assert outside - set(sys.stdlib_module_names) <= PACKAGES[room]


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("core.")])
def test_the_core_has_no_clock_no_randomness_no_input_and_no_output(name):
    allowed = {"core.logs": {"logging"}, "core.records": {"os"}}.get(name, set())
    assert not imports(name)[1] & IMPURE - allowed


def test_no_file_imports_itself_in_a_circle():
    try:
        TopologicalSorter({name: imports(name)[0] - {"__init__"} for name in FILES}).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_house_has_these_rooms():
    entries = {entry.stem for entry in ROOT.iterdir() if entry.name not in {"__pycache__", "py.typed"}}
    assert entries == set(ROOMS)


def test_contributing_shows_the_same_drawing():
    page = (ROOT.parent / "CONTRIBUTING.md").read_text()
    drawn = re.findall(r"^(│?) *[├└]── (\w+)(/|\.py) ", page, re.MULTILINE)
    folder, rooms = "", set()
    for inside, name, ending in drawn:
        folder = folder if inside else name
        rooms.add(f"{folder}/{name}" if inside else name + ending.removesuffix("/"))
    folders = {path.parent.relative_to(ROOT).as_posix() for path in FILES.values()} - {"."}
    files = {path.name for path in FILES.values() if path.parent == ROOT} - {"__init__.py"}
    assert rooms == folders | files
    table = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", page, re.MULTILINE))
    for room in set(ROOMS) - {"__init__"}:
        assert set(re.findall(r"`(\w+)`", table[room])) == ROOMS[room]
