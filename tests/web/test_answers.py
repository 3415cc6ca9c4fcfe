"""A replay is the first response again, byte for byte, whatever made it."""

import io
import os

import pytest
from flask import (
    Response,
    after_this_request,
    make_response,
    redirect,
    request,
    send_file,
    stream_with_context,
)

from flask_idempotency import idempotent


class Unbuffered(Response):
    implicit_sequence_conversion = False  # who reads a stream of it must say so


class Receipt(Response):
    default_mimetype = "application/vnd.receipt"
    default_status = 202


def streamed():
    yield "first "
    yield request.headers["X-User"]
    yield b"\x00\xff"


LINKS = [("Link", '</1>; rel="a, b"'), ("Link", "</2>; rel=next")]
VIEWS = {
    "not UTF-8": lambda: Response("Büro".encode("latin-1"), content_type="text/plain"),
    "JSON that a database would tidy up": lambda: Response(
        b'{"b": 1, "a": 1.10,\n "b": 2, "nul": "\\u0000"}', content_type="application/json"
    ),
    "large and binary": lambda: os.urandom(1024 * 1024),
    "empty with a type": lambda: Response(b"", 201, content_type="application/json"),
    "a status without a phrase": lambda: Response(status=299),
    "generator": lambda: stream_with_context(streamed()),
    "unbuffered": lambda: Unbuffered(iter([b"a", b"", b"b"])),
    "file in memory": lambda: send_file(
        io.BytesIO(b"%PDF\x00"), download_name="Rechnung ü.pdf", as_attachment=True
    ),
    "redirect": lambda: redirect("/payments/1?a=b", 303),
    "own class": lambda: Receipt("paid"),
    "no content type": lambda: Response(b"x", headers={}, content_type=""),
    "other headers": lambda: ("", [*LINKS, ("X-Latin", "Büro"), ("X-Empty", "")]),
}


@pytest.mark.parametrize(("kind", "atomic"), [(None, False), (Receipt, True), (Unbuffered, True)])
def test_a_replay_is_the_first_response_byte_for_byte(world, assert_replayed, kind, atomic):
    world.app.response_class = kind or world.app.response_class
    for number, view in enumerate(VIEWS.values()):
        protected = idempotent(name=f"answer-{number}", atomic=atomic)(view)
        world.app.add_url_rule(f"/{number}", f"{number}", protected, methods=["POST"])
    for number in range(len(VIEWS)):
        with world.post(f"/{number}") as first, world.post(f"/{number}") as replay:
            first.make_sequence()  # the test client's responses are of the class, too
            replay.make_sequence()
            assert_replayed(first, replay)
    assert first.headers.getlist("Link") == [value for _, value in LINKS]


NEVER_REPLAYED = {
    "Date": "Thu, 01 Jan 1970 00:00:00 GMT",
    "Server": "somebody",
    "Connection": "close, x-Of-This-Hop",
    "X-Of-This-Hop": "1",
    "Keep-Alive": "timeout=5",
    "Proxy-Authenticate": "Basic",
    "TE": "trailers",
    "Trailer": "X-Sum",
    "Transfer-Encoding": "chunked",
    "Upgrade": "h2c",
}


def test_what_is_true_of_one_message_only_is_never_stored(app, world):
    """Nor is the mark of a replay that a view has passed on from another API."""

    @app.post("/answer/<int:status>")
    @idempotent
    def answer(status):
        response = make_response({"id": 1}, status)
        response.set_cookie("session", "canary")
        response.set_cookie("other", "canary")
        response.headers.extend(NEVER_REPLAYED)
        response.headers["ETag"] = '"1"'
        response.headers["IDEMPOTENT-REPLAYED"] = "false"
        return response

    first, replay = (world.post("/answer/201") for _ in range(2))
    failed = world.post("/answer/503", key="key-2")
    assert failed.status_code == 503
    assert len(first.headers.getlist("Set-Cookie")) == 2
    assert "Idempotent-Replayed" not in f"{first.headers}{failed.headers}"
    assert replay.headers["Idempotent-Replayed"] == "true"
    assert not {"Set-Cookie", *NEVER_REPLAYED} & set(replay.headers.keys())
    assert replay.headers["Content-Length"] == str(len(replay.data))
    assert [name for name, _ in world.records()[0].headers] == ["Content-Type", "ETag"]


@pytest.mark.parametrize(
    ("view_says", "hook_says", "first", "replay"),
    [
        (None, None, None, "no-store"),
        ("public", None, "public", "public"),
        (None, "private", "private", "private"),
    ],
)
def test_after_request_functions_run_on_replays_which_are_not_to_be_cached_unless_somebody_says_more(
    app, world, view_says, hook_says, first, replay
):
    headers = {"cache-control": view_says} if view_says else {}
    app.post("/answer", endpoint="answer")(idempotent(lambda: ("", 200, headers)))

    @app.after_request
    def mark(response):
        if hook_says:
            response.headers.setdefault("Cache-Control", hook_says)
        replayed = response.headers.get("Idempotent-Replayed", "false")
        response.set_data(response.get_data() + f"<!-- {replayed} -->".encode())
        return response

    answers = [world.post("/answer") for _ in range(2)]
    found = [answer.headers.getlist("Cache-Control") for answer in answers]
    assert found == [[first] if first else [], [replay]]
    assert [answer.text for answer in answers] == ["<!-- false -->", "<!-- true -->"]


def test_a_stored_response_outlives_the_code_that_made_it(app, world):
    app.post("/answer", endpoint="answer")(idempotent(lambda: ({"version": 1}, "201 Fine")))
    assert world.post("/answer").status == "201 Fine"
    app.view_functions["answer"] = idempotent(lambda: ({"version": 2}, 200))
    replay = world.post("/answer")
    assert (replay.json, replay.status) == ({"version": 1}, "201 CREATED")  # the usual phrase
    assert world.post("/answer", key="new").json == {"version": 2}


# ``flask.after_this_request``: what the view registers belongs to the stored response.


@pytest.fixture
def shop(make_world):
    """An application in production; each function that was registered leaves its number."""
    world = make_world(PROPAGATE_EXCEPTIONS=False)
    world.ran = []

    def register(name, change=lambda response: response):
        @after_this_request
        def function(response):
            world.ran.append(name)
            response.headers.add("X-Ran", f"{name} {len(world.ran)}")
            return change(response)

        return {"id": 1}, 201

    world.register = register
    return world


def ran(response):
    return response.headers.getlist("X-Ran")


def pays(shop):
    shop.db.session.add(shop.Payment(amount=5))
    return shop.register("view", lambda response: shop.db.session.commit() or response)


def fail(_response):
    raise LookupError("a mistake in the function")


async def other(_response):
    return Response("other", 202)


CHANGED = {
    "it registers another": (
        lambda shop: shop.register("one", lambda response: (shop.register("two"), response)[1]),
        201,
        ["one 1", "two 2"],
    ),
    "it makes another response": (lambda _shop: (after_this_request(other), {})[1], 202, []),
    "it commits what the view has written": (pays, 201, ["view 1"]),
    "its error is handled": (
        lambda shop: (shop.register("view", fail), shop.register("after it"))[1],
        409,
        ["after it 2"],
    ),
}


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize(("view", "status", "names"), CHANGED.values(), ids=CHANGED)
def test_it_runs_once_and_its_effect_is_stored(shop, assert_replayed, view, status, names, atomic):
    shop.app.register_error_handler(LookupError, lambda _error: ("handled", 409))
    protected = idempotent(atomic=atomic)(lambda: view(shop))
    shop.app.add_url_rule("/payments", "pay", protected, methods=["POST"])
    first = shop.post()
    assert (first.status_code, ran(first)) == (status, names)
    assert_replayed(first, shop.post())


def test_what_is_registered_before_the_view_or_above_it_runs_on_every_response(shop):
    shop.app.before_request(lambda: shop.register("before") and None)
    protected = idempotent(lambda: shop.register("view"))

    @shop.app.post("/payments")
    def above():
        shop.register("above")
        response = protected()
        shop.register("later")
        return response

    first, again = shop.post(), shop.post()
    assert ran(first) == ["view 1", "before 2", "above 3", "later 4"]
    assert ran(again) == ["view 1", "before 5", "above 6", "later 7"]
