"""The body of an observed request: its readers get what they would get without the extension.

Or more: what was read before is in the stream again.
"""

import functools
import io
import itertools
import secrets

import fakeredis
import pytest
from flask import Flask, Request, g, request
from flask_sqlalchemy import SQLAlchemy
from werkzeug.exceptions import HTTPException
from werkzeug.test import EnvironBuilder, run_wsgi_app

from flask_idempotency import Idempotency, idempotent


class Input(io.RawIOBase):
    """A server's input; breaks off with an error if told, once: read again, it is at its end."""

    def __init__(self, data, error=None):
        super().__init__()
        self._data, self._error = io.BytesIO(data), error

    def readable(self):
        return True

    def readinto(self, buffer):
        data, error = self._data.read(len(buffer)), self._error
        if not data and error is not None:
            self._error = None
            raise error
        buffer[: len(data)] = data
        return len(data)


READERS = {
    "get_data": lambda: request.get_data() + request.get_data(),
    "stream in pieces": lambda: b"".join(iter(lambda: request.stream.read(4), b"")),
    "lines": lambda: request.stream.readline() + b"|".join(request.stream.readlines()),
    "json": lambda: repr(request.get_json(silent=True)).encode(),
    "form": lambda: repr(sorted(request.form.items())).encode() + request.get_data(),
    "files": lambda: b"|".join(each.read() for each in request.files.values()),
    "another request": lambda: Request(request.environ).get_data(),
    "nothing": lambda: b"nothing",
}


def read(name):
    try:
        return READERS[name](), 201
    except (OSError, HTTPException) as error:
        return f"{type(error).__name__}: {error}", 400


def make_app(observed, before, view, config=frozenset(), **options):
    """On a store that needs no server: in what is only observed it makes no other difference."""
    db, app = SQLAlchemy(), Flask("shop")
    app.config.update(
        SQLALCHEMY_DATABASE_URI="sqlite://",
        IDEMPOTENCY_ENFORCE=False,
        IDEMPOTENCY_STORE="redis",
        IDEMPOTENCY_REDIS_PREFIX="shop:",
    )
    app.config.update(config)
    db.init_app(app)
    if observed:
        Idempotency(app, db, scope=None, redis=fakeredis.FakeRedis())
    if before is not None:
        app.before_request(lambda: setattr(g, "before", read(before)))

    def answer():
        body, status = read(view)
        return repr((g.get("before"), body)), status

    protected = idempotent(atomic=False, **options)(answer) if observed else answer
    app.add_url_rule("/", "view", protected, methods=["POST"])
    return app


JSON = b'{"amount": 5}', "application/json"
MULTIPART = EnvironBuilder(data={"amount": "5", "scan": (io.BytesIO(b"content"), "scan.txt")})
BODIES = {
    "text": (b"first line\nsecond line\nthird", "text/plain"),
    "json": JSON,
    "form": (b"amount=5&note=x", "application/x-www-form-urlencoded"),
    "multipart": [MULTIPART.get_environ()[name] for name in ("wsgi.input", "CONTENT_TYPE")],
    "nothing": (b"", "text/plain"),
}
BODIES["multipart"][0] = BODIES["multipart"][0].read()

CHUNKED = {"CONTENT_LENGTH": None, "wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}
KEPT = {"IDEMPOTENCY_MAX_REQUEST_BYTES": 5}
SENT = {
    "whole": ({}, {}, None),
    "chunked": (CHUNKED, {}, None),
    "broken off": ({"CONTENT_LENGTH": "9999"}, {}, "body-incomplete"),
    "broken off with an error": (
        {"CONTENT_LENGTH": "9999", "error": OSError("gone")},
        {},
        "body-incomplete",
    ),
    "longer than the limit": ({}, {"MAX_CONTENT_LENGTH": 5}, "body-too-large"),
    "longer than is kept": ({}, KEPT, "body-too-large"),
    "chunked, and longer than is kept": (CHUNKED, KEPT, "body-too-large"),
}
"""How a server passes a body on, the limits, and what a short text would have been rejected for."""

PAIRS = [
    *((None, reader) for reader in READERS),
    *itertools.product(["form", "get_data", "json"], ["get_data", "form"]),
    ("stream in pieces", "get_data"),
]


def send(app, body, kind, *, key="key-1", error=None, **environ):
    given = EnvironBuilder(method="POST", headers={"Idempotency-Key": key}).get_environ()
    given |= {"wsgi.input": Input(body, error), "CONTENT_TYPE": kind, "CONTENT_LENGTH": str(len(body))}
    given |= environ
    sent = {name: value for name, value in given.items() if value is not None}
    content, status, lines = run_wsgi_app(app, sent, buffered=True)
    return b"".join(content), status, sorted(lines)


@pytest.fixture(scope="module")
def apps():
    """Applications, each made once."""
    return functools.cache(make_app)


# Of forms that break off: Werkzeug leaves their files open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("sent", SENT)
@pytest.mark.parametrize("body", BODIES)
def test_every_reader_gets_the_same(sent, body, observed, apps):
    environ, config, problem = SENT[sent]
    for before, view in PAIRS:
        plain, ours = (
            send(
                apps(each, before, view, frozenset(config.items())),
                *BODIES[body], key=secrets.token_hex(8), **environ,
            )
            for each in (False, True)
        )  # fmt: skip
        assert ours == plain, f"{before}, then {view}"
    assert len(observed()) == len(PAIRS)
    if body == "text" and problem:
        found = {(event.would, event.problem) for event in observed()[: len(READERS)]}
        assert found == {("rejected", problem)}


OPTIONS = {
    "key": lambda: request.json["amount"],
    "fingerprint": lambda: request.get_data()[:-1],
    "scope": lambda: request.json["amount"],
    "authorize_replay": lambda _operation: request.json["amount"] == 5,
    "store": lambda _response: request.json["amount"] == 5,
}
READ_BEFORE = [
    *((None, "lines", option) for option in ("key", "fingerprint", "scope")),
    *(("json", "json", option) for option in OPTIONS),
]


@pytest.mark.parametrize("sent", ["whole", "chunked"])
@pytest.mark.parametrize(("before", "view", "option"), READ_BEFORE)
def test_a_function_of_the_application_finds_the_body_and_takes_nothing_of_it(
    option, before, view, sent, would
):
    plain, ours = (make_app(each, before, view, **{option: OPTIONS[option]}) for each in (False, True))
    for _ in range(2):
        replies = [send(app, *JSON, **SENT[sent][0]) for app in (plain, ours)]
        assert replies[0] == replies[1]
    assert would() == ["executed", "replayed"]
