"""The body of an observed request: its readers get what they would get without the extension.

Or more: what was read before is in the stream again.
"""

import functools
import io
import itertools

import fakeredis
import pytest
from flask import Flask, g, request
from flask_sqlalchemy import SQLAlchemy
from werkzeug.exceptions import HTTPException
from werkzeug.test import EnvironBuilder, run_wsgi_app

from flask_idempotency import Idempotency, idempotent

IN_REDIS = {
    "SQLALCHEMY_DATABASE_URI": "sqlite://",
    "IDEMPOTENCY_ENFORCE": False,
    "IDEMPOTENCY_STORE": "redis",
    "IDEMPOTENCY_REDIS_PREFIX": "shop:",
}
"""It needs no server; a request that is only observed makes no other difference between the stores."""


class Input(io.RawIOBase):
    """A server's input; breaks off with an error if told, once: read again, it is at its end."""

    def __init__(self, data, error=None):
        super().__init__()
        self._data, self._error = io.BytesIO(data), error

    def readable(self):
        return True

    def readinto(self, buffer):
        data = self._data.read(len(buffer))
        if not data and self._error is not None:
            error, self._error = self._error, None
            raise error
        buffer[: len(data)] = data
        return len(data)


BODY = b"first line\nsecond line\nthird"
JSON = b'{"amount": 5}'
FORM = b"amount=5&note=x"

READERS = {
    "get_data": lambda: request.get_data() + request.get_data(),
    "stream in pieces": lambda: b"".join(iter(lambda: request.stream.read(4), b"")),
    "lines": lambda: request.stream.readline() + b"|".join(request.stream.readlines()),
    "json": lambda: repr(request.get_json(silent=True)).encode(),
    "form": lambda: repr(sorted(request.form.items())).encode() + request.get_data(),
    "files": lambda: b"|".join(each.read() for each in request.files.values()),
    "nothing": lambda: b"nothing",
}


def reader(name):
    def view():
        try:
            return READERS[name](), 201
        except (OSError, HTTPException) as error:
            return f"{type(error).__name__}: {error}", 400

    return view


@pytest.fixture(scope="module")
def apps():
    """Applications, each made once."""
    return functools.cache(make_app)


def make_app(observed, before, view, config=frozenset(), **options):
    db, app = SQLAlchemy(), Flask("shop")
    app.config.update(IN_REDIS)
    app.config.update(config)
    db.init_app(app)
    if observed:
        Idempotency(app, db, scope=None, redis=fakeredis.FakeRedis())
    if before is not None:

        @app.before_request
        def read():
            g.before = reader(before)()

    def answer():
        body, status = (reader(view) if isinstance(view, str) else view)()
        return repr((g.get("before"), body)), status

    protected = idempotent(atomic=False, **options)(answer) if observed else answer
    app.add_url_rule("/", "view", protected, methods=["POST"])
    return app


MULTIPART = EnvironBuilder(
    method="POST", data={"amount": "5", "scan": (io.BytesIO(b"content"), "scan.txt")}
).get_environ()
BODIES = {
    "text": (BODY, "text/plain"),
    "json": (JSON, "application/json"),
    "form": (FORM, "application/x-www-form-urlencoded"),
    "multipart": (MULTIPART["wsgi.input"].read(), MULTIPART["CONTENT_TYPE"]),
    "nothing": (b"", "text/plain"),
}

_keys = itertools.count(1)

CHUNKED = {"length": None, "terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}

SENT = {
    "whole": {},
    "chunked": CHUNKED,
    "broken off": {"more": 10},
    "broken off with an error": {"more": 10, "error": OSError("gone")},
    "longer than the limit": {"MAX_CONTENT_LENGTH": 5},
    "longer than is kept": {"IDEMPOTENCY_MAX_REQUEST_BYTES": 5},
    "chunked, and longer than is kept": {**CHUNKED, "IDEMPOTENCY_MAX_REQUEST_BYTES": 5},
}
PROBLEMS = {"broken off": "body-incomplete", "longer": "body-too-large", "chunked,": "body-too-large"}


def send(app, body, kind, *, key="key-1", length=0, more=0, error=None, terminated=None, **headers):
    environ = EnvironBuilder(method="POST", headers={"Idempotency-Key": key}).get_environ()
    environ.update(headers)
    environ.update({"wsgi.input": Input(body, error), "CONTENT_TYPE": kind})
    environ.pop("CONTENT_LENGTH", None)
    if length is not None:
        environ["CONTENT_LENGTH"] = str(len(body) + more)
    if terminated:
        environ["wsgi.input_terminated"] = True
    content, status, lines = run_wsgi_app(app, environ, buffered=True)
    return b"".join(content), status, sorted(lines)


PAIRS = [
    *((None, reader) for reader in READERS),
    *itertools.product(["form", "get_data", "json"], ["get_data", "form"]),
    ("stream in pieces", "get_data"),
]


# Of forms that break off: Werkzeug leaves their files open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("sent", SENT)
@pytest.mark.parametrize("body", BODIES)
def test_every_reader_gets_the_same(sent, body, observed, apps):
    how = dict(SENT[sent])
    config = frozenset((name, how.pop(name)) for name in SENT[sent] if name[:4] in ("MAX_", "IDEM"))
    for before, view in PAIRS:
        plain, ours = (
            send(apps(each, before, view, config), *BODIES[body], key=f"key-{next(_keys)}", **how)
            for each in (False, True)
        )
        assert ours == plain, f"{before}, then {view}"
    assert len(observed()) == len(PAIRS)
    expected = [problem for start, problem in PROBLEMS.items() if sent.startswith(start)]
    if body == "text" and expected:
        found = {(event.would, event.problem) for event in observed()[: len(READERS)]}
        assert found == {("rejected", *expected)}


OPTIONS = {
    "key": lambda: request.json["amount"],
    "fingerprint": lambda: request.get_data()[:-1],
    "scope": lambda: request.json["amount"],
    "authorize_replay": lambda _operation: request.json["amount"] == 5,
    "store": lambda _response: request.json["amount"] == 5,
}


@pytest.mark.parametrize("sent", ["whole", "chunked"])
@pytest.mark.parametrize(
    ("before", "view", "option"),
    [
        *((None, "lines", option) for option in ("key", "fingerprint", "scope")),
        *(("json", "json", option) for option in OPTIONS),
    ],
)
def test_a_function_of_the_application_finds_the_body_and_takes_nothing_of_it(
    option, before, view, sent, would
):
    plain, ours = (make_app(each, before, view, **{option: OPTIONS[option]}) for each in (False, True))
    for _ in range(2):
        replies = [send(app, JSON, "application/json", **SENT[sent]) for app in (plain, ours)]
        assert replies[0] == replies[1]
    assert would() == ["executed", "replayed"]


@pytest.mark.parametrize("sent", ["whole", "chunked"])
def test_an_enforced_function_that_an_observed_view_calls_finds_the_body(sent, heard):
    inner = idempotent(enforce=True, name="inner", atomic=False)(lambda: (request.get_data(), 201))
    app, key = make_app(True, None, "nothing"), OPTIONS["key"]
    app.view_functions["view"] = idempotent(atomic=False, key=key)(inner)
    for _ in range(2):
        assert send(app, JSON, "application/json", **SENT[sent])[0] == JSON
    outcomes = [event.outcome for _, event in heard if event.outcome]
    assert outcomes == ["executed", "observed", "replayed", "observed"]
