"""A replay is the first answer again, byte for byte, whatever made it."""

import io
import json
import os

import pytest
from flask import Response, jsonify, redirect, request, send_file, stream_with_context

from flask_idempotency import idempotent


@pytest.fixture
def answers(assert_replayed):
    """Adds a view with the given body, and holds its replay against the first answer."""

    def check(world, view):
        runs = []

        @world.app.post("/answer")
        @idempotent
        def answer():
            runs.append(1)
            return view()

        with world.post("/answer") as first, world.post("/answer") as replay:
            assert_replayed(first, replay)
        assert runs == [1]
        return first

    return check


def streamed():
    yield "first "
    yield request.headers["X-User"]
    yield b"\x00\xff"


class Unbuffered(Response):
    """Who reads a stream of it must say so."""

    implicit_sequence_conversion = False


@pytest.mark.parametrize("is_default", [True, False])
@pytest.mark.parametrize("view", [lambda: "text", streamed, lambda: send_file(__file__)])
@pytest.mark.parametrize("atomic", [True, False])
def test_a_class_that_reads_no_stream_by_itself(world, assert_replayed, is_default, view, atomic):
    def answer():
        response = world.app.make_response(view())
        return response if is_default else Unbuffered.force_type(response)

    if is_default:
        world.app.response_class = Unbuffered
    world.app.add_url_rule("/payments", "pay", idempotent(atomic=atomic)(answer), methods=["POST"])
    with world.post() as first, world.post() as replay:
        first.make_sequence()  # the test client's responses are of that class, too
        replay.make_sequence()
        assert_replayed(first, replay)


class Receipt(Response):
    default_mimetype = "application/vnd.receipt"
    default_status = 202


VIEWS = {
    "binary": lambda: bytes(range(256)),
    "not UTF-8": lambda: Response("Büro".encode("latin-1"), content_type="text/plain"),
    "JSON that a database would tidy up": lambda: Response(
        b'{"b": 1, "a": 1.10,\n "b": 2, "nul": "\\u0000"}', content_type="application/json"
    ),
    "large": lambda: os.urandom(1024 * 1024),
    "empty": lambda: ("", 204),
    "empty with a type": lambda: Response(b"", 201, content_type="application/json"),
    "status only": lambda: ({}, 418),
    "a status without a phrase": lambda: Response(status=299),
    "dict": lambda: {"id": 1},
    "list": lambda: [1, 2],
    "generator": lambda: stream_with_context(streamed()),
    "generator without context": lambda: Response(iter([b"a", b"", b"b"]), 201),
    "file": lambda: send_file(__file__),
    "file in memory": lambda: send_file(
        io.BytesIO(b"%PDF\x00"), download_name="Rechnung ü.pdf", as_attachment=True
    ),
    "redirect": lambda: redirect("/payments/1?a=b", 303),
    "own class": lambda: Receipt("paid"),
    "no content type": lambda: Response(b"x", headers={}, content_type=""),
    "compressed by the view": lambda: Response(b"\x1f\x8b", headers={"Content-Encoding": "gzip"}),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_replay_is_the_first_response_byte_for_byte(world, answers, view):
    answers(world, view)


def test_an_application_may_have_its_own_response_class(app, world, answers):
    app.response_class = Receipt
    first = answers(world, lambda: "paid")
    assert (first.status_code, first.mimetype) == (202, "application/vnd.receipt")


def test_several_headers_of_one_name_stay_several(world, answers):
    def view():
        response = jsonify(ok=True)
        response.headers.add("Link", '</1>; rel="a, b"')
        response.headers.add("Link", "</2>; rel=next")
        response.headers.add("WWW-Authenticate", 'Basic realm="a"')
        response.headers.add("WWW-Authenticate", 'Digest realm="b", nonce="c"')
        response.headers["X-Latin"] = "Büro"
        response.headers["X-Empty"] = ""
        return response

    first = answers(world, view)
    assert len(first.headers.getlist("Link")) == len(first.headers.getlist("WWW-Authenticate")) == 2


NEVER_REPLAYED = {
    "Date": "Thu, 01 Jan 1970 00:00:00 GMT",
    "Server": "somebody",
    "Connection": "close",
    "Keep-Alive": "timeout=5",
    "Proxy-Authenticate": "Basic",
    "TE": "trailers",
    "Trailer": "X-Sum",
    "Transfer-Encoding": "chunked",
    "Upgrade": "h2c",
}


def test_what_is_true_of_one_message_only_is_never_stored(app, world):
    @app.post("/answer")
    @idempotent
    def answer():
        response = jsonify(id=1)
        response.set_cookie("session", "canary")
        response.set_cookie("other", "canary")
        response.headers.extend(NEVER_REPLAYED)
        response.headers["ETag"] = '"1"'
        return response

    first, replay = world.post("/answer"), world.post("/answer")
    assert len(first.headers.getlist("Set-Cookie")) == 2
    assert "Set-Cookie" not in replay.headers
    assert not NEVER_REPLAYED.keys() & set(replay.headers.keys())
    assert replay.headers["ETag"] == '"1"'
    assert replay.headers["Content-Length"] == str(len(replay.data))
    assert [name for name, _ in world.records()[0].headers] == ["Content-Type", "ETag"]


def test_only_a_replay_says_that_it_is_one(world):
    """Not an answer that a view has passed on from another API, which may use the same header."""
    name = "Idempotent-Replayed"

    @world.app.post("/answer/<int:status>")
    @idempotent
    def answer(status):
        return "", status, [(name.upper(), "true"), (name, "false"), ("X-Other", "1")]

    for status in 201, 503:
        assert name not in world.post(f"/answer/{status}").headers
    replay = world.post("/answer/201")
    assert replay.headers.getlist(name) == ["true"]
    assert replay.headers["X-Other"] == "1"
    assert name.title() not in str(world.records()[0].headers).title()


def test_a_replay_is_not_to_be_cached_unless_the_first_response_says_more(app, world):
    """Whether a cache may keep the first answer is for its view to say; a replay is for one client."""

    @app.post("/answer/<path:says>")
    @idempotent
    def answer(says):
        return "", 200, {} if says == "nothing" else {"cache-control": says}

    @app.after_request
    def say_something(response):
        if request.args:
            response.headers.setdefault("Cache-Control", "private")
        return response

    for says in "nothing", "public, max-age=60":
        first, replay = (world.post(f"/answer/{says}", key=says[:1]) for _ in range(2))
        told = None if says == "nothing" else says
        assert first.headers.get("Cache-Control") == told
        assert replay.headers.getlist("Cache-Control") == [told or "no-store"]
    first, replay = (world.post("/answer/nothing?after", key="after") for _ in range(2))
    assert first.headers["Cache-Control"] == replay.headers["Cache-Control"] == "private"


@pytest.mark.parametrize(
    ("status", "again"), [("418 I am a pot", "418 I'M A TEAPOT"), ("299 Fine", "299 UNKNOWN")]
)
def test_a_replay_has_the_usual_phrase_of_its_status(app, world, status, again):
    app.add_url_rule("/answer", "answer", idempotent(lambda: ({}, status)), methods=["POST"])
    assert [world.post("/answer").status for _ in range(2)] == [status, again]


def test_after_request_functions_run_on_the_first_response_and_on_replays(app, world, add_view):
    numbers = iter(range(10))

    @app.after_request
    def mark(response):
        response.headers["X-Number"] = str(next(numbers))
        response.headers["X-Replayed"] = response.headers.get("Idempotent-Replayed", "false")
        response.set_data(response.get_data() + b"<!-- seen -->")
        return response

    add_view(world)
    seen = [world.post() for _ in range(3)]
    assert [answer.headers["X-Number"] for answer in seen] == ["0", "1", "2"]
    assert [answer.headers["X-Replayed"] for answer in seen] == ["false", "true", "true"]
    assert {answer.data.count(b"<!-- seen -->") for answer in seen} == {1}
    assert b"seen" not in bytes(world.records()[0].body)


def test_a_stored_response_outlives_the_code_that_made_it(app, world, assert_replayed):
    """Promise 3: every later answer is the stored one, whatever the code does by then."""

    @app.post("/answer")
    @idempotent
    def answer():
        return Response(json.dumps({"version": 1}), 201, {"X-Version": "1"})

    first = world.post("/answer")
    app.view_functions["answer"] = idempotent(lambda: ({"version": 2}, 200))
    assert_replayed(first, world.post("/answer"))
    assert world.post("/answer", key="new").json == {"version": 2}
