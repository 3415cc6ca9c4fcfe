"""Keys and bodies as bytes on a real connection: what gunicorn lets through, and what we make of it."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.integration.shops import Shop
from tests.waiting import wait_until

USUAL = b"Idempotency-Key: key-1\r\nContent-Length: 2\r\n\r\n{}"


def key(value: bytes) -> bytes:
    return b"Idempotency-Key: " + value + b"\r\nContent-Length: 2\r\n\r\n{}"


def chunked(body: bytes) -> bytes:
    return b"Idempotency-Key: key-1\r\nTransfer-Encoding: chunked\r\n\r\n" + body


# What follows the request line, the answer's status, and the name of the problem: none where
# gunicorn answers before the application is asked.
REFUSED = {
    "no key": (b"Content-Length: 2\r\n\r\n{}", 400, b"key-required"),
    "underscore for hyphen": (
        b"Idempotency_Key: k\r\nContent-Length: 2\r\n\r\n{}",
        400,
        b"key-required",
    ),
    "empty key": (key(b""), 400, b"key-malformed"),
    "spaces only": (key(b"   "), 400, b"key-malformed"),
    "tab inside": (key(b"a\tb"), 400, b"key-malformed"),
    "comma": (key(b"a,b"), 400, b"key-malformed"),
    "two lines": (b"Idempotency-Key: key-1\r\n" + USUAL, 400, b"key-malformed"),
    "UTF-8": (key("schlüssel".encode()), 400, b"key-malformed"),
    "no UTF-8": (key(b"\xff\xfe"), 400, b"key-malformed"),
    "SQL": (key(b"'; drop table payment;--"), 400, b"key-malformed"),
    "256 characters": (key(b"k" * 256), 400, b"key-malformed"),
    "8000 characters": (key(b"k" * 8000), 400, b"key-malformed"),
    "9000 characters": (key(b"k" * 9000), 431, b""),
    "NUL": (key(b"a\x00b"), 400, b""),
    "DEL": (key(b"a\x7fb"), 400, b""),
    "CR": (key(b"a\rb"), 400, b""),
    "folded line": (key(b"a\r\n b"), 400, b""),
    "space before colon": (b"Idempotency-Key : k\r\nContent-Length: 2\r\n\r\n{}", 400, b""),
    "length and chunks": (b"Content-Length: 2\r\n" + chunked(b"2\r\n{}\r\n0\r\n\r\n"), 400, b""),
    "body breaks off": (
        b"Idempotency-Key: key-1\r\nContent-Length: 800\r\n\r\n{}",
        400,
        b"body-incomplete",
    ),
    "chunks break off": (chunked(b"a\r\n{}"), 400, b"body-incomplete"),
    "chunks without an end": (chunked(b"2\r\n{}\r\n"), 400, b"body-incomplete"),
}

ACCEPTED = {
    "bare": USUAL,
    "quoted": key(b'"key-1"'),
    "spaces around": key(b"   key-1  "),
    "chunked": chunked(b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n"),
}
"""Spellings of one request."""


def send(
    shop: Shop, rest: bytes, *, user: bytes = b"alice", is_all: bool = True
) -> tuple[int, bytes, str | None]:
    """One request, and nothing after it; status, body, and whether it says that it is a replay."""
    where = urlsplit(shop.url)
    with socket.create_connection((where.hostname, where.port), timeout=10) as client:
        head = b"POST /payments HTTP/1.1\r\nHost: shop\r\nX-User: " + user + b"\r\n"
        client.sendall(head + rest)
        if is_all:
            client.shutdown(socket.SHUT_WR)
        answer = http.client.HTTPResponse(client)
        answer.begin()
        return answer.status, answer.read(), answer.getheader("Idempotent-Replayed")


@pytest.fixture(scope="module")
def shop(open_lasting_shop: Callable[..., Shop]) -> Shop:
    return open_lasting_shop("--workers", "1", MAX_REQUEST_BYTES="1000")


def test_what_is_refused_leaves_nothing_and_what_is_accepted_is_one_request(shop: Shop) -> None:
    for name, (rest, status, problem) in REFUSED.items():
        got, body, _ = send(shop, rest)
        assert (got, problem in body) == (status, True), (name, got, body)
        assert (b"flask-idempotency" in body) is bool(problem), name
    assert shop.sql("SELECT key FROM payment") == []
    assert shop.sql("SELECT key FROM idempotency_record") == []
    answers = [send(shop, rest) for rest in ACCEPTED.values()]
    assert answers[0][0] == 201, answers[0]
    assert answers == [answers[0]] + [(201, answers[0][1], "true")] * (len(ACCEPTED) - 1)
    assert shop.sql("SELECT key FROM payment") == [("key-1",)]
    wait_until(shop.nothing_is_left_open, "no transaction is open")


def test_no_more_is_read_than_the_request_may_be(shop: Shop) -> None:
    counted = b"Idempotency-Key: large\r\nContent-Length: 150000000\r\n\r\n"
    before = shop.sql("SELECT key FROM idempotency_record")

    def send_chunks(body: bytes, **options: Any) -> int:
        return send(shop, chunked(body).replace(b"key-1", b"large"), **options)[0]

    assert send(shop, counted, is_all=False)[0] == 413
    assert send(shop, counted, user=b"", is_all=False)[0] == 401
    assert send(shop, counted.replace(b"large", b"a,b"), is_all=False)[0] == 400
    assert send_chunks(b"96000000\r\n", user=b"", is_all=False) == 401
    assert send_chunks(b"96000000\r\n" + b"x" * 70_000, is_all=False) == 413
    assert send_chunks(b"3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n") == 413
    assert shop.sql("SELECT key FROM idempotency_record") == before
    assert send_chunks(b"3e8\r\n" + b"x" * 1000 + b"\r\n0\r\n\r\n") == 201
