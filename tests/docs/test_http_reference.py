"""The page of the HTTP interface: each request is sent, and its answer is the one shown."""

from __future__ import annotations

import re
import threading

import pytest
from flask import request

from flask_idempotency import idempotent
from flask_idempotency.core.errors import BodyMalformed, KeyMalformed, Problem
from flask_idempotency.core.fingerprint import parse_json
from flask_idempotency.core.keys import parse_key
from tests.docs.pages import ROOT, blocks
from tests.waiting import PATIENCE_SECONDS

PAGE = ROOT / "docs/http.md"


def parsed(message):
    """First line, headers and body of a request or an answer."""
    head, _, body = message.strip().partition("\n\n")
    first, *lines = head.splitlines()
    return first, dict(line.split(": ", 1) for line in lines), body.strip()


def test_its_messages_are_the_real_ones(make_world):
    world = make_world(init={"scope": lambda: request.headers["X-User"]})
    running, go_on = threading.Event(), threading.Event()

    @world.app.post("/payments")
    @idempotent
    def payments():
        if len(request.data) > 20:
            running.set()
            go_on.wait(PATIENCE_SECONDS)
        return {"id": 1, **request.get_json()}, 201, {"Location": "/payments/1"}

    def send(key=None):
        first, sent, data = parsed(asked)
        headers = sent | ({"Idempotency-Key": key} if key else {})
        data = f"{data:30}" if key else data
        return world.app.test_client().post(first.split()[1], headers=headers, data=data)

    asked = ""
    slow = threading.Thread(target=send, args=["slow"])
    for block in blocks(PAGE, "http"):
        if block.text.startswith("POST"):
            asked = block.text
            continue
        status, headers, body = parsed(block.text)
        if runs := "request-in-progress" in body:
            slow.start()
            assert running.wait(PATIENCE_SECONDS)
        real = send("slow" if runs else None)
        assert f"HTTP/1.1 {real.status}" == status, block.name
        assert real.get_data(as_text=True).strip() == body, block.name
        ours = {"content-length", "cache-control"}  # said once for all answers
        assert {n: v for n, v in real.headers if n.lower() not in ours} == headers, block.name
    go_on.set()
    slow.join()


def test_its_problems_are_those_of_the_code():
    """What a request must be for each of them: tests/web."""
    page = PAGE.read_text(encoding="utf-8")
    shown = dict(re.findall(r"(?m)^\(([\w-]+)\)=\n### .+\n\n> (.+)$", page))
    whole = {"key-reused", "request-in-progress"}  # their messages are shown
    assert shown.keys() | whole == {problem.type for problem in Problem.__subclasses__()}
    said = {problem.type: problem().detail for problem in Problem.__subclasses__()}
    del shown["try-again"]  # in words of the view's own
    decide = (ROOT / "flask_idempotency/operate/decide.py").read_text(encoding="utf-8")
    assert shown.pop("operation-failed") in decide  # what release --fail stores
    with pytest.raises(KeyMalformed) as malformed:
        parse_key("one, two")
    said["key-malformed"] = malformed.value.detail
    with pytest.raises(BodyMalformed) as malformed:
        parse_json(b'{"amount": 500, "amount": 5}')
    said["body-malformed"] = malformed.value.detail
    assert shown.items() <= said.items()
