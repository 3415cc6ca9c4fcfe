"""How much of a body is read, when, and of whom."""

from __future__ import annotations

import io
import itertools
import time

import pytest
from flask import Flask, Request, g, request

from flask_idempotency import ConfigurationError, idempotent

MIB = 1024 * 1024


class Upload(io.RawIOBase):
    """A client's body of any size, which counts what the application takes of it."""

    def __init__(self, size: int) -> None:
        self.left, self.taken = size, 0

    def readable(self) -> bool:
        return True

    def seek(self, *_where) -> int:
        return 0

    tell = seek

    def readinto(self, buffer) -> int:
        count = min(len(buffer), self.left)
        buffer[:count] = b"x" * count
        self.left, self.taken = self.left - count, self.taken + count
        return count


def send(world, upload, *, chunked=False, headers=None, terminated=True, **kwargs):
    """The upload as gunicorn hands it over: it ends by itself."""
    overrides = {"wsgi.input_terminated": True} if terminated else {}
    headers = {"Content-Type": "application/octet-stream", **(headers or {})}
    if chunked:
        headers["Transfer-Encoding"] = "chunked"
    else:
        overrides["CONTENT_LENGTH"] = str(upload.left)
    return world.post(
        data=None, input_stream=upload, headers=headers, environ_overrides=overrides, **kwargs
    )


@pytest.fixture
def add_sink():
    def add(world, **options):
        runs = []

        @world.app.post("/payments")
        @idempotent(**options)
        def sink():
            runs.append(len(request.get_data()))
            return {}, 201

        return runs

    return add


class Limited(Request):
    """Its limits can be set, as those of Flask's own since 3.1."""

    max_content_length: int | None = 1000
    max_form_parts = 3
    max_form_memory_size: int | None = 100_000


def limit_by(world, **limits):
    world.app.request_class = Limited

    @world.app.before_request
    def limit():
        for name, most in limits.items():
            setattr(request, name, most)


@pytest.mark.parametrize("chunked", [False, True], ids=["counted", "chunked"])
class TestLimitOfTheRequest:
    def test_a_smaller_one_holds(self, make_world, add_sink, chunked):
        world = make_world()
        runs = add_sink(world)
        limit_by(world, max_content_length=100)
        upload = Upload(500)
        assert send(world, upload, chunked=chunked).status_code == 413
        assert upload.taken <= 101
        most = 100 - chunked  # one at the limit may have been cut there
        assert send(world, Upload(most), chunked=chunked).status_code == 201
        assert send(world, Upload(most + 1), chunked=chunked, key="key-2").status_code == 413
        assert runs == [most]

    def test_a_larger_one_holds(self, make_world, add_sink, chunked):
        world = make_world(IDEMPOTENCY_MAX_REQUEST_BYTES=1000)
        runs = add_sink(world)
        limit_by(world, max_content_length=5000)
        most = 5000 - chunked
        assert send(world, Upload(most), chunked=chunked).status_code == 201
        assert send(world, Upload(most + 1), chunked=chunked, key="key-2").status_code == 413
        assert runs == [most]


@pytest.mark.parametrize("chunked", [False, True], ids=["counted", "chunked"])
def test_without_a_limit_of_the_applications_own_the_setting_is_one(make_world, add_sink, chunked):
    world = make_world(IDEMPOTENCY_MAX_REQUEST_BYTES=1000)
    runs = add_sink(world)
    upload = Upload(150 * MIB)
    assert send(world, upload, chunked=chunked).status_code == 413
    assert upload.taken <= 1001
    assert world.records() == []
    assert send(world, Upload(1000), chunked=chunked).status_code == 201
    assert runs == [1000]


def test_by_default_16_mib_are_read(world, add_sink):
    runs = add_sink(world)
    assert send(world, Upload(16 * MIB)).status_code == 201
    assert send(world, Upload(16 * MIB + 1), key="key-2").status_code == 413
    assert runs == [16 * MIB]


def test_a_body_that_is_too_long_gets_the_applications_own_413(make_world, add_sink):
    world = make_world(IDEMPOTENCY_MAX_REQUEST_BYTES=10)
    add_sink(world)
    world.app.register_error_handler(413, lambda _error: ("ours", 413))
    assert send(world, Upload(11)).text == "ours"


def test_without_a_key_the_setting_is_no_limit(make_world, add_sink):
    world = make_world(IDEMPOTENCY_MAX_REQUEST_BYTES=10)
    runs = add_sink(world, required=False)
    assert send(world, Upload(11), key=None).status_code == 201
    assert runs == [11]


FORM = "application/x-www-form-urlencoded"
REFUSED = {
    "by a before_request function": (401, {"user": "mallory"}),
    "by the scope": (401, {"user": ""}),
    "without a key": (400, {"key": None}),
    "with a malformed key": (400, {"key": "a,b"}),
    "a form of a stranger": (401, {"user": "", "key": None, "headers": {"Content-Type": FORM}}),
}


@pytest.mark.parametrize(("status", "kwargs"), REFUSED.values(), ids=REFUSED)
def test_nothing_is_read_of_a_request_that_is_refused_anyway(app, world, add_sink, status, kwargs):
    runs = add_sink(world, scope=lambda: request.headers["X-User"])

    @app.before_request
    def authenticate():
        if request.headers["X-User"] == "mallory":
            return "who?", 401

    for chunked in False, True:
        upload = Upload(150 * MIB)
        assert send(world, upload, chunked=chunked, **kwargs).status_code == status
        assert upload.taken == 0
    assert runs == []


def test_nothing_is_read_of_a_stranger_whose_key_is_in_the_body(world, add_sink):
    add_sink(world, scope=lambda: None, key=lambda: request.form["id"])
    upload = Upload(150 * MIB)
    assert send(world, upload, key=None).status_code == 401
    assert upload.taken == 0


def test_nothing_is_read_before_a_decorator_above_has_let_the_request_in(app, world):
    def guarded(view):
        def guard():
            return "who?", 401

        guard.__wrapped__ = view
        return guard

    app.post("/payments", endpoint="pay")(guarded(idempotent(dict)))
    world.idempotency.protect(app)
    upload = Upload(MIB)
    assert send(world, upload, user="").status_code == 401
    assert upload.taken == 0


KEEPERS = {
    "data": lambda: request.get_data(cache=True),
    "json": lambda: request.get_json(silent=True),
    "form": lambda: request.form.get("amount"),
}
"""What they read can still be compared."""

READERS = KEEPERS | {
    "data, not cached": lambda: request.get_data(cache=False),
    "stream": lambda: request.stream.read(-1),
    "a few bytes": lambda: request.stream.read(3),
    "environ": lambda: request.environ["wsgi.input"].read(-1),
    "a line": lambda: request.environ["wsgi.input"].readline(-1),
}
BODIES = {
    "json": ("application/json", b'{"amount": 5}\n'),
    "urlencoded": (FORM, b"amount=5"),
    "multipart": (
        "multipart/form-data; boundary=b",
        b'--b\r\nContent-Disposition: form-data; name="amount"\r\n\r\n5\r\n--b--\r\n',
    ),
}


SENT = [(*body, terminated) for body in BODIES.values() for terminated in (True, False)]
"""Each through a server that ends the body itself, as gunicorn does, and through one that does not."""

GUNICORN = {"environ_overrides": {"wsgi.input_terminated": True}}


def ask(world, content_type, body, *, chunked=False, terminated=True, length=None, **kwargs):
    overrides = {"wsgi.input_terminated": True} if terminated else {}
    headers = {"Content-Type": content_type}
    if chunked:
        headers["Transfer-Encoding"] = "chunked"
    else:
        overrides["CONTENT_LENGTH"] = str(len(body) if length is None else length)
    kwargs |= {"input_stream": io.BytesIO(body), "headers": headers}
    return world.post(data=None, environ_overrides=overrides, **kwargs)


def read_first(app, read):
    @app.before_request
    def before():
        read()


@pytest.mark.parametrize("read", KEEPERS.values(), ids=KEEPERS)
class TestKeptByABeforeRequestFunction:
    """As Flask-WTF does, and what checks a signature."""

    def test_the_whole_body_is_compared(self, app, world, read):
        read_first(app, read)
        app.post("/payments", endpoint="pay")(idempotent(dict))
        for number, (content_type, body, terminated) in enumerate(SENT):
            server = {"terminated": terminated, "key": f"key-{number}"}
            assert ask(world, content_type, body, **server).status_code == 200
            again = ask(world, content_type, body, **server)
            assert again.headers["Idempotent-Replayed"] == "true"
            other = ask(world, content_type, body.replace(b"5", b"6"), **server)
            assert other.status_code == 422

    def test_the_view_finds_at_least_what_it_would_find_without_the_extension(self, world, read):
        plain, found = Flask("plain"), {}
        views = {
            "data": lambda: request.get_data(cache=True),
            "form": lambda: dict(request.form),
            "stream": lambda: request.stream.read(-1),
            "json": lambda: request.get_json(silent=True),
        }
        for app, wrap in (plain, lambda view: view), (world.app, idempotent(required=False)):
            read_first(app, read)
            for name, view in views.items():
                found[app, name] = []

                def pay(app=app, name=name, view=view):
                    found[app, name].append(view())
                    return {}

                app.post(f"/{name}", endpoint=name)(wrap(pay))
        for name in views:
            for content_type, body in BODIES.values():
                for app in plain, world.app:
                    headers = {"Content-Type": content_type, "X-User": "alice"}
                    headers["Idempotency-Key"] = f"key-{len(found[app, name])}"
                    app.test_client().post(f"/{name}", headers=headers, data=body, **GUNICORN)
            assert len(found[plain, name]) == len(BODIES)
            for ours, plains in zip(found[world.app, name], found[plain, name], strict=True):
                assert ours == plains or (name == "stream" and plains == b"")

    def test_the_limit_holds_there_too(self, make_world, read):
        for chunked, setting in itertools.product((False, True), LIMITS):
            world = make_world(**{setting: 10})
            read_first(world.app, read)
            world.app.post("/payments", endpoint="pay")(idempotent(dict))
            for content_type, body in BODIES.values():
                longer = body.replace(b"5", b"5" * 100_000)
                assert ask(world, content_type, longer, chunked=chunked).status_code == 413
            assert world.records() == []


LIMITS = ["IDEMPOTENCY_MAX_REQUEST_BYTES", "MAX_CONTENT_LENGTH"]


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
class TestReadByABeforeRequestFunction:
    def test_a_body_that_breaks_off_is_incomplete(self, app, world, assert_problem, read):
        runs = []
        read_first(app, read)
        app.post("/payments", endpoint="pay")(idempotent(lambda: runs.append(1) or {}))
        for content_type, body, terminated in SENT:
            response = ask(world, content_type, body, terminated=terminated, length=len(body) + 10)
            assert_problem(response, 400, "body-incomplete")
        assert runs == []
        assert world.records() == []

    def test_who_catches_the_error_runs_nothing_either(self, app, world, assert_problem, read):
        @app.before_request
        def careless():
            try:
                read()
            except Exception:
                g.caught = True

        app.post("/payments", endpoint="pay")(idempotent(dict))
        response = ask(world, "application/json", b'{"amount"', length=100)
        assert_problem(response, 400, "body-incomplete")
        assert world.records() == []


USED_UP = READERS.keys() - KEEPERS


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("name", sorted(USED_UP))
def test_who_reads_a_body_and_does_not_keep_it_is_told_so(app, world, name, chunked):
    app.testing, runs = True, []
    read_first(app, READERS[name])
    app.post("/payments", endpoint="pay")(idempotent(lambda: runs.append(1) or {}))
    for content_type, body in BODIES.values():
        with pytest.raises(ConfigurationError, match=r"before the idempotent view.*get_data\(\)"):
            ask(world, content_type, body, chunked=chunked)
    assert (runs, world.records()) == ([], [])


JSON_TYPE = "application/json"
LONG_JSON = b'{"note": "' + b"x" * (MIB - 12) + b'"}'
COMPARED_AS_JSON = ["json", ["/note"]]


def long_form(size):
    return b"note=" + b"x" * (size - 5)


class TestWhatIsParsed:
    """JSON that is compared as JSON, and the fields of a form, may have 1 MiB."""

    @pytest.mark.parametrize("chunked", [False, True])
    @pytest.mark.parametrize("fingerprint", COMPARED_AS_JSON, ids=str)
    def test_longer_json_is_compared_as_bytes_only(self, app, world, fingerprint, chunked):
        app.post("/payments", endpoint="pay")(idempotent(fingerprint=fingerprint)(dict))
        app.post("/bytes", endpoint="bytes")(idempotent(dict))
        assert ask(world, JSON_TYPE, LONG_JSON, chunked=chunked).status_code == 200
        longer = LONG_JSON + b" "
        assert ask(world, JSON_TYPE, longer, chunked=chunked, key="key-2").status_code == 413
        assert ask(world, "text/plain", longer, chunked=chunked, key="key-2").status_code == 200
        assert ask(world, JSON_TYPE, longer, chunked=chunked, path="/bytes").status_code == 200

    @pytest.mark.parametrize("kept", [None, "form"])
    def test_so_are_forms(self, app, world, kept):
        if kept:
            read_first(app, KEEPERS[kept])
        app.post("/payments", endpoint="pay")(idempotent(dict))
        assert ask(world, FORM, long_form(MIB)).status_code == 200
        assert ask(world, FORM, long_form(MIB + 1), key="key-2").status_code == 413
        fields = multipart(3, 400_000)
        assert ask(world, MULTIPART, fields, key="key-2").status_code == 413
        files = fields.replace(b'name="n"', b'name="n"; filename="f"')
        assert ask(world, MULTIPART, files, key="key-2").status_code == 200

    def test_the_option_replaces_both_limits(self, make_world):
        world = make_world(IDEMPOTENCY_MAX_REQUEST_BYTES=100)
        for number, fingerprint in enumerate(["request", *COMPARED_AS_JSON]):
            options = {"fingerprint": fingerprint, "max_request_bytes": 2 * MIB}
            view = idempotent(name=f"pay-{number}", **options)(dict)
            world.app.post(f"/{number}", endpoint=f"pay-{number}")(view)
        for number in range(3):
            for kind, body in (JSON_TYPE, LONG_JSON + b" "), (FORM, long_form(2 * MIB)):
                sent = {"path": f"/{number}", "key": f"{number}-{kind}"}
                assert ask(world, kind, body, **sent).status_code == 200
                longer = body + b"x" * (2 * MIB + 1 - len(body))
                assert ask(world, kind, longer, **sent).status_code == 413

    def test_the_application_may_set_a_lower_limit(self, make_world):
        world = make_world(MAX_CONTENT_LENGTH=100)
        world.app.post("/payments", endpoint="pay")(idempotent(max_request_bytes=MIB)(dict))
        for chunked in False, True:
            assert ask(world, FORM, long_form(101), chunked=chunked).status_code == 413
            assert ask(world, FORM, long_form(99), chunked=chunked).status_code == 200


def multipart(parts, size=10):
    head = b'--b\r\nContent-Disposition: form-data; name="n"\r\n\r\n'
    return (head + b"x" * size + b"\r\n") * parts + b"--b--\r\n"


MULTIPART = "multipart/form-data; boundary=b"
TOO_MUCH = {"parts": multipart(4), "a long field": multipart(1, 100_001)}


@pytest.mark.parametrize("body", TOO_MUCH.values(), ids=TOO_MUCH)
def test_limits_for_forms_hold(app, world, body):
    limit_by(world, max_content_length=None)
    app.post("/payments", endpoint="pay")(idempotent(dict))
    assert ask(world, MULTIPART, body).status_code == 413
    assert world.records() == []


def test_limits_for_forms_may_be_set_for_a_request(app, world):
    limit_by(world, max_content_length=None, max_form_parts=5, max_form_memory_size=200_000)
    app.post("/payments", endpoint="pay")(idempotent(lambda: dict(request.form)))
    assert ask(world, MULTIPART, multipart(5, 200_000)).json == {"n": "x" * 200_000}
    assert ask(world, MULTIPART, multipart(6)).status_code == 413
    assert ask(world, MULTIPART, multipart(1, 200_001)).status_code == 413


def test_a_file_may_be_longer_than_a_field(app, world):
    limit_by(world, max_content_length=None)
    app.post("/payments", endpoint="pay")(idempotent(lambda: {"n": len(request.files)}))
    body = multipart(1, 200_000).replace(b'name="n"', b'name="n"; filename="f"')
    assert ask(world, MULTIPART, body).json == {"n": 1}


def test_a_form_of_too_many_parts_is_refused_as_cheaply_as_werkzeug_does(app, world):
    app.post("/plain", endpoint="plain")(lambda: dict(request.form))
    app.post("/payments", endpoint="pay")(idempotent(dict))
    body = multipart(40_000)

    def seconds(path):
        begun = time.process_time()
        answer = world.post(path, data=io.BytesIO(body), content_type=MULTIPART)
        assert answer.status_code == 413
        return time.process_time() - begun

    rounds = [(seconds("/payments"), seconds("/plain")) for _ in range(5)]
    ours, werkzeugs = map(min, zip(*rounds, strict=True))
    assert ours < 2 * werkzeugs
