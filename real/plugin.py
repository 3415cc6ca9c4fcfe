"""A plugin for the package's pytest: its suite as it stands, its applications with the extension.

Nothing of the suite is patched. Every application whose Flask-SQLAlchemy is on PostgreSQL gets the
extension, and the test client sends an idempotency key with each write. ``REAL_MODE`` says the rest:

- ``plain``: neither;
- ``unused``: the extension is set up and protects nothing;
- ``observed``: it judges each write and changes nothing;
- ``protected``: every write is protected;
- ``twice``: the same, and each write is sent again with its key; the test gets the second response.
"""

from __future__ import annotations

import io
import json
import os
import uuid
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import werkzeug.test
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

MODE = os.environ["REAL_MODE"]
WRITES = ("POST", "PUT", "PATCH", "DELETE")
GRAVE = {"error": 3, "failed": 2, "skipped": 1, "passed": 0}
"""A test has up to three reports; the gravest is its result. Its call may skip it, too."""

tests: dict[str, str] = {}
counts = {"writes": 0, "replays": 0, "equal": 0}
unequal: list[str] = []
_with_tables: WeakSet[Flask] = WeakSet()
_present = [""]
"""The test that runs."""

_init_app, _run_wsgi_app = SQLAlchemy.init_app, werkzeug.test.Client.run_wsgi_app


def init_app(self: SQLAlchemy, app: Flask) -> None:
    """Flask-SQLAlchemy's own, and then ours."""
    _init_app(self, app)
    if not str(app.config.get("SQLALCHEMY_DATABASE_URI")).startswith("postgresql"):
        return
    from flask_idempotency import Idempotency

    app.config["IDEMPOTENCY_REDIS_URL"] = os.environ["REAL_REDIS"]
    app.config["IDEMPOTENCY_ENFORCE"] = MODE != "observed"
    if "REAL_TESTING" in os.environ:  # whose errors stay responses, as in the plain mode
        app.config.update(TESTING=True, PROPAGATE_EXCEPTIONS=False)
    idempotency = Idempotency(app, self, scope=None)
    if MODE != "unused":
        idempotency.protect(app, methods=WRITES)


def run_wsgi_app(self: Any, environ: dict[str, Any], buffered: bool = False) -> Any:
    """One exchange of the test client. A write has a key and, where the mode says so, is repeated."""
    if environ["REQUEST_METHOD"] not in WRITES:
        return _run_wsgi_app(self, environ, buffered)
    counts["writes"] += 1
    if MODE == "plain":
        return _run_wsgi_app(self, environ, buffered)
    _create_tables(self.application)
    environ.setdefault("HTTP_IDEMPOTENCY_KEY", str(uuid.uuid4()))
    if MODE != "twice":
        return _run_wsgi_app(self, environ, buffered)
    body = environ["wsgi.input"].read()
    environ["wsgi.input"] = io.BytesIO(body)
    first = _run_wsgi_app(self, environ, buffered=True)
    # The retry of a client that has lost the response: the same bytes, the cookies of before.
    again = {
        name: value for name, value in environ.items() if not name.startswith(("werkzeug.", "flask."))
    }
    again["wsgi.input"] = io.BytesIO(body)
    return _compared(environ, first, werkzeug.test.run_wsgi_app(self.application, again, buffered=True))


def _compared(environ: dict[str, Any], first: Any, second: Any) -> Any:
    """What the test gets: the replay; where there is none, as for a 401, the first response."""
    before, after = b"".join(first[0]), b"".join(second[0])
    if "Idempotent-Replayed" not in second[2]:
        return [before], *first[1:]
    counts["replays"] += 1
    if (before, first[1]) == (after, second[1]):
        counts["equal"] += 1
    else:
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}"
        unequal.append(f"{_present[0]}: {request}: {first[1]}, then {second[1]}")
    return [after], *second[1:]


def _create_tables(app: Any) -> None:
    """Before an application's first write: only then has a suite surely made its database."""
    if not isinstance(app, Flask) or "idempotency" not in app.extensions or app in _with_tables:
        return
    from flask_idempotency.cli import cli

    was_debug = app.debug
    done = app.test_cli_runner().invoke(cli, ["create-table"], catch_exceptions=False)
    app.debug = was_debug  # which Flask's commands set, and which changes how JSON is written
    assert done.exit_code == 0, done.output
    _with_tables.add(app)


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """Before the suite imports anything of its own: a conftest.py may make its application here."""
    werkzeug.test.Client.run_wsgi_app = run_wsgi_app  # type: ignore[method-assign]
    if MODE != "plain":
        SQLAlchemy.init_app = init_app  # type: ignore[method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note whose requests come now."""
    _present[0] = item.nodeid


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test's gravest report."""
    result = "error" if report.failed and report.when != "call" else report.outcome
    tests[report.nodeid] = max(result, tests.get(report.nodeid, "passed"), key=GRAVE.__getitem__)


def pytest_sessionfinish() -> None:
    """Write what was counted."""
    found = {"tests": tests, **counts, "unequal": unequal}
    Path(os.environ["REAL_RESULT"]).write_text(json.dumps(found, indent=1), encoding="utf-8")
