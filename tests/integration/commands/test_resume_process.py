"""``flask idempotency resume`` as a process: one signal lets it finish what it is at, two end that."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from flask import Flask
from flask.cli import ScriptInfo
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency, idempotent
from flask_idempotency.cli import cli
from tests.integration.commands.running import ROOT

PROGRAM = f"from {__name__} import main; main()"


def build(uri: str, view: Callable[..., Any]) -> tuple[Flask, SQLAlchemy]:
    """An application with two resumable operations: ``pay``, which is atomic, and ``call``."""
    app, db = Flask("shop"), SQLAlchemy()
    app.config["SQLALCHEMY_DATABASE_URI"] = uri
    db.init_app(app)
    Idempotency(app, db, scope=None)
    for endpoint, options in ("pay", {}), ("call", {"atomic": False, "on_interrupted": "retry"}):
        protect = idempotent(resumable=True, **options)
        app.add_url_rule(f"/{endpoint}", endpoint, protect(lambda: view(db)), methods=["POST"])
    return app, db


def main() -> None:
    """The process: its view writes a payment, and goes on when it is sent a line."""

    def pay(db: SQLAlchemy) -> Any:
        db.session.execute(db.text("insert into payment (amount) values (1)"))
        print("in the view", flush=True)
        sys.stdin.readline()
        db.session.commit()
        return {}, 201

    app, _ = build(sys.argv[1], pay)
    cli.main(sys.argv[2:], obj=ScriptInfo(create_app=lambda: app))


@pytest.fixture
def given_back(world: Any) -> Callable[[str], str]:
    """Two operations that were given back an hour ago; gives the database's URI."""

    def given_back(endpoint: str) -> str:
        uri: str = world.app.config["SQLALCHEMY_DATABASE_URI"]
        app, db = build(uri, lambda _db: ({}, 503 if endpoint == "pay" else 429))
        for key in "one", "two":
            app.test_client().post(f"/{endpoint}", headers={"Idempotency-Key": key})
        world.sql("update idempotency_record set created_at = created_at - interval '1 hour',"
                  " completed_at = completed_at - interval '1 hour'")  # fmt: skip
        with app.app_context():
            db.engine.dispose()
        return uri

    return given_back


@contextmanager
def resuming(uri: str) -> Iterator[subprocess.Popen[str]]:
    arguments = [sys.executable, "-uc", PROGRAM, uri, "resume", "--json", "--every", "1"]
    pipe = subprocess.PIPE
    running = subprocess.Popen(arguments, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == "in the view\n"
        yield running
    finally:
        running.kill()
        running.communicate()


def send_first(running: subprocess.Popen[str], number: int) -> None:
    """Send a signal, which does not end the process."""
    running.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        running.wait(0.2)


@pytest.mark.parametrize("store", ["postgres"])
def test_the_first_signal_lets_the_present_operation_finish(world, given_back):
    with resuming(given_back("pay")) as running:
        send_first(running, signal.SIGINT)
        out, err = running.communicate("go on\n", timeout=20)
    assert (running.returncode, err) == (0, "")
    assert [line["status"] for line in json.loads(out)] == [201]
    assert world.count() == 1
    assert sorted(record.state for record in world.records()) == ["completed", "in_progress"]


@pytest.mark.parametrize("store", ["postgres"])
@pytest.mark.parametrize(
    ("number", "endpoint", "state"),
    [(signal.SIGINT, "pay", "in_progress"), (signal.SIGTERM, "call", "interrupted")],
)
def test_the_second_signal_ends_the_present_operation(world, given_back, number, endpoint, state):
    """As a worker that is told to exit: what is atomic is rolled back, what is not is interrupted."""
    with resuming(given_back(endpoint)) as running:
        send_first(running, number)
        running.send_signal(number)
        out, err = running.communicate(timeout=20)
    assert running.returncode == {signal.SIGINT: 1, signal.SIGTERM: 128 + signal.SIGTERM}[number]
    assert (out, "Traceback" in err) == ("", False)
    assert world.count() == 0
    world.assert_clean()
    listed = world.app.test_cli_runner().invoke(cli, ["list", "--json"]).stdout
    tried = {line["attempt"]: line["state"] for line in json.loads(listed)}
    assert tried == {1: "released", 2: state} if endpoint == "call" else {1: "in_progress", 2: state}
