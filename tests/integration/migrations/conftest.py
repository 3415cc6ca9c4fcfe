"""A project whose tables Flask-Migrate makes."""

import logging.config
import warnings

import pytest
import sqlalchemy as sa
from flask import Flask
from flask_migrate import Migrate
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency
from flask_idempotency.cli import cli


@pytest.fixture(autouse=True)
def _logging_stays(monkeypatch):
    """A project's env.py configures the whole process, which here is that of the tests."""
    monkeypatch.setattr(logging.config, "fileConfig", lambda *args, **kwargs: None)


@pytest.fixture
def database(databases):
    """Gives empty databases."""
    used = []
    yield lambda: used.append(databases.take()) or used[-1]
    for url in used:
        databases.give_back(url)


def shop(uri, metadata=None, **config):
    """An application with a table of its own beside ours."""
    app, db = Flask("shop"), SQLAlchemy(metadata=metadata)
    app.config.from_mapping(config, SQLALCHEMY_DATABASE_URI=uri, IDEMPOTENCY_STORE="sql")
    db.init_app(app)
    db.Table("payment", sa.Column("id", sa.Integer, primary_key=True))
    Idempotency(app, db, scope=None)
    return app


def create_all(app):
    """Make the tables without a migration."""
    with app.app_context():
        app.extensions["sqlalchemy"].create_all()
    dispose(app)


def read(app, statement):
    """Run SQL in the application's database, committed."""
    with app.app_context(), app.extensions["sqlalchemy"].engine.begin() as connection:
        result = connection.execute(sa.text(statement))
        rows = [tuple(row) for row in result] if result.returns_rows else []
    dispose(app)
    return rows


def dispose(app):
    """Close the connections of an application that is not needed any more."""
    with app.app_context():
        for engine in app.extensions["sqlalchemy"].engines.values():
            engine.dispose()


class Project:
    """Runs ``flask …`` in a folder, each command on an application of its own, as a process would."""

    def __init__(self, folder, build, *arguments):
        self.folder, self._build = folder / "migrations", build
        self.run("db", "init", *arguments)

    def run(self, *arguments):
        """The output of a command of Flask-Migrate or of ours, which must succeed."""
        app = self._build()
        app.cli.add_command(cli, "idempotency")
        Migrate(app, app.extensions["sqlalchemy"], directory=str(self.folder))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'get_engine' is deprecated")  # in Flask-Migrate's env.py
            result = app.test_cli_runner().invoke(args=arguments)
        dispose(app)
        assert result.exit_code == 0, (result.output, result.exception)
        return result.output

    def new_revision(self):
        """Let Flask-Migrate write a revision; its source, or nothing if there is nothing to change."""
        before = set(self.folder.glob("versions/*.py"))
        self.run("db", "migrate")
        return "".join(path.read_text() for path in {*self.folder.glob("versions/*.py")} - before)

    def assert_complete(self):
        assert self.new_revision() == ""
        self.run("db", "check")
        output = self.run("idempotency", "check")
        assert "advice" not in output, output
