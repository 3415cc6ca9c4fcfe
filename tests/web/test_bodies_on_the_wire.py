"""Bodies that break off, are too long or come in chunks: told apart before anything is looked up."""

from __future__ import annotations

import io

import pytest
from flask import Request, request

from flask_idempotency import ConfigurationError, idempotent

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


def test_a_chunked_body_that_breaks_off_below_a_limit_is_incomplete(make_world, echo, assert_problem):
    world = make_world(MAX_CONTENT_LENGTH=1000)
    seen = echo(world)
    assert_problem(post(world, BreaksOff(BODY[:10]), chunked=True), 400, "body-incomplete")
    assert seen == []


def test_a_chunked_body_is_the_same_request_as_a_counted_one(world, echo, assert_replayed):
    seen = echo(world)
    first = post(world, BODY, chunked=True)
    assert first.data == BODY
    assert_replayed(first, post(world, BODY))
    assert seen == [BODY]
    assert post(world, BODY + b" ", chunked=True).status_code == 422


def test_a_chunked_body_over_the_limit_is_too_large(make_world, echo):
    world = make_world(MAX_CONTENT_LENGTH=len(BODY))
    seen = echo(world)
    for excess in 1, 100_000:
        assert post(world, BODY + b" " * excess, chunked=True).status_code == 413
    assert seen == []
    assert world.records() == []
    assert post(world, BODY, chunked=True).data == BODY


def test_a_counted_body_over_the_limit_is_too_large(make_world, echo):
    world = make_world(MAX_CONTENT_LENGTH=len(BODY))
    seen = echo(world)
    assert post(world, BODY + b" ").status_code == 413
    assert seen == []
    assert world.records() == []


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


def test_a_body_that_was_read_as_a_stream_before_is_a_mistake_that_is_named(world):
    """The outer decorator hides the inner one, so nothing could read the body in time."""
    world.app.testing = True

    def reads_first(view):
        def inner():
            request.stream.read()
            return view()

        return inner

    world.app.add_url_rule("/payments", "pay", reads_first(idempotent(dict)), methods=["POST"])
    with pytest.raises(ConfigurationError, match=r"stream or form before the idempotent view"):
        post(world, BODY)
    assert world.records() == []


def test_without_a_key_the_body_is_the_views_business(world, echo):
    seen = echo(world, required=False)
    assert post(world, BODY[:10], chunked=True, key=None).status_code == 201
    assert seen == [BODY[:10]]


READERS = {
    "stream": lambda asked: asked.stream.read(),
    "in pieces": lambda asked: b"".join(iter(lambda: asked.stream.read(7), b"")),
    "stream, then data": lambda asked: asked.stream.read() and asked.get_data(),
    "environ": lambda asked: asked.environ["wsgi.input"].read(),
    "another request": lambda asked: Request(asked.environ).get_data(),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("chunked", [False, True])
def test_a_view_may_read_the_body_as_a_stream(world, read, chunked):
    seen = []

    @world.app.post("/payments")
    @idempotent
    def view():
        seen.append(read(request))
        return {}, 201

    length = None if chunked else len(BODY)
    for _ in range(2):
        assert post(world, BODY, chunked=chunked, length=length).status_code == 201
    assert seen == [BODY]
