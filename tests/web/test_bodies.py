"""A request's body: incomplete, too long, chunked, read by somebody before."""

import gzip
import io
from contextlib import suppress

import pytest
from flask import Request, g, request, request_started
from gunicorn.http.errors import NoMoreData
from werkzeug.exceptions import ClientDisconnected

from flask_idempotency import ConfigurationError, idempotent

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
        if count := super().readinto(buffer):
            return count
        raise self.error


GONE = OSError("no more data"), EOFError(), NoMoreData(), ClientDisconnected()
INCOMPLETE = {
    "nothing": {"body": b"", "length": 5},
    "of a server that counts nothing": {"body": b"{", "length": 5, "terminated": False},
    **{f"less of {kind}": {"body": BODIES[kind], "kind": kind, "length": 100} for kind in BODIES},
    **{type(error).__name__: {"body": Fails(error), "length": 5} for error in GONE},
    "chunked": {"body": Fails(GONE[0], BODIES[JSON]), "chunked": True},
}


def test_an_incomplete_body_runs_nothing(world, add, assert_problem, heard):
    seen, observed = add(), add(path="/observed", enforce=False)
    world.app.register_error_handler(LookupError, lambda _error: ("too slow", 408))
    for sent in INCOMPLETE.values():
        assert_problem(send(world, **sent), 400, "body-incomplete")
    assert (seen, world.records()) == ([], [])
    assert send(world, BODIES[JSON]).status_code == 200
    own = Fails(LookupError())  # an error of the application's own input is the application's
    assert send(world, own, length=5, key="own").text == "too slow"
    heard.clear()
    assert send(world, BODIES[JSON], length=100, path="/observed").status_code == 200
    assert (observed, [event.problem for _, event in heard]) == ([BODIES[JSON]], ["body-incomplete"])


def test_a_chunked_body_is_the_same_request_as_a_counted_one(world, add, assert_replayed):
    seen, body = add(), BODIES[JSON]
    assert_replayed(send(world, body, chunked=True), send(world, body))
    assert send(world, body + b" ", chunked=True).status_code == 422
    assert_replayed(send(world, b"", key="empty"), send(world, b"", key="empty"))
    assert send(world, body, key="empty").status_code == 422
    assert send(world, body, chunked=True, terminated=False, key="endless").status_code == 411
    assert len(seen) == len(world.records()) == 2


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
    return {JSON: b'"%s"', FORM: b"n=%s"}.get(kind, b"%s") % (b"x" * (size - 2 * (kind in PARSED)))


PARSED = JSON, FORM
SETTING, TEXT = "IDEMPOTENCY_MAX_REQUEST_BYTES", "text/plain"
LIMITS = {
    "by default": ({}, {}, TEXT, 16 * MIB),
    "the option": ({SETTING: 1000}, {"max_request_bytes": 5000}, TEXT, 5000),
    "an option of nothing": ({}, {"max_request_bytes": 0}, TEXT, 0),
    "lower than the option": ({"MAX_CONTENT_LENGTH": 100}, {"max_request_bytes": 5000}, TEXT, 100),
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


def test_werkzeugs_limits_for_forms_hold_and_ours_beside_them(world, add):
    """The fields of a form may have a mebibyte together, its files more."""
    add()
    limit_by(world, None)
    file = multipart(1, 2 * MIB).replace(b'name="amount"', b'name="amount"; filename="f"')
    forms = file, multipart(5, 200_000), multipart(6), multipart(5, 220_000)
    found = [send(world, each, MULTIPART, key=f"{n}").status_code for n, each in enumerate(forms)]
    assert found == [200, 200, 413, 413]


REFUSED = [
    (401, {"user": "mallory"}),  # by a before_request function
    (401, {"user": ""}),
    (401, {"user": "", "key": None, "path": "/natural"}),
    (401, {"user": "", "key": None, "kind": FORM}),
    (400, {"key": None}),
    (400, {"key": "a,b"}),
]


@CHUNKED
def test_nothing_is_read_of_a_request_that_is_refused_anyway(world, add, chunked):
    seen = add(fingerprint="json"), add(path="/natural", key=lambda: request.form["id"])
    world.app.before_request(lambda: ("who?", 401) if g.account_id == "mallory" else None)
    for status, sent in REFUSED:
        body = io.BytesIO(b"{")
        assert send(world, body, chunked=chunked, **sent).status_code == status, sent
        assert (body.tell(), seen) == (0, ([], [])), sent


# What they read can still be compared.
KEPT = {
    "data": lambda: request.get_data(parse_form_data=False),
    "json": lambda: request.get_json(silent=True),
    "form": lambda: request.form.get("amount"),
}
USED_UP = {
    "data, not cached": lambda: request.get_data(cache=False),
    "stream": lambda: request.stream.read(-1),
    "a few bytes": lambda: request.stream.read(3),
}
# It leaves less of an input than its length claims, which is the same as an incomplete body.
RAW = {"environ": lambda: request.environ["wsgi.input"].read(-1)}

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
        elif name == "data" and terminated:
            assert_problem(send(world, body, length=len(body) + 10, **sent), 400, "body-incomplete")
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


def inflated():
    request.stream = gzip.GzipFile(fileobj=request.stream)


def inflated_input():
    request.environ["wsgi.input"] = gzip.GzipFile(fileobj=request.environ["wsgi.input"])


def kept():
    request._cached_data = gzip.decompress(request.get_data())


@pytest.mark.parametrize("fingerprint", ["request", "json"])
@pytest.mark.parametrize("unpack", [inflated, inflated_input, kept])
def test_a_packed_body_is_compared_as_the_view_reads_it(
    world, add, assert_replayed, assert_problem, unpack, fingerprint
):
    """Unless the view itself unpacks it."""
    before_request(world, lambda: request.path == "/payments" and unpack())
    add(fingerprint=fingerprint)
    world.app.post("/own")(idempotent(lambda: (inflated(), request.get_json())[1]))

    def pack(body, mtime, kind, key="key-1", **kwargs):
        packed, headers = gzip.compress(body, mtime=mtime), {"Content-Encoding": "gzip"}
        return send(world, packed, kind, key=kind[:19] + key, headers=headers, **kwargs)

    longer = b"field=" + b"x" * 1000 + b"&amount=5"  # than it is packed
    for kind, body in {**BODIES, FORM: longer, MULTIPART: multipart(1, 1000)}.items():
        first = pack(body, 1, kind)
        assert "5" in first.text
        assert_replayed(first, pack(body, 2, kind))
        assert_problem(pack(body.replace(b"5", b"6"), 1, kind), 422, "key-reused")
    assert pack(b"x" * (17 << 20), 1, JSON, "key-2").status_code == 413
    assert len(world.records()) == 3
    assert pack(BODIES[JSON], 1, JSON, path="/own").json == {"amount": 5}
