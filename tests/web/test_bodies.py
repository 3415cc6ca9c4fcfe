"""A request's body: incomplete, too long, chunked, packed, or read by somebody before the view."""

import gc
import gzip
import io
import weakref
from contextlib import suppress

import pytest
from flask import Flask, Request, g, request, request_started
from gunicorn.http.errors import NoMoreData
from werkzeug.exceptions import ClientDisconnected
from werkzeug.test import EnvironBuilder, run_wsgi_app

from flask_idempotency import ConfigurationError, idempotent
from tests.flask_releases import let_go

MIB = 1024 * 1024
JSON, FORM, MULTIPART = (
    "application/json",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=b",
)


def multipart(parts, size=1):
    head = b'--b\r\nContent-Disposition: form-data; name="amount"\r\n\r\n'
    return (head + b"5" * size + b"\r\n") * parts + b"--b--\r\n"


BODIES = {JSON: b'{"amount": 5}\n', FORM: b"amount=5", MULTIPART: multipart(1)}
CHUNKED = pytest.mark.parametrize("chunked", [False, True], ids=["counted", "chunked"])


def send(world, body, kind=JSON, *, chunked=False, terminated=True, length=None, **kwargs):
    """A request as a server hands it over: gunicorn ends the body itself, others do not."""
    body = io.BytesIO(body) if isinstance(body, bytes) else body
    overrides = {"wsgi.input_terminated": True} if terminated else {}
    headers = {"Content-Type": kind, **kwargs.pop("headers", {})}
    if chunked:
        headers["Transfer-Encoding"] = "chunked"
    else:
        overrides["CONTENT_LENGTH"] = str(len(body.getvalue()) if length is None else length)
    kwargs["input_stream"] = body
    return world.post(data=None, headers=headers, environ_overrides=overrides, **kwargs)


@pytest.fixture
def add(world):
    """Adds a view that shows what it finds, of this world or another; gives what it has found."""

    def add(other=None, path="/payments", **options):
        seen = []

        @idempotent(name=path, **options)
        def show():
            seen.append(request.get_data() or request.form)
            return {"json": request.get_json(silent=True), "form": request.form}

        (other or world).app.add_url_rule(path, path, show, methods=["POST"])
        return seen

    return add


class Fails(io.BytesIO):
    """A server's input, which fails at its end."""

    def __init__(self, error, body=b""):
        super().__init__(body)
        self.error = error

    def readinto(self, buffer):
        count = super().readinto(buffer)
        if not count:
            raise self.error
        return count


GONE = OSError("no more data"), ConnectionResetError(), EOFError(), NoMoreData(), ClientDisconnected()
INCOMPLETE = {
    "one byte less": {"body": BODIES[JSON][:-1], "length": len(BODIES[JSON])},
    "nothing": {"body": b"", "length": 5},
    "of a server that counts nothing": {"body": b"{", "length": 5, "terminated": False},
    **{f"{kind} of a form": {"body": BODIES[kind], "kind": kind, "length": 100} for kind in BODIES},
    **{type(error).__name__: {"body": Fails(error), "length": 5} for error in GONE},
    "chunked": {"body": Fails(GONE[0], BODIES[JSON]), "chunked": True},
}


def test_an_incomplete_body_runs_nothing(world, add, assert_problem):
    seen = add()
    world.app.register_error_handler(LookupError, lambda _error: ("too slow", 408))
    for sent in INCOMPLETE.values():
        assert_problem(send(world, **sent), 400, "body-incomplete")
    assert (seen, world.records()) == ([], [])
    assert send(world, BODIES[JSON]).status_code == 200
    own = Fails(LookupError())  # an error of the application's own input is the application's
    assert send(world, own, length=5, key="own").text == "too slow"


def test_a_chunked_body_is_the_same_request_as_a_counted_one(world, add, assert_replayed):
    seen, body = add(), BODIES[JSON]
    assert_replayed(send(world, body, chunked=True), send(world, body))
    assert send(world, body + b" ", chunked=True).status_code == 422
    assert_replayed(send(world, b"", key="empty"), send(world, b"", key="empty"))
    assert send(world, body, key="empty").status_code == 422
    assert send(world, body, chunked=True, terminated=False, key="endless").status_code == 411
    assert len(seen) == len(world.records()) == 2


def test_without_a_key_the_body_is_the_views(make_world, add):
    world = make_world(IDEMPOTENCY_MAX_REQUEST_BYTES=10)
    seen = add(world, required=False)
    assert send(world, BODIES[JSON], length=100, key=None).status_code == 200
    assert seen == [BODIES[JSON]]


class Limited(Request):
    """Its limits can be set, as those of Flask's own since 3.1."""

    max_content_length = 1000
    max_form_parts = 5
    max_form_memory_size = 900_000


def limit_by(world, most):
    world.app.request_class = Limited
    before_request(world, lambda: setattr(request, "max_content_length", most))


def before_request(world, read):
    world.app.before_request(lambda: (read(), None)[1])


def of_length(kind, size):
    begin, end = {JSON: (b'{"note": "', b'"}'), FORM: (b"note=", b"")}.get(kind, (b"", b""))
    return begin + b"x" * (size - len(begin + end)) + end


SETTING, TEXT = "IDEMPOTENCY_MAX_REQUEST_BYTES", "text/plain"
LIMITS = {
    "by default": ({}, {}, TEXT, 16 * MIB),
    "the option": ({SETTING: 1000}, {"max_request_bytes": 5000}, TEXT, 5000),
    "lower than the option": ({"MAX_CONTENT_LENGTH": 100}, {"max_request_bytes": 5000}, TEXT, 100),
    "of the request, lower": ({SETTING: 1000, "own": 100}, {}, TEXT, 100),
    "of the request, higher": ({SETTING: 1000, "own": 5000}, {}, TEXT, 5000),
    # What is parsed may have one mebibyte.
    "JSON as bytes": ({}, {}, JSON, 16 * MIB),
    "JSON": ({}, {"fingerprint": "json"}, JSON, MIB),
    "some fields of JSON": ({}, {"fingerprint": ["/note"]}, JSON, MIB),
    "no JSON": ({}, {"fingerprint": "json"}, TEXT, 16 * MIB),
    "a form": ({}, {}, FORM, MIB),
    "JSON, by the option": ({}, {"fingerprint": "json", "max_request_bytes": 2 * MIB}, JSON, 2 * MIB),
    "a form, by the option": ({}, {"max_request_bytes": 2 * MIB}, FORM, 2 * MIB),
}


@CHUNKED
@pytest.mark.parametrize(("config", "options", "kind", "most"), LIMITS.values(), ids=LIMITS)
def test_no_more_is_read_than_the_request_may_be(make_world, add, config, options, kind, most, chunked):
    world = make_world(**config)
    seen = add(world, **options)
    world.app.register_error_handler(413, lambda _error: ("ours", 413))
    if "own" in config:
        limit_by(world, config["own"])
    far_too_long = io.BytesIO(of_length(kind, most + MIB))
    assert send(world, far_too_long, kind, chunked=chunked).text == "ours"
    assert far_too_long.tell() <= most + 1
    assert world.records() == []
    may_be_cut = chunked and config.keys() & {"own", "MAX_CONTENT_LENGTH"}
    longest = most - 1 if may_be_cut else most  # Werkzeug cuts a chunked body, in silence
    for size, status in (longest, 200), (longest + 1, 413):
        body = of_length(kind, size)
        assert send(world, body, kind, chunked=chunked, key=f"key-{size}").status_code == status
    assert len(seen) == 1


AS_FILE = multipart(1, 2 * MIB).replace(b'name="amount"', b'name="amount"; filename="f"')
FORMS = {
    "a file": (AS_FILE, 200),
    "as the request may have": (multipart(5, 200_000), 200),
    "more parts than that": (multipart(6), 413),
    "fields of a mebibyte together": (multipart(5, 220_000), 413),
}


@pytest.mark.parametrize(("body", "status"), FORMS.values(), ids=FORMS)
def test_werkzeugs_limits_for_forms_hold_and_ours_beside_them(world, add, body, status):
    add()
    limit_by(world, None)
    assert send(world, body, MULTIPART).status_code == status
    assert len(world.records()) == (status == 200)


REFUSED = {
    "by a before_request function": (401, {"user": "mallory"}),
    "by the scope": (401, {"user": ""}),
    "by the scope, with a key in the body": (401, {"user": "", "key": None, "path": "/natural"}),
    "without a key": (400, {"key": None}),
    "with a malformed key": (400, {"key": "a,b"}),
    "a form of a stranger": (401, {"user": "", "key": None, "kind": FORM}),
}


@CHUNKED
def test_nothing_is_read_of_a_request_that_is_refused_anyway(world, add, chunked):
    seen = add(), add(path="/natural", key=lambda: request.form["id"])
    world.app.before_request(lambda: ("who?", 401) if g.account_id == "mallory" else None)
    for name, (status, sent) in REFUSED.items():
        body = io.BytesIO(b"{}")
        assert send(world, body, chunked=chunked, **sent).status_code == status, name
        assert (body.tell(), seen) == (0, ([], [])), name


KEPT = {
    "data": lambda: request.get_data(parse_form_data=False),
    "json": lambda: request.get_json(silent=True),
    "form": lambda: request.form.get("amount"),
}
"""What they read can still be compared."""

USED_UP = {
    "data, not cached": lambda: request.get_data(cache=False),
    "stream": lambda: request.stream.read(-1),
    "a few bytes": lambda: request.stream.read(3),
}
RAW = {
    "environ": lambda: request.environ["wsgi.input"].read(-1),
    "a line": lambda: request.environ["wsgi.input"].readline(-1),
}
"""They leave less of an input than its length claims, which is the same as an incomplete body."""

SERVERS = [(kind, terminated) for kind in BODIES for terminated in (True, False)]


def carelessly(world, read):
    def careless():
        with suppress(Exception):
            read()

    before_request(world, careless)


def receiver(world, read):
    """Comes before our own first function, which counts what is read."""
    world.measure = lambda _app: read()  # the signal keeps a weak reference
    request_started.connect(world.measure, world.app)


@pytest.mark.parametrize("where", [before_request, carelessly, receiver])
@pytest.mark.parametrize("name", [*KEPT, *USED_UP, *RAW])
def test_what_was_read_before_the_view_is_compared_all_the_same_or_refused(
    make_world, add, assert_replayed, assert_problem, name, where
):
    """Who reads an incomplete body learns it, and nothing runs; nor does it for a longer one."""
    limit = "MAX_CONTENT_LENGTH" if where is before_request else SETTING  # which cuts
    world = make_world(TESTING=True, **{limit: 200})
    runs, is_early = add(world), where is receiver
    where(world, {**KEPT, **USED_UP, **RAW}[name])
    for kind, terminated in SERVERS:
        sent = {"key": f"key-{kind[:19]}-{terminated}", "kind": kind, "terminated": terminated}
        body, before = BODIES[kind], len(runs)
        if not is_early:
            assert_problem(send(world, body, length=len(body) + 10, **sent), 400, "body-incomplete")
            longer = body.replace(b"5", b"5" * 100_000)
            for chunked in {False, terminated and name in KEPT}:
                assert send(world, longer, chunked=chunked, **sent).status_code == 413
        if name in RAW and (is_early or not terminated):
            continue
        is_gone = name in {*USED_UP, *RAW} or (name == "form" and is_early and kind != JSON)
        if is_gone:
            with pytest.raises(ConfigurationError, match=r"before the idempotent view.*get_data\(\)"):
                send(world, body, **sent)
        else:
            first = send(world, body, **sent)
            assert "5" in first.text or (name == "data" and kind != JSON)
            assert_replayed(first, send(world, body, **sent))
            assert send(world, body.replace(b"5", b"6"), **sent).status_code == 422
        assert len(runs) == before + (not is_gone)


def buffered():
    request.environ["wsgi.input"] = io.BufferedReader(request.environ["wsgi.input"])


VIEWS = {
    "data": lambda: request.get_data(parse_form_data=False),
    "stream": lambda: request.stream.read(-1),
    "json": lambda: request.get_json(silent=True),
    "values": lambda: request.values,
    "in pieces": lambda: b"".join(iter(lambda: request.stream.read(3), b"")),
    "environ": lambda: request.environ["wsgi.input"].read(-1),
    "an input of its own": lambda: (buffered(), request.get_data())[1],
    "another request": lambda: Request(request.environ).get_data(),
}


@CHUNKED
@pytest.mark.parametrize("first", [None, "data", "json", "form"])
def test_the_view_finds_at_least_what_it_would_find_without_the_extension(world, first, chunked):
    plain = Flask("plain")
    for app in plain, world.app:
        if first:
            app.before_request(lambda: (KEPT[first](), None)[1])
        for name, view in VIEWS.items():
            show = lambda view=view: repr(view())  # noqa: E731
            app.post(f"/{name}", endpoint=name)(show if app is plain else idempotent(show))
    for name in VIEWS:
        for kind, body in BODIES.items():
            sent = {"path": f"/{name}", "key": kind[:19], "chunked": chunked, "kind": kind}
            ours = send(world, body, **sent)
            plains = send(type(world)(plain, None, None, None, ""), body, **sent)
            found_nothing = plains.text in ("b''", "None")
            assert ours.text == plains.text or (first and found_nothing), (name, kind)


def inflated():
    request.stream = gzip.GzipFile(fileobj=request.stream)


def inflated_input():
    request.environ["wsgi.input"] = gzip.GzipFile(fileobj=request.environ["wsgi.input"])


def kept():
    request._cached_data = gzip.decompress(request.get_data())


@pytest.mark.parametrize("fingerprint", ["request", "json", ["/amount"]], ids=str)
@pytest.mark.parametrize("unpack", [inflated, inflated_input, kept])
def test_a_packed_body_is_compared_as_the_view_reads_it(
    world, add, assert_replayed, assert_problem, unpack, fingerprint
):
    before_request(world, unpack)
    add(fingerprint=fingerprint)

    def pack(body, mtime, kind, key="key-1"):
        packed, headers = gzip.compress(body, mtime=mtime), {"Content-Encoding": "gzip"}
        return send(world, packed, kind, key=kind[:19] + key, headers=headers)

    longer = b"field=" + b"x" * 1000 + b"&amount=5"  # than it is packed
    for kind, body in {**BODIES, FORM: longer, MULTIPART: multipart(1, 1000)}.items():
        first = pack(body, 1, kind)
        assert "5" in first.text
        assert_replayed(first, pack(body, 2, kind))
        assert_problem(pack(body.replace(b"5", b"6"), 1, kind), 422, "key-reused")
    assert pack(b"x" * (17 << 20), 1, JSON, "key-2").status_code == 413
    assert len(world.records()) == 3


def test_a_view_may_unpack_the_body_itself(world):
    @world.app.post("/payments")
    @idempotent
    def pay():
        inflated()
        return request.get_json()

    packed, headers = gzip.compress(BODIES[JSON]), {"Content-Encoding": "gzip"}
    assert send(world, packed, headers=headers).json == {"amount": 5}


def test_a_body_is_freed_with_its_request_and_not_by_the_garbage_collector(world, add):
    requests = []
    add()
    world.app.teardown_request(let_go)
    before_request(world, lambda: requests.append(weakref.ref(request._get_current_object())))

    def status(key, body):
        environ = EnvironBuilder("/payments", method="POST", data=body).get_environ()
        environ |= {"HTTP_IDEMPOTENCY_KEY": key, "HTTP_X_USER": "alice"}
        return run_wsgi_app(world.app.wsgi_app, environ)[1][:3]

    status("warm", b"body")
    gc.collect()
    gc.disable()
    try:
        assert [status("key", body) for body in (b"body", b"body", b"other")] == ["200", "200", "422"]
        assert [each() for each in requests] == [None] * 4
    finally:
        gc.enable()
