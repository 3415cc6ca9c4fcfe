"""The body of an observed request: its readers get what they would get without the extension."""

import copy
import functools
import gc
import io
import itertools
import weakref

import fakeredis
import pytest
from flask import Flask, Request, Response, g, request
from flask_sqlalchemy import SQLAlchemy
from werkzeug.exceptions import HTTPException
from werkzeug.test import EnvironBuilder, run_wsgi_app

from flask_idempotency import Idempotency, idempotent
from tests.flask_releases import let_go
from tests.web.observed.heard import of, only

pytestmark = pytest.mark.parametrize("store", ["postgres"], indirect=True)

IN_REDIS = {
    "SQLALCHEMY_DATABASE_URI": "sqlite://",
    "IDEMPOTENCY_STORE": "redis",
    "IDEMPOTENCY_REDIS_PREFIX": "shop:",
}
"""It needs no server; a request that is only observed makes no other difference between the stores."""


class Input(io.BufferedIOBase):
    """A server's input; breaks off with an error if told."""

    def __init__(self, data, error=None):
        super().__init__()
        self._data, self._error, self.taken = io.BytesIO(data), error, 0

    def readable(self):
        return True

    def _checked(self, data):
        self.taken += len(data)
        if not data and self._error is not None:
            raise self._error
        return data

    def read(self, *size):
        return self._checked(self._data.read(*size))

    def read1(self, *size):
        return self._checked(self._data.read1(*size))

    def readline(self, *size):
        return self._checked(self._data.readline(*size))


BODY = b"first line\nsecond line\nthird"
JSON = b'{"amount": 5}'
FORM = b"amount=5&note=x"

READERS = {
    "get_data": lambda: request.get_data(as_text=False),
    "get_data twice": lambda: request.get_data() + request.get_data(),
    "get_data, not cached": lambda: request.get_data(cache=False) + request.get_data(cache=False),
    "get_data, parsed": lambda: request.get_data(parse_form_data=True),
    "stream": lambda: b"".join([request.stream.read()]),
    "stream in pieces": lambda: b"|".join(iter(lambda: request.stream.read(4), b"")),
    "lines": lambda: b"|".join(request.stream.readlines()),
    "a line and the rest": lambda: request.stream.readline() + b"|" + request.stream.read(),
    "lines of the input": lambda: b"|".join(itertools.islice(_raw(), 2)),
    "the input": lambda: _raw().read(5) + b"|" + _raw().read(100),
    "the input to its end": lambda: _raw().read(),
    "a line of the input": lambda: (
        _raw().readline() + b"|" + _raw().readline(3) + b"|" + _raw().read(4)
    ),
    "the lines of the input": lambda: b"|".join(_raw().readlines()),
    "what is there": lambda: _raw().read1(4) + b"|" + _raw().read1(100),
    "each line of the input": lambda: b"|".join(_raw()),
    "into a buffer": lambda: _into(bytearray(6)) + _into(bytearray(100)),
    "text": lambda: io.TextIOWrapper(_raw()).read().encode(),
    "what it cannot do": lambda: str([hasattr(_raw(), name) for name in ("tell", "mode", "getvalue")]),
    "a buffer": lambda: io.BufferedReader(request.stream, 7).read(),
    "json": lambda: repr(request.get_json(silent=True)).encode(),
    "json, or an error": lambda: repr(request.json).encode(),
    "form": lambda: repr(sorted(request.form.items())).encode(),
    "form, then data": lambda: repr(sorted(request.form.items())).encode() + request.get_data(),
    "values": lambda: repr(sorted(request.values.items())).encode(),
    "files": lambda: b"|".join(each.read() for each in request.files.values()),
    "nothing": lambda: b"nothing",
}


def _raw():
    return request.environ["wsgi.input"]


def _into(buffer):
    size = _raw().readinto(buffer)
    return b"%d|" % size + buffer[:size]


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
        app.config["IDEMPOTENCY_ENFORCE"] = False
        Idempotency(app, db, scope=None, redis=fakeredis.FakeRedis())
    if before is not None:

        @app.before_request
        def read():
            g.before = reader(before)()

    def answer():
        body, status = reader(view)()
        return repr((g.get("before"), body)), status

    options = {"atomic": False, **options}
    app.add_url_rule(
        "/", "view", idempotent(**options)(answer) if observed else answer, methods=["POST"]
    )
    return app


def multipart():
    builder = EnvironBuilder(
        method="POST", data={"amount": "5", "scan": (io.BytesIO(b"content"), "scan.txt")}
    )
    environ = builder.get_environ()
    return environ["wsgi.input"].read(), environ["CONTENT_TYPE"]


BODIES = {
    "text": (BODY, "text/plain"),
    "json": (JSON, "application/json"),
    "broken json": (b"{", "application/json"),
    "form": (FORM, "application/x-www-form-urlencoded"),
    "multipart": multipart(),
    "nothing": (b"", "text/plain"),
}

_keys = itertools.count(1)

SENT = {
    "whole": {},
    "ended by the server": {"terminated": True},
    "chunked": {"length": None, "terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"},
    "chunked, and not read": {"length": None, "HTTP_TRANSFER_ENCODING": "chunked"},
    "broken off": {"more": 10},
    "broken off with an error": {"more": 10, "error": OSError("gone")},
    "after asking": {"HTTP_EXPECT": "100-continue"},
    "longer than the limit": {"MAX_CONTENT_LENGTH": 5},
    "longer than is kept": {"IDEMPOTENCY_MAX_REQUEST_BYTES": 5},
}


def send(app, body, kind, *, key="key-1", length=0, more=0, error=None, terminated=None, **headers):
    headers_of_key = {} if key is None else {"Idempotency-Key": key}
    environ = EnvironBuilder(method="POST", headers=headers_of_key).get_environ()
    environ.update(headers)
    environ.update({"wsgi.input": Input(body, error), "CONTENT_TYPE": kind})
    environ.pop("CONTENT_LENGTH", None)
    if length is not None:
        environ["CONTENT_LENGTH"] = str(len(body) + more)
    if terminated:
        environ["wsgi.input_terminated"] = True
    content, status, lines = run_wsgi_app(app, environ, buffered=True)
    return b"".join(content), status, sorted(lines), environ["wsgi.input"]


def how_and_config(sent):
    items = SENT[sent].items()
    config = {item for item in items if item[0].startswith(("MAX_", "IDEMPOTENCY_"))}
    return {name: value for name, value in items if (name, value) not in config}, frozenset(config)


PAIRS = [
    *itertools.product([None], READERS),
    *itertools.product(
        ["form", "get_data", "stream in pieces", "json"], ["get_data", "form", "stream", "the input"]
    ),
]


# Of forms that break off: Werkzeug leaves their files open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("sent", SENT)
@pytest.mark.parametrize("body", BODIES)
def test_every_reader_gets_the_same(sent, body, heard, apps, store):
    how, config = how_and_config(sent)
    for before, view in PAIRS:
        plain, observed = (
            send(apps(each, before, view, config), *BODIES[body], key=f"key-{next(_keys)}", **how)
            for each in (False, True)
        )
        assert observed[:3] == plain[:3], f"{before}, then {view}"
    assert len(of(heard)) == len(PAIRS)


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        ("broken off", "body-incomplete"),
        ("broken off with an error", "body-incomplete"),
        ("longer than is kept", "body-too-large"),
        ("longer than the limit", "body-too-large"),
    ],
)
@pytest.mark.parametrize("view", ["get_data", "the input to its end", "lines"])
def test_a_body_that_would_have_been_rejected_is_told(sent, problem, view, heard, store):
    how, config = how_and_config(sent)
    send(make_app(True, None, view, config), BODY, "text/plain", **how)
    assert (only(heard).would, only(heard).problem) == ("rejected", problem)


@pytest.mark.parametrize("sent", SENT)
def test_no_body_is_read_that_the_application_does_not_read(sent, heard, store):
    how, config = how_and_config(sent)
    *_, stream = send(make_app(True, None, "nothing", config), BODY, "text/plain", **how)
    assert stream.taken == 0


def observed_app(view, **options):
    db, app = SQLAlchemy(), Flask("shop")
    app.config.update(IN_REDIS)
    app.config["IDEMPOTENCY_ENFORCE"] = False
    db.init_app(app)
    options = {"scope": None, "atomic": False, **options}
    Idempotency(app, db, scope=None, redis=fakeredis.FakeRedis())
    app.add_url_rule("/", "view", idempotent(**options)(view), methods=["POST"])
    return app


def test_a_body_that_the_view_does_not_read_counts_as_equal_to_any_other(heard, store):
    app = observed_app(lambda: ("", 201))
    for body in (b"one", b"two"):
        send(app, body, "text/plain")
    assert [event.would for event in of(heard)] == ["executed", "replayed"]


@pytest.mark.parametrize("view", ["nothing", "get_data", "stream"])
def test_nothing_waits_for_the_garbage_collector(view, heard, store):
    app, body = make_app(True, None, view), Input(BODY)
    app.teardown_request(let_go)
    environ = EnvironBuilder(method="POST", headers={"Idempotency-Key": "key-1"}).get_environ()
    environ.update({"wsgi.input": body, "CONTENT_LENGTH": str(len(BODY))})
    gone = weakref.ref(body)
    gc.disable()
    try:
        run_wsgi_app(app, environ, buffered=True)
        del body, environ
        assert gone() is None
    finally:
        gc.enable()
    assert len(of(heard)) == 1


def test_a_key_in_a_body_that_the_view_does_not_read_is_unknown(heard, store):
    app = observed_app(lambda: ("", 201), key=lambda: request.json["amount"])
    *_, stream = send(app, JSON, "application/json", key=None)
    assert (only(heard).would, stream.taken) == ("unknown", 0)


@pytest.mark.parametrize(
    "options",
    [
        {"key": lambda: request.json["amount"]},
        {"fingerprint": lambda: request.get_data().lower()},
        {"authorize_replay": lambda _operation: request.json["amount"] > 0},
    ],
)
def test_a_function_of_the_application_may_read_the_body_as_the_view_did(options, heard, store):
    app = observed_app(lambda: (str(request.json["amount"]), 201), **options)
    for _ in range(2):
        assert send(app, JSON, "application/json")[0] == b"5"
    assert [event.would for event in of(heard)] == ["executed", "replayed"]


WHOLE = itertools.product(["stream", "the input to its end", "get_data"], ["form", "multipart", "json"])


@pytest.mark.parametrize(
    ("view", "body"), [*WHOLE, ("form", "form"), ("files", "multipart"), ("json", "json")]
)
@pytest.mark.parametrize("option", ["key", "fingerprint"])
def test_a_function_finds_the_body_however_the_view_has_read_it(option, view, body, heard, store):
    digest = {
        "key": lambda: str(hash(request.get_data())),
        "fingerprint": lambda: request.get_data()[:],
    }
    app = observed_app(reader(view), **{option: digest[option]})
    data, kind = BODIES[body]
    for each in (data, data, data.replace(b"5", b"6", 1)):
        send(app, each, kind)
    other = "executed" if option == "key" else "key-reused"
    judged = [event.problem or event.would for event in of(heard)]
    assert judged == ["executed", "replayed", other]


@pytest.mark.parametrize("view", ["nothing", "stream", "the input"])
@pytest.mark.parametrize("sent", ["whole", "chunked"])
def test_a_key_that_is_in_no_body_needs_none(view, sent, heard, store):
    app = observed_app(reader(view), key=lambda: request.headers["X-Request-Id"])
    for number in "112":
        send(app, BODY, "text/plain", key=None, HTTP_X_REQUEST_ID=number, **SENT[sent])
    assert [event.would for event in of(heard)] == ["executed", "replayed", "executed"]


@pytest.mark.parametrize("sent", ["broken off", "longer than is kept", "longer than the limit"])
@pytest.mark.parametrize("option", ["key", "fingerprint"])
def test_what_is_wrong_with_a_body_is_known_whoever_judges(sent, option, heard, store):
    how, config = how_and_config(sent)
    value = {"key": "x", "fingerprint": b"x"}[option]
    app = make_app(True, None, "json, or an error", config, **{option: lambda: value})
    send(app, JSON, "application/json", **how)
    assert only(heard).problem == {"broken off": "body-incomplete"}.get(sent, "body-too-large")


def test_a_fingerprint_of_a_chunked_body_is_taken_when_the_view_has_read_it(heard, store):
    app = observed_app(reader("get_data"), fingerprint=lambda: request.get_data().lower())
    for body in (b"one", b"ONE", b"two"):
        send(app, body, "text/plain", **SENT["chunked"])
    judged = [event.problem or event.would for event in of(heard)]
    assert judged == ["executed", "replayed", "key-reused"]


def test_what_a_function_has_parsed_is_not_left_in_the_request(heard, store):
    def parsed():
        return sorted({"form", "stream", "_cached_data"} & vars(request._get_current_object()).keys())

    left = []
    app = observed_app(reader("stream"), fingerprint=lambda: repr(request.form).encode())
    app.after_request(lambda response: left.append(parsed()) or response)
    app.teardown_request(lambda _error: left.append(parsed()))
    send(app, FORM, BODIES["form"][1])
    assert left == [["stream"], ["stream"]]
    assert only(heard).would == "executed"


def test_an_error_after_the_end_of_a_body_is_none_of_it(heard, store):
    def view():
        known = _raw()
        assert known.read(len(BODY)) == BODY
        with pytest.raises(OSError, match="gone"):
            known.read(1)
        return "", 201

    send(observed_app(view), BODY, "text/plain", error=OSError("gone"))
    assert only(heard).would == "executed"


def test_the_field_of_a_chunked_form_is_known_when_the_view_has_parsed_it(heard, store):
    app = observed_app(lambda: (request.form["amount"], 201), key=lambda: request.form["amount"])
    for body in (FORM, FORM):
        send(app, body, BODIES["form"][1], key=None, **SENT["chunked"])
    assert [event.would for event in of(heard)] == ["executed", "replayed"]


class Blocks(Input):
    """A middleware's input, which gives blocks."""

    def __iter__(self):
        return iter(lambda: self._data.read(6), b"")

    def read(self, size=-1):
        return self._data.read(size)


def _in_a_with_statement(known):
    with known as opened:
        return opened.read()


USES = {
    "in blocks": lambda known: b"|".join([each.upper() for each in known]),
    "in a with statement": _in_a_with_statement,
    "by keyword": lambda known: known.read(size=3) + b"|" + known.read(),
    "by a copy": lambda known: copy.copy(known).read(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_the_input_is_used_as_it_was_made(use, heard, store):
    app = observed_app(lambda: (use(_raw()), 201))
    environ = EnvironBuilder(method="POST", headers={"Idempotency-Key": "key-1"}).get_environ()
    environ.update({"wsgi.input": Blocks(BODY), "CONTENT_LENGTH": str(len(BODY))})
    content, status, _ = run_wsgi_app(app, environ, buffered=True)
    assert (b"".join(content), status) == (use(Blocks(BODY)), "201 CREATED")
    assert only(heard).would == "executed"


def test_the_scope_is_asked_before_the_view(heard, store):
    others = iter(["bob", "carol"])

    def view():
        g.user = next(others)
        return request.get_data()

    app = observed_app(view, scope=lambda: g.get("user", "alice"))
    for _ in range(2):
        send(app, BODY, "text/plain")
    assert [event.would for event in of(heard)] == ["executed", "replayed"]


def test_an_enforced_function_that_reads_the_body_is_not_disturbed(heard, store):
    inner = idempotent(enforce=True, name="inner", atomic=False)(lambda: (request.get_data(), 201))
    app = observed_app(inner, key=lambda: request.json["amount"])
    for _ in range(2):
        assert send(app, JSON, "application/json")[0] == JSON
    assert [event.outcome for _, event in heard if event.outcome] == [
        "executed", "observed", "replayed", "observed",
    ]  # fmt: skip


def test_a_key_in_a_chunked_body_is_known_when_the_view_has_read_it(heard, store):
    options = {"key": lambda: request.json["amount"]}
    app = observed_app(lambda: (str(request.json["amount"]), 201), **options)
    for body in (JSON, JSON, b'{"amount": 6}'):
        send(app, body, "application/json", key=None, **SENT["chunked"])
    assert [event.would for event in of(heard)] == ["executed", "replayed", "executed"]


def test_a_chunked_body_counts_as_equal_to_one_that_is_not(heard, store):
    app = make_app(True, None, "stream")
    for how in ({}, SENT["chunked"], {}):
        send(app, BODY, "text/plain", **how)
    assert [event.would for event in of(heard)] == ["executed", "replayed", "replayed"]


@pytest.mark.parametrize("sent", ["whole", "chunked"])
@pytest.mark.parametrize(
    "options",
    [
        {"key": lambda: request.json["amount"]},
        {"fingerprint": lambda: request.get_data()[:1]},
        {"scope": lambda: request.json["amount"]},
        {"store": lambda _response: request.get_data()},
    ],
    ids=lambda options: next(iter(options)),
)
def test_no_function_of_the_application_takes_the_body_from_the_view(options, sent, heard, store):
    app = observed_app(lambda: (request.stream.read(), 201), **options)
    assert send(app, JSON, "application/json", **SENT[sent])[:2] == (JSON, "201 CREATED")
    assert len(of(heard)) == 1


@pytest.mark.parametrize("sent", ["whole", "chunked"])
@pytest.mark.parametrize("view", ["nothing", "the start"])
@pytest.mark.parametrize("option", ["store", "authorize_replay", "scope", "fingerprint", "key"])
def test_no_function_of_the_application_reads_what_the_view_does_not(option, view, sent, heard, store):
    views = {"nothing": lambda: ("", 201), "the start": lambda: (request.stream.read(3), 201)}

    def reads(*_):
        return request.get_data().decode()

    for key in ("1", "1"):
        app = observed_app(views[view], **{option: reads})
        *_, stream = send(app, JSON, "application/json", key=key, **SENT[sent])
        assert stream.taken == (0 if view == "nothing" else 3)
    assert not {event.would for event in of(heard)} & {"rejected", "unprotected"}


def test_a_scope_in_the_body_is_known_when_the_view_has_read_it(heard, store):
    app = observed_app(lambda: (str(request.json["amount"]), 201), scope=lambda: request.json["amount"])
    for amount in (5, 5, 6):
        send(app, b'{"amount": %d}' % amount, "application/json")
    assert [event.would for event in of(heard)] == ["executed", "replayed", "executed"]


def test_a_body_may_be_read_after_the_request_is_gone(heard, store):
    def view():
        stream = request.stream
        return Response(iter(lambda: stream.read(4) + b"|", b"|"))

    app = observed_app(view)
    body, status, *_ = send(app, b"0123456789ab", "text/plain")
    assert (body, status) == (b"0123|4567|89ab|", "200 OK")
    assert only(heard).would == "executed"


@pytest.mark.parametrize("more", ["seek", "getvalue", "tell"])
def test_the_input_keeps_what_it_can(more, heard, store):
    def view():
        known = _raw()
        start = known.read(5)
        if more == "seek":
            known.seek(0)
            return start + known.read(), 201
        return start + str(getattr(known, more)()).encode(), 201

    app, environ = observed_app(view), EnvironBuilder(method="POST", data=BODY).get_environ()
    environ["HTTP_IDEMPOTENCY_KEY"] = "key-1"
    body, status, _ = run_wsgi_app(app, environ, buffered=True)
    ends = {"seek": BODY, "getvalue": str(BODY).encode(), "tell": b"5"}
    assert (status, b"".join(body)) == ("201 CREATED", BODY[:5] + ends[more])
    app.view_functions["view"] = idempotent(scope=None)(lambda: (request.get_data(), 201))
    send(app, BODY, EnvironBuilder(method="POST", data=BODY).get_environ().get("CONTENT_TYPE", ""))
    assert [event.would for event in of(heard)] == ["executed", "replayed"]


def test_a_fingerprint_is_not_taken_of_what_the_view_has_used_up(heard, store):
    views = iter(["stream", "get_data"])

    def view():
        return READERS[next(views)]()

    app = observed_app(view, fingerprint=READERS["get_data"])
    for _ in range(2):
        send(app, BODY, "text/plain")
    assert [event.would for event in of(heard)] == ["executed", "replayed"]


def test_a_body_that_the_server_ends_too_early_is_not_the_one_of_the_retry(heard, store):
    app = make_app(True, None, "get_data")
    send(app, JSON, "application/json", more=10, terminated=True)
    send(app, JSON, "application/json", terminated=True)
    assert [event.problem or event.would for event in of(heard)] == ["body-incomplete", "executed"]


def test_chunked_bodies_count_as_equal(heard, store):
    app = make_app(True, None, "get_data")
    for body in (b"one", b"two"):
        send(app, body, "text/plain", **SENT["chunked"])
    assert [event.would for event in of(heard)] == ["executed", "replayed"]


@pytest.mark.parametrize("before", [None, "form", "get_data", "stream in pieces"])
def test_a_changed_body_is_noticed_whoever_has_read_it(before, heard, store):
    app = make_app(True, before, "form")
    for body in (FORM, FORM, b"amount=6"):
        send(app, body, "application/x-www-form-urlencoded")
    assert [event.would for event in of(heard)] == ["executed", "replayed", "rejected"]
    assert of(heard)[2].problem == "key-reused"


def test_a_limit_that_a_function_before_the_view_sets_counts(make_world, heard, store):
    class Limited(Request):
        max_content_length = None  # Flask 3.0 lets nobody set its own

    world = make_world(IDEMPOTENCY_ENFORCE=False)
    world.app.request_class = Limited

    @world.app.before_request
    def limit():
        request.max_content_length = 5

    world.app.add_url_rule("/payments", "pay", idempotent(lambda: ("", 201)), methods=["POST"])
    assert world.post().status_code == 201
    assert only(heard).problem == "body-too-large"
