"""Commands run in the test or in a process of their own, and what `check` has said."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency
from flask_idempotency.cli import cli

ROOT = Path(__file__).parents[3]
ANSWER = "canary-answer-91c2"

APART = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}
"""For a test of what goes to which stream: before Click 8.2 its runner mixes them unless told."""

PROGRAM = """
import sys
from flask import Flask
from flask.cli import ScriptInfo
from flask_sqlalchemy import SQLAlchemy
from flask_idempotency import Idempotency
from flask_idempotency.cli import cli

app = Flask("shop")
app.config["SQLALCHEMY_DATABASE_URI"] = sys.argv[1]
SQLAlchemy(app)
Idempotency(app, scope=None)
cli.main(sys.argv[2:], obj=ScriptInfo(create_app=lambda: app))
"""


def build(uri: Any, scope: Any = None, **config: Any) -> Flask:
    """A small application of its own, on servers that need not be there."""
    app = Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = uri
    app.config.update(config)
    Idempotency(app, SQLAlchemy(app), scope=scope)
    return app


def build_console(app: Flask) -> Flask:
    """The application with the operators' page."""
    blueprint = Idempotency().console_blueprint(authorize=lambda: True)
    app.register_blueprint(blueprint, url_prefix="/operations")
    return app


def runner(app: Flask, **how: Any) -> Callable[..., Any]:
    """Runs commands on an application. What is not an error message fails the test."""

    def run(*arguments: str, **options: Any) -> Any:
        result = app.test_cli_runner(**how).invoke(cli, arguments, **options)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


def once(app: Flask, *arguments: str) -> Any:
    """Run one command on an application that is not needed any more."""
    try:
        return runner(app)(*arguments)
    finally:
        with app.app_context():
            app.extensions["sqlalchemy"].engine.dispose()


def findings(result: Any) -> dict[str, str]:
    """The checks by subject, and how each went: the worst, if a subject has several."""
    lines = [line for line in result.stdout.splitlines() if line[:1] != " "]
    lines.sort(key=lambda line: line.startswith("FAILED"))
    return {line[8:22].strip(): line[:8].strip() for line in lines}


def not_ok(result: Any) -> dict[str, str]:
    """The checks that were not ok; the exit code agrees with them."""
    found = {name: level for name, level in findings(result).items() if level != "ok"}
    assert result.exit_code == ("FAILED" in found.values()), result.output
    told = {"claim", "db.session", "deletion", "route"}  # their messages say what to do
    assert result.output.count("-> ") >= len(found.keys() - told)
    return found
