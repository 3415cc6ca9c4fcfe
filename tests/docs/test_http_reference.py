"""The page of the HTTP interface: each request is sent, and its answer is the one shown."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from flask import request

import servers
from flask_idempotency import Retryable, idempotent
from flask_idempotency.cli import cli
from flask_idempotency.core.errors import Problem
from tests.docs.pages import ROOT, blocks
from tests.killed import Killed

PAGE = ROOT / "docs/http.md"
CONFLICT = sa.text("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$")
BUSY = Retryable("The payment provider is busy.", retry_after=5)


def raw(body: str, **environ: str) -> dict[str, Any]:
    send = {"data": body, "json": None, "content_type": "application/json"}
    return {**send, "environ_overrides": environ}


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "key-required": ("/payments", {"headers": {"Idempotency-Key": None}}),
    "key-malformed": ("/payments", {"key": "one, two"}),
    "body-incomplete": ("/payments", raw("{}", CONTENT_LENGTH="40")),
    "body-malformed": ("/transfers", raw('{"amount": 500, "amount": 5}')),
    "scope-unknown": ("/payments", {"headers": {"X-User": None}}),
    "replay-forbidden": ("/withdrawals", {}),
    "request-in-progress": ("/slow", {}),
    "response-not-kept": ("/reports", {}),
    "operation-interrupted": ("/charges", {}),
    "key-expired": ("/orders", {"key": "017f22e2-79b0-7cc3-98c4-dc0c0c07398f"}),
    "operation-failed": ("/donations", {}),
    "try-again": ("/busy", {}),
    "store-unavailable": ("/payments", {}),
    "transaction-conflict": ("/conflicts", {}),
}
"""By problem: where it is met, and how the request differs from the page's first one."""


def parsed(message: str) -> tuple[str, dict[str, str], str]:
    """First line, headers and body of a request or an answer."""
    head, _, body = message.strip().partition("\n\n")
    first, *lines = head.splitlines()
    return first, dict(line.split(": ", 1) for line in lines), body.strip()


def raises(error: BaseException) -> Any:
    raise error


class Shop:
    """The API of the HTTP reference, with a way into each situation that the page describes."""

    def __init__(self, world: Any, database: servers.FaultProxy) -> None:
        self.world, self.database = world, database
        self.running, self.go_on = threading.Event(), threading.Event()
        self.allowed = True
        paid = lambda: ({"id": 1, **request.get_json()}, 201, {"Location": "/payments/1"})  # noqa: E731
        views: list[tuple[str, dict[str, Any], Any]] = [
            ("payments", {}, paid),
            ("slow", {}, lambda: self.running.set() or (self.go_on.wait(20) and {})),
            ("transfers", {"fingerprint": "json"}, dict),
            ("withdrawals", {"authorize_replay": lambda _operation: self.allowed}, dict),
            ("reports", {}, lambda: ("x" * 2000, 201, {"Location": "/reports/1"})),
            ("orders", {"refuse_old_keys": True}, dict),
            ("conflicts", {}, lambda: world.db.session.execute(CONFLICT)),
            ("charges", {"atomic": False}, lambda: raises(Killed())),
            ("donations", {"atomic": False}, lambda: raises(Killed())),
            ("busy", {"atomic": False}, lambda: raises(BUSY)),
        ]
        for name, options, view in views:
            protected = idempotent(name=name, **options)(view)
            world.app.add_url_rule(f"/{name}", name, protected, methods=["POST"])

    def post(self, path: str, key: str = "example", **changes: Any) -> Any:
        """A request as the page's first one; a header may be None."""
        headers = {"X-User": "alice", "Idempotency-Key": key} | changes.pop("headers", {})
        send = {"json": {"amount": 500}} | changes
        sent = {name: value for name, value in headers.items() if value is not None}
        return self.world.client.post(path, headers=sent, **send)

    def meet(self, problem: str) -> Any:
        """The response of this type."""
        path, changes = REQUESTS[problem]
        run = self.world.app.test_cli_runner().invoke
        if problem == "store-unavailable":
            self.database.refuse()
            self.database.cut()
        if problem in {"operation-interrupted", "operation-failed"}:
            with pytest.raises(Killed):
                self.post(path)
            self.world.sql("update idempotency_record set lease_expires_at = clock_timestamp()")
        if problem == "operation-failed":
            digits = run(cli, ["list", "--operation", "donations"]).output.split("\n")[1][:8]
            why = "--why=it cannot be found out"
            assert run(cli, ["release", "--fail", why, digits]).exit_code == 0
        if problem in {"replay-forbidden", "response-not-kept"}:
            assert self.post(path).status_code < 300
            self.allowed = False
        if problem != "request-in-progress":
            return self.post(path, **changes)
        first = threading.Thread(target=self.post, args=[path])
        first.start()
        assert self.running.wait(20)
        try:
            return self.post(path)
        finally:
            self.go_on.set()
            first.join()


@pytest.fixture
def shop(make_world, postgres) -> Iterator[Shop]:
    with servers.FaultProxy(postgres.database("docs_http")) as database:
        world = make_world(
            init={"scope": lambda: request.headers.get("X-User")},
            SQLALCHEMY_DATABASE_URI=database.url,
            IDEMPOTENCY_MAX_RESPONSE_BYTES=1000,
        )
        yield Shop(world, database)


def test_its_messages_are_the_real_ones(shop):
    asked = ""
    for block in blocks(PAGE, "http"):
        if block.text.startswith("POST"):
            asked = block.text
            continue
        status, headers, body = parsed(block.text)
        if "request-in-progress" in body:
            real = shop.meet("request-in-progress")
        else:
            first, sent, data = parsed(asked)
            real = shop.world.client.post(first.split()[1], headers=sent, data=data)
        assert f"HTTP/1.1 {real.status}" == status, block.name
        assert real.get_data(as_text=True).strip() == body, block.name
        ours = {"content-length", "cache-control"}  # said once for all answers
        assert {n: v for n, v in real.headers if n.lower() not in ours} == headers, block.name


def test_its_problems_are_the_real_ones(shop):
    shown = re.findall(r"(?m)^\(([\w-]+)\)=\n### .+\n\n> (.+)$", PAGE.read_text(encoding="utf-8"))
    for kind, detail in sorted(shown, key=lambda each: each[0] == "store-unavailable"):  # it is last
        real = shop.meet(kind).json
        assert (real["type"].split(":")[-1], real["detail"]) == (kind, detail)
    whole = {"key-reused", "request-in-progress"}  # their messages are shown
    assert {kind for kind, *_ in shown} | whole == {p.type for p in Problem.__subclasses__()}
