"""The page of the commands: it has all of them, and their outputs are the real ones."""

from __future__ import annotations

import re
import shlex

import pytest
import sqlalchemy as sa
from flask import Blueprint, Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency, current_operation, idempotent
from flask_idempotency.cli import cli
from tests.docs.pages import ROOT, blocks, commands, looks_like
from tests.killed import Killed


class TestCommands:
    PAGE = ROOT / "docs/api.md"

    def test_it_has_the_help_of_every_command(self):
        """Each is put there when the page is built."""
        text = self.PAGE.read_text(encoding="utf-8")
        shown = re.findall(r"(?m)^### ([\w-]+)\n\n```\{command\} ([\w-]+)\n```$", text)
        assert all(heading == name for heading, name in shown)
        assert {name for name, _ in shown} == set(cli.commands)

    def test_its_outputs_are_the_real_ones(self, postgres, redis_server):
        app, db = Flask("shop"), SQLAlchemy()
        app.config["SQLALCHEMY_DATABASE_URI"] = postgres.database("docs_commands")
        app.config["IDEMPOTENCY_REDIS_URL"] = redis_server.url
        db.init_app(app)
        idempotency = Idempotency(app, db, scope=None)
        for name, answer in ("payment", ({"amount": 500}, 201)), ("refund", ({}, 500)):
            view = idempotent(lambda answer=answer: answer)
            app.add_url_rule(f"/{name}s", f"create_{name}", view, methods=["POST"])
        self.add_parcels(app)
        self.add_others(app, idempotency)
        run = app.test_cli_runner().invoke
        for block in blocks(self.PAGE, "console"):
            for command, shown in commands(block.text):
                name, *arguments = shlex.split(command.removeprefix("flask idempotency "))
                answer = run(cli, [name, *arguments], input="y\n").output
                assert looks_like(answer, shown), f"{block.name}: {command}\n{answer}"
                if answer.endswith("created the table\n"):
                    self.work(app, db)
        with app.app_context():
            db.engine.dispose()

    def add_parcels(self, app):
        """Views that are not atomic."""

        @app.post("/orders")
        @idempotent(atomic=False)
        def send_order():
            return {}, 500

        @app.post("/parcels")
        @idempotent(atomic=False)
        def send_parcel():
            current_operation.step("stamp", lambda: {"number": 17})
            if current_operation.attempt == 1:
                raise Killed
            return {}, 201

    def add_others(self, app, idempotency):
        """A view that protect() covers, and one that nothing protects."""
        quotes = Blueprint("quotes", __name__)
        idempotency.protect(quotes, ttl=3600)
        quotes.add_url_rule("/quotes", "create", dict, methods=["POST"])
        app.register_blueprint(quotes)
        app.add_url_rule("/photos", "upload_photo", dict, methods=["PUT"])

    def work(self, app, db):
        """Seven records, of which the first has expired, and two are of views that were killed."""
        post = app.test_client().post
        for key, path in enumerate(("/payments", "/payments", "/payments", "/refunds", "/orders")):
            post(path, headers={"Idempotency-Key": str(key)})
        for number in 1, 2:
            with pytest.raises(Killed):
                post("/parcels", headers={"Idempotency-Key": f"parcel-{number}"})
        first = "SELECT key FROM idempotency_record ORDER BY created_at LIMIT 1"
        update = "UPDATE idempotency_record SET"
        with app.app_context(), db.engine.begin() as connection:
            for change in (
                f"expires_at = clock_timestamp() WHERE key = ({first})",
                "lease_expires_at = created_at WHERE lease_expires_at IS NOT NULL",
            ):
                connection.execute(sa.text(f"{update} {change}"))
