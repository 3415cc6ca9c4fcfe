"""The page of the HTTP interface: each request is sent, and its answer is the one shown."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy

import servers
from flask_idempotency import Idempotency, Problem, Retryable, idempotent
from flask_idempotency.outcomes import outcomes_blueprint
from flask_idempotency.web.setup.settings import SETTINGS
from tests.docs.pages import ROOT, blocks
from tests.killed import Killed


class TestHttpReference:
    PAGE = ROOT / "docs/http.md"

    def test_its_responses_are_the_real_ones(self, postgres):
        shop = Shop(postgres.database("docs_http"))
        first, *examples = blocks(self.PAGE, "http")
        asked, sent = first.text, set()
        for block in examples:
            if not block.text.startswith("HTTP/"):
                asked = block.text
                continue
            given = block.mark.removeprefix("given: ")
            real = shop.ask(asked or changed(first.text, given), given=given)
            status, headers, body = parsed(block.text)
            assert f"HTTP/1.1 {real.status}" == status, block.name
            assert real.get_data(as_text=True).strip() == body, block.name
            ours = {"content-length", "cache-control"}  # said once for all answers
            assert {n: v for n, v in real.headers if n.lower() not in ours} == headers, block.name
            sent.add(headers["Content-Type"] == PROBLEM and json.loads(body)["type"])
            asked = ""
        shop.close()
        base = next(setting.default for setting in SETTINGS if setting.name == "PROBLEM_BASE")
        assert sent - {False} == {base + problem.type for problem in PROBLEMS}


PROBLEM = "application/problem+json"


PROBLEMS = Problem.__subclasses__()


ROUTES = {
    "a finished request; authorize_replay says no": "/withdrawals",
    "a finished request; its body was larger than IDEMPOTENCY_MAX_RESPONSE_BYTES": "/reports",
    "the first request was killed in the view": "/charges",
    "the first request was killed in the view; on_interrupted=fail": "/donations",
    'the view raises Retryable("The payment provider is busy.", retry_after=5)': "/busy",
    "the first request is still running": "/slow",
    "the view meets a serialization failure": "/conflicts",
}


def changed(first: str, given: str) -> str:
    """The request of a response that stands alone: the first one, in this situation."""
    match given:
        case "the first request again":
            return first
        case "no key" | "nobody is signed in":
            header = {"no key": "Idempotency-Key", "nobody is signed in": "X-User"}[given]
            return re.sub(rf"(?m)^{header}: .*\n", "", first)
    new = first.replace("/payments", ROUTES.get(given, "/payments"))
    return re.sub(r"(?m)^(Idempotency-Key): .*$", r"\1: another", new)


def parsed(message: str) -> tuple[str, dict[str, str], str]:
    """First line, headers and body of a request or an answer."""
    head, _, body = message.strip().partition("\n\n")
    first, *lines = head.splitlines()
    return first, dict(line.split(": ", 1) for line in lines), body.strip()


class Shop:
    """The API of the HTTP reference, with a way into each situation that the page describes."""

    def __init__(self, url: str, *, create: bool = True) -> None:
        self.running, self.go_on = threading.Event(), threading.Event()
        self.allowed = True
        self.app, self.db = Flask("shop"), SQLAlchemy()
        self.app.config.update(
            SQLALCHEMY_DATABASE_URI=url,
            SQLALCHEMY_ENGINE_OPTIONS={"connect_args": {"connect_timeout": 2}},
            IDEMPOTENCY_MAX_RESPONSE_BYTES=1000,
        )
        self.db.init_app(self.app)
        Idempotency(self.app, self.db, scope=lambda: request.headers.get("X-User"))

        @self.app.post("/payments")
        @idempotent
        def pay() -> Any:
            answer = {"id": 1, "amount": request.get_json()["amount"]}
            return answer, 201, {"Location": "/payments/1"}

        @self.app.post("/slow")
        @idempotent
        def wait() -> Any:
            self.running.set()
            self.go_on.wait(20)
            return {}

        @self.app.post("/transfers")
        @idempotent(fingerprint="json")
        def transfer() -> Any:
            return {}

        @self.app.post("/withdrawals")
        @idempotent(authorize_replay=lambda operation: self.allowed)
        def withdraw() -> Any:
            return {}

        @self.app.post("/reports")
        @idempotent
        def report() -> Any:
            return "x" * 2000, 201, {"Location": "/reports/1"}

        @self.app.post("/orders")
        @idempotent(refuse_old_keys=True)
        def order() -> Any:
            return {}

        @self.app.post("/conflicts")
        @idempotent
        def conflict() -> Any:
            raising = "DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$"
            self.db.session.execute(sa.text(raising))
            return {}

        self.add_leased_views()
        self.app.register_blueprint(outcomes_blueprint())
        if create:
            with self.app.app_context():
                self.db.create_all()

    def add_leased_views(self) -> None:
        """Views that are not atomic."""

        @self.app.post("/charges")
        @idempotent(atomic=False)
        def charge() -> Any:
            raise Killed

        @self.app.post("/busy")
        @idempotent(atomic=False)
        def be_busy() -> Any:
            raise Retryable("The payment provider is busy.", retry_after=5)

        @self.app.post("/donations")
        @idempotent(atomic=False, on_interrupted="fail")
        def donate() -> Any:
            raise Killed

    def end_leases(self) -> None:
        """As if so much time had passed."""
        end = sa.text("UPDATE idempotency_record SET lease_expires_at = clock_timestamp()")
        with self.app.app_context(), self.db.engine.begin() as connection:
            connection.execute(end)

    def ask(self, message: str, *, given: str) -> Any:
        """Send a request, after the situation that the page gives."""
        match given.partition(";")[0]:
            case "a finished request":
                assert self.send(message).status_code < 300
                self.allowed = False
                return self.send(message)
            case "the first request is still running":
                first = threading.Thread(target=self.send, args=[message])
                first.start()
                assert self.running.wait(20)
                try:
                    return self.send(message)
                finally:
                    self.go_on.set()
                    first.join()
            case "PostgreSQL cannot be reached":
                nowhere = f"postgresql+psycopg2://shop@127.0.0.1:{servers.free_port()}/shop"
                return Shop(nowhere, create=False).send(message)
            case "the first request was killed in the view":
                with pytest.raises(Killed):
                    self.send(message)
                self.end_leases()
                return self.send(message)
        return self.send(message)

    def send(self, message: str) -> Any:
        """Send a request as it stands on the page."""
        first, headers, body = parsed(message)
        method, path, _ = first.split()
        length = headers.pop("Content-Length", None)
        environ = {} if length is None else {"CONTENT_LENGTH": length}
        return self.app.test_client().open(
            path, method=method, headers=headers, data=body, environ_overrides=environ
        )

    def close(self) -> None:
        """Give the connections back."""
        with self.app.app_context():
            self.db.engine.dispose()
