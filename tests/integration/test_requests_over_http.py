"""Keys and bodies as bytes on a real connection: what gunicorn lets through, and what we make of it."""

import http.client
import socket
from urllib.parse import urlsplit

from tests.waiting import wait_until

BODY = b"Content-Length: 2\r\n\r\n{}"


def key(value):
    return b"Idempotency-Key: " + value + b"\r\n" + BODY


def chunked(body):
    return b"Idempotency-Key: key-1\r\nTransfer-Encoding: chunked\r\n\r\n" + body


REFUSED = {
    "no key": (BODY, b"key-required"),
    "underscore for hyphen": (b"Idempotency_Key: k\r\n" + BODY, b"key-required"),
    "spaces only": (key(b"   "), b"key-malformed"),
    "tab inside": (key(b"a\tb"), b"key-malformed"),
    "two lines": (b"Idempotency-Key: key-1\r\n" + key(b"key-1"), b"key-malformed"),
    "UTF-8": (key("schlüssel".encode()), b"key-malformed"),
    "no UTF-8": (key(b"\xff\xfe"), b"key-malformed"),
    "8000 characters": (key(b"k" * 8000), b"key-malformed"),
    "body breaks off": (key(b"key-1").replace(b": 2", b": 800"), b"body-incomplete"),
    "chunks break off": (chunked(b"a\r\n{}"), b"body-incomplete"),
    "chunks without an end": (chunked(b"2\r\n{}\r\n"), b"body-incomplete"),
}
"""What follows the request line, and the name of the problem: a 400."""

ACCEPTED = {
    "bare": key(b"key-1"),
    "quoted": key(b'"key-1"'),
    "spaces around": key(b"   key-1  "),
    "chunked": chunked(b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n"),
}
"""Spellings of one request."""


def send(shop, rest):
    """One request, and nothing after it; status, body, and whether it says that it is a replay."""
    where = urlsplit(shop.url)
    with socket.create_connection((where.hostname, where.port), timeout=10) as client:
        client.sendall(b"POST /payments HTTP/1.1\r\nHost: shop\r\nX-User: alice\r\n" + rest)
        client.shutdown(socket.SHUT_WR)
        answer = http.client.HTTPResponse(client)
        answer.begin()
        return answer.status, answer.read(), answer.getheader("Idempotent-Replayed")


def test_what_is_refused_leaves_nothing_and_what_is_accepted_is_one_request(open_shop):
    shop = open_shop("--workers", "1")
    for name, (rest, problem) in REFUSED.items():
        status, body, _ = send(shop, rest)
        assert (status, b"flask-idempotency:problem:" + problem in body) == (400, True), (name, body)
    assert shop.sql("SELECT key FROM payment") == []
    assert shop.sql("SELECT key FROM idempotency_record") == []
    answers = [send(shop, rest) for rest in ACCEPTED.values()]
    assert answers[0][0] == 201, answers[0]
    assert answers == [answers[0]] + [(201, answers[0][1], "true")] * (len(ACCEPTED) - 1)
    assert shop.sql("SELECT key FROM payment") == [("key-1",)]
    wait_until(shop.nothing_is_left_open, "no transaction is open")
