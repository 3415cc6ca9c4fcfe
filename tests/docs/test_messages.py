"""The table of messages of what it costs is counted, not believed."""

from __future__ import annotations

import threading
import time
from typing import Any

import redis
import sqlalchemy as sa
from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency, current_operation, idempotent
from tests.docs.pages import ROOT


class TestMessages:
    def test_its_numbers_are_those_of_the_servers(self, postgres, redis_server):
        assert postgres.controllable, "a given server does not show its log: unset DATABASE_URL"
        text = (ROOT / "docs/for-you.md").read_text(encoding="utf-8")
        table = text.partition("<!-- counted -->\n")[2].partition("\n\n")[0]
        rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
        shown = [(int(redis), int(hybrid), int(alone)) for _, redis, hybrid, alone in rows]
        bare = Counter(postgres, redis_server, store=None).count_all()
        hybrid = Counter(postgres, redis_server, store="hybrid").count_all()
        alone = Counter(postgres, redis_server, store="postgres").count_all()
        real = [(*bare[0], bare[0][1])]
        real += [(*both, single[1]) for both, single in zip(hybrid, alone, strict=True)]
        assert real == shown


class Counter:
    """Counts the messages of each situation of the table, in its order."""

    def __init__(self, postgres: Any, redis_server: Any, store: str | None) -> None:
        self._postgres, self._store = postgres, store
        self._redis = redis.Redis.from_url(redis_server.url)
        self._asked = 0
        self._running, self._go_on = threading.Event(), threading.Event()
        self._app, db = Flask("counted"), SQLAlchemy()
        url = postgres.database(f"docs_count_{store or 'bare'}")
        self._app.config["SQLALCHEMY_DATABASE_URI"] = url
        self._app.config["SQLALCHEMY_ENGINE_OPTIONS"] = {
            "connect_args": {"options": "-c log_statement=all"}
        }
        db.init_app(self._app)
        protect: Any = lambda view: view  # noqa: E731
        if store:
            if store == "hybrid":
                self._app.config["IDEMPOTENCY_REDIS_URL"] = redis_server.url
            Idempotency(self._app, db, scope=None)
            protect = idempotent

        class Payment(db.Model):  # type: ignore[name-defined, misc]
            id = sa.Column(sa.Integer, primary_key=True)
            amount = sa.Column(sa.Integer, nullable=False)

        @self._app.post("/payments")
        @protect
        def pay() -> Any:
            payment = Payment(amount=request.get_json()["amount"])
            db.session.add(payment)
            db.session.commit()
            number = payment.id
            key = request.headers["Idempotency-Key"].strip('"')
            if key == "failing" and current_operation.attempt == 1:
                return {"error": "at first"}, 500
            if key.startswith("running"):
                self._running.set()
                self._go_on.wait(20)
            return {"id": number}, 201

        self._db = db
        with self._app.app_context():
            db.create_all()

    def count_all(self) -> list[tuple[int, int]]:
        """Redis and Postgres messages of each row."""
        with self._redis.monitor() as self._monitor:
            return self._count_all()

    def _count_all(self) -> list[tuple[int, int]]:
        self._send("warm up")
        counts = [self._count("first", 201)]
        if self._store:
            counts += [self._count("first", 201), self._count("first", 422, amount=6)]
            counts += [self._duplicate("running-1", age=0), self._duplicate("running-2", age=1.1)]
            assert self._send("failing") == 500
            counts += [self._count("failing", 201)]
        with self._app.app_context():
            self._db.engine.dispose()
        return counts

    def _duplicate(self, key: str, *, age: float) -> tuple[int, int]:
        self._running.clear()
        self._go_on.clear()
        first = threading.Thread(target=self._send, args=[key])
        first.start()
        assert self._running.wait(20)
        time.sleep(age)
        try:
            return self._count(key, 409)
        finally:
            self._go_on.set()
            first.join()

    def _count(self, key: str, status: int, amount: int = 5) -> tuple[int, int]:
        log, calls = len(self._postgres.log), self._redis_calls()
        assert self._send(key, amount) == status
        statements = self._postgres.log[log:].count("LOG:  statement: ")
        return self._redis_calls() - calls, statements

    def _redis_calls(self) -> int:
        """All that clients have asked, but not what scripts do; up to now, which an ECHO marks."""
        now = str(time.monotonic())
        self._redis.echo(now)
        while now not in (seen := self._monitor.next_command())["command"]:
            verb = seen["command"].partition(" ")[0]
            self._asked += seen["client_type"] != "lua" and verb in {"EVAL", "SET"}
        return self._asked

    def _send(self, key: str, amount: int = 5) -> int:
        return (
            self._app.test_client()
            .post("/payments", json={"amount": amount}, headers={"Idempotency-Key": f'"{key}"'})
            .status_code
        )
