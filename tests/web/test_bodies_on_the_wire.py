"""Bodies that break off, are too long or come in chunks: told apart before anything is looked up."""

import gc
import gzip
import hashlib
import io
import weakref

import pytest
from flask import Flask, Request, request
from gunicorn.http.errors import NoMoreData
from werkzeug.exceptions import ClientDisconnected
from werkzeug.test import EnvironBuilder, run_wsgi_app

from flask_idempotency import idempotent
from tests.flask_releases import let_go

BODY = b'{"amount": 5, "card": "canary"}'


class BreaksOff(io.BytesIO):
    """What a server's input does when a chunked body ends too early."""

    def read(self, size=-1):
        data = super().read(size)
        if size is None or size < 0 or not data:  # asked to go on to an end that never comes
            raise OSError("no more data")
        return data

    def readinto(self, buffer):
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def post(world, stream, *, chunked=False, terminated=None, length=None, **kwargs):
    """A request as a server hands it over; ``length`` is what its Content-Length claims.

    ``terminated`` is the server's word that it ends the input itself. Werkzeug then counts nothing.
    """
    headers = {"Content-Type": "application/json"}
    overrides = {"wsgi.input_terminated": chunked if terminated is None else terminated}
    if chunked:
        headers["Transfer-Encoding"] = "chunked"
    if length is not None:
        overrides["CONTENT_LENGTH"] = str(length)
    stream = io.BytesIO(stream) if isinstance(stream, bytes) else stream
    return world.post(
        data=None, input_stream=stream, headers=headers, environ_overrides=overrides, **kwargs
    )


@pytest.fixture
def echo():
    def add(world, **options):
        seen = []

        @world.app.post("/payments")
        @idempotent(**options)
        def view():
            seen.append(request.get_data())
            return seen[-1], 201

        return seen

    return add


def test_a_body_shorter_than_it_claims_is_incomplete(world, echo, assert_problem):
    seen = echo(world)
    for terminated in True, False:
        for sent in BODY[:10], BODY[:-1], b"":
            response = post(world, sent, length=len(BODY), terminated=terminated)
            assert_problem(response, 400, "body-incomplete")
    assert seen == []
    assert world.records() == []
    assert post(world, BODY).status_code == 201


def test_a_form_shorter_than_it_claims_is_incomplete(world, echo, assert_problem):
    seen = echo(world)
    for content_type in "application/x-www-form-urlencoded", "multipart/form-data; boundary=b":
        response = world.post(
            data=None,
            input_stream=io.BytesIO(b"amount=5"),
            content_type=content_type,
            environ_overrides={"CONTENT_LENGTH": "100"},
        )
        assert_problem(response, 400, "body-incomplete")
    assert seen == []


def test_a_chunked_body_that_breaks_off_is_incomplete(world, echo, assert_problem):
    seen = echo(world)
    assert_problem(post(world, BreaksOff(BODY[:10]), chunked=True), 400, "body-incomplete")
    assert seen == []
    assert world.records() == []
    assert post(world, BODY, chunked=True).status_code == 201


def test_an_error_of_the_applications_own_input_stream_reaches_the_application(world, echo):
    class TooSlow(Exception):
        pass

    class Impatient(io.BytesIO):
        def readinto(self, _buffer):
            raise TooSlow

        def read(self, _size=-1):
            raise TooSlow

    @world.app.errorhandler(TooSlow)
    def too_slow(_error):
        return {"problem": "too slow"}, 408

    @world.app.post("/plain")
    def plain_view():
        return request.get_data()

    seen = echo(world)
    plain = post(world, Impatient(), length=len(BODY), terminated=True, path="/plain")
    response = post(world, Impatient(), length=len(BODY), terminated=True)
    assert (response.status, response.json) == (plain.status, plain.json)
    assert (response.status_code, seen, world.records()) == (408, [], [])
    assert post(world, BODY).status_code == 201


@pytest.mark.parametrize(
    "error", [ConnectionResetError(), EOFError(), NoMoreData(), ClientDisconnected()]
)
def test_an_error_of_the_server_says_that_the_body_is_incomplete(world, echo, assert_problem, error):
    class Gone(io.BytesIO):
        def readinto(self, _buffer):
            raise error

        def read(self, _size=-1):
            raise error

    seen = echo(world)
    assert_problem(post(world, Gone(), length=len(BODY)), 400, "body-incomplete")
    assert seen == []


def test_a_chunked_body_is_the_same_request_as_a_counted_one(world, echo, assert_replayed):
    seen = echo(world)
    first = post(world, BODY, chunked=True)
    assert first.data == BODY
    assert_replayed(first, post(world, BODY))
    assert seen == [BODY]
    assert post(world, BODY + b" ", chunked=True).status_code == 422


def test_a_chunked_body_that_the_server_cannot_end_needs_a_length(world, echo):
    seen = echo(world)
    assert post(world, BODY, chunked=True, terminated=False).status_code == 411
    assert seen == []
    assert world.records() == []


def test_an_empty_body_is_a_request_too(world, echo, assert_replayed):
    seen = echo(world)
    assert_replayed(post(world, b""), post(world, b""))
    assert seen == [b""]
    assert post(world, BODY).status_code == 422


def test_without_a_key_the_body_is_the_views_business(world, echo):
    seen = echo(world, required=False)
    assert post(world, BODY[:10], chunked=True, key=None).status_code == 201
    assert seen == [BODY[:10]]


READERS = {
    "stream": lambda asked: asked.stream.read(),
    "in pieces": lambda asked: b"".join(iter(lambda: asked.stream.read(7), b"")),
    "environ": lambda asked: asked.environ["wsgi.input"].read(),
    "another request": lambda asked: Request(asked.environ).get_data(),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("chunked", [False, True])
def test_a_view_may_read_the_body_as_a_stream(app, world, read, chunked):
    seen = []

    @app.post("/payments")
    @idempotent
    def view():
        seen.append(read(request))
        return {}, 201

    length = None if chunked else len(BODY)
    for _ in range(2):
        assert post(world, BODY, chunked=chunked, length=length).status_code == 201
    assert seen == [BODY]


class Checksum:
    """A stream that computes a hash of what is read, as in the patterns of Flask's documentation."""

    def __init__(self, stream):
        self.stream, self.hash = stream, hashlib.sha256()

    def read(self, size=-1):
        data = self.stream.read(size)
        self.hash.update(data)
        return data


def inflated():
    request.stream = gzip.GzipFile(fileobj=request.stream)


def inflated_input():
    request.environ["wsgi.input"] = gzip.GzipFile(fileobj=request.environ["wsgi.input"])


PAIRS = "field=" + "x" * 1000 + "&amount=5"
PARTS = b'--b\r\nContent-Disposition: form-data; name="amount"\r\n\r\n' + b"5" * 1000 + b"\r\n--b--\r\n"
DECODED = {
    "application/json": BODY,
    "application/x-www-form-urlencoded": PAIRS.encode(),
    "multipart/form-data; boundary=b": PARTS,
}


def beside_plain(world, path, view, before=None, **options):
    """The view in an application without the extension, and protected."""
    plain = Flask("plain")
    for app, wrapped in (plain, view), (world.app, idempotent(**options)(view)):
        if before is not None:
            app.before_request(before)
        app.post(path, endpoint=path)(wrapped)
    return plain, world.app


@pytest.mark.parametrize("wrap", [inflated, inflated_input])
@pytest.mark.parametrize("content_type", DECODED)
def test_a_body_that_the_application_decodes_reaches_the_view_decoded(world, wrap, content_type):
    def view():
        return {"json": request.get_json(silent=True), "form": request.form}, 201

    packed = gzip.compress(DECODED[content_type])
    sent = {"Content-Encoding": "gzip", "Idempotency-Key": "key-1", "X-User": "alice"}
    answers = [
        app.test_client().post(
            "/decoded", data=packed, headers=sent, content_type=content_type, **TERMINATED
        )
        for app in (*beside_plain(world, "/decoded", view, wrap), world.app)
    ]
    assert [answer.status_code for answer in answers] == [201, 201, 201]
    assert "5" in answers[0].text
    assert answers[0].text == answers[1].text == answers[2].text


def test_a_part_of_a_form_without_a_name_is_compared_too(world):
    view, asked = (lambda: ({"form": [value for _, value in request.form.items()]}, 201)), []
    for app in beside_plain(world, "/nameless", view):
        client = app.test_client()
        for amount in b"5", b"5", b"6":
            part = b"--b\r\nContent-Disposition: form-data\r\n\r\n" + amount + b"\r\n--b--\r\n"
            sent = {"Idempotency-Key": "key-1", "X-User": "alice"}
            kind = "multipart/form-data; boundary=b"
            asked.append(client.post("/nameless", data=part, headers=sent, content_type=kind))
    assert [each.status_code for each in asked] == [201, 201, 201, 201, 201, 422]
    assert asked[0].json == asked[3].json == asked[4].json == {"form": ["5"]}


def kept():
    request._cached_data = gzip.decompress(request.get_data())


def other_field(body):
    """What differs is inside."""
    return body.replace(b"5", b"6")


@pytest.mark.parametrize("fingerprint", ["request", "json", ["/amount"]], ids=str)
@pytest.mark.parametrize("unpack", [inflated, inflated_input, kept])
@pytest.mark.parametrize("content_type", DECODED)
def test_a_packed_body_is_compared_as_the_view_reads_it(
    app, world, assert_replayed, assert_problem, unpack, content_type, fingerprint
):
    app.before_request(unpack)
    app.post("/payments", endpoint="pay")(
        idempotent(fingerprint=fingerprint)(
            lambda: {"json": request.get_json(silent=True), "form": request.form}
        )
    )

    def send(body, mtime, key="key-1"):
        packed, headers = gzip.compress(body, mtime=mtime), {"Content-Encoding": "gzip"}
        return world.post(
            key=key, data=packed, headers=headers, content_type=content_type, **TERMINATED
        )

    body = DECODED[content_type]
    first = send(body, 1)
    assert "5" in first.text
    assert_replayed(first, send(body, 2))
    assert_problem(send(other_field(body), 1), 422, "key-reused")
    assert send(b"x" * (17 << 20), 1, "key-2").status_code == 413
    assert len(world.records()) == 1


@pytest.mark.parametrize("is_above", [True, False])
def test_a_decorator_may_decode_the_body(app, world, is_above):
    def inflate(view):
        def inflating():
            inflated()
            return view()

        return inflating

    def pay():
        return request.get_json()

    view = inflate(idempotent(pay)) if is_above else idempotent(name="pay")(inflate(pay))
    app.post("/payments", endpoint="pay")(view)
    sent = {"data": gzip.compress(BODY), "content_type": "application/json", **TERMINATED}
    answer = world.post(headers={"Content-Encoding": "gzip"}, **sent)
    assert (answer.status_code, answer.json["amount"]) == (200, 5)


def test_a_view_may_take_the_checksum_of_what_it_parses(world):
    def view():
        checksum = request.environ["wsgi.input"] = Checksum(request.environ["wsgi.input"])
        return {"amount": request.form["amount"], "hash": checksum.hash.hexdigest()}, 201

    headers = {"X-User": "alice", "Idempotency-Key": "key-1"}
    told = [
        app.test_client().post("/checked", data={"amount": "5"}, headers=headers).json
        for app in beside_plain(world, "/checked", view)
    ]
    assert told == [{"amount": "5", "hash": hashlib.sha256(b"amount=5").hexdigest()}] * 2


TERMINATED = {"environ_overrides": {"wsgi.input_terminated": True}}


def test_a_body_is_freed_with_its_request_and_not_by_the_garbage_collector(app, world):
    requests = []
    app.teardown_request(let_go)

    @app.before_request
    def note():
        requests.append(weakref.ref(request._get_current_object()))

    @app.post("/payments")
    @idempotent
    def view():
        return {"size": len(request.get_data())}

    def send(key, body):
        environ = EnvironBuilder("/payments", method="POST", data=body).get_environ()
        environ |= {"HTTP_IDEMPOTENCY_KEY": key, "HTTP_X_USER": "alice"}
        return run_wsgi_app(app.wsgi_app, environ)[1]

    send("warm", b"body")
    requests.clear()
    gc.collect()
    gc.disable()
    try:
        for body, status in (b"body", "200"), (b"body", "200"), (b"other", "422"):
            assert send("key", body)[:3] == status
            assert [each() for each in requests] == [None] * len(requests)
    finally:
        gc.enable()
    assert len(requests) == 3
