"""One call, one key, one effect: each client against a server that drops, delays and duplicates."""

from __future__ import annotations

import io
import re
from time import monotonic

import httpx
import pytest
import requests
from requests.exceptions import ChunkedEncodingError, ContentDecodingError
from werkzeug.serving import generate_adhoc_ssl_context

from flask_idempotency.core.errors import PROBLEMS, OperationFailed, Retryable
from tests.client.conftest import (
    LOST,
    break_off,
    drop_after,
    drop_before,
    hang,
    respond,
    stall,
    with_async_httpx,
    with_httpx,
    with_requests,
    written,
)

UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
BUSY = respond(409, "request-in-progress")
DOWN = respond(503)
EARLIER, LATER = "Fri, 01 Jan 2038 00:00:05 GMT", "Fri, 01 Jan 2038 00:00:30 GMT"
MOVED = respond(307, Location="/there")


@pytest.fixture(autouse=True)
def _time(request):
    """The clients' waits take no time where a test does not ask for the real one."""
    if "real_time" not in request.fixturenames:
        request.getfixturevalue("time")


def not_a_problem(body):
    return lambda handler: handler.respond(409, {}, body)


def after(value, status=503, **headers):
    return respond(status, "request-in-progress", Retry_After=value, **headers)


AGAIN = ["request-in-progress", "store-unavailable", "transaction-conflict", "try-again"]
LONGER = ["91", "9" * 5000, "Fri, 31 Dec 9999 23:59:59 GMT"]
BEHAVIOURS = {
    "the request is lost twice": ([drop_before] * 2, 201, [1, 2]),
    "the response is lost twice": ([drop_after] * 2, 201, [1, 2]),
    "the response breaks off twice": ([break_off] * 2, 201, [1, 2]),
    **{
        f"only the connection's end: {head[5:]}": ([written(head)], 201, [1])
        for head in (
            "HTTP/1.0 201 CREATED\r\n\r\n{}",
            "HTTP/1.1 201 CREATED\r\nConnection: close\r\n\r\n{}",
            "HTTP/1.1 201 CREATED\r\nTransfer-Encoding: identity\r\n\r\n{}",
        )
    },
    "a stored error": ([respond(500, Idempotent_Replayed="true")], 500, []),
    "a conflict of the shop's own": ([respond(409, "out-of-stock", Retry_After="1")], 409, []),
    **{
        f"not now: {status}": ([respond(status)], 201, [1]) for status in (408, 425, 429, 500, 502, 599)
    },
    **{
        f"no: {status}": ([respond(status)], status, [])
        for status in (200, 304, 400, 401, 403, 407, 422)
    },
    **{
        problem.type: (
            [respond(problem.status, problem.type)],
            *((201, [1]) if problem.type in AGAIN else (problem.status, [])),
        )
        for problem in (*PROBLEMS, OperationFailed, Retryable)
    },
    **{
        f"a body that is no problem: {body[:9]!r}": ([not_a_problem(body)], 409, [])
        for body in (b"", b"5", b"[1]", b'{"type": 5}', b"[" * 100_000, b"\xff")
    },
    **{
        f"legal: {head[5:]}": ([written(head)], int(head[9:12]), [])
        for head in (
            "HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nContent-Length: 0\r\n\r\n",
            "HTTP/1.1 204 NO CONTENT\r\n\r\n",
            "HTTP/1.1 205 RESET CONTENT\r\n\r\n",
            "HTTP/1.1 304 NOT MODIFIED\r\n\r\n",
        )
    },
    "down until the deadline": ([DOWN, BUSY, drop_before, *[DOWN] * 30], 503, [1, 2, 4, 8, *[10] * 7]),
    **{f"{each}, Retry-After": ([after("7", each)], 201, [7]) for each in (408, 425, 429, 500, 503)},
    "a date by the server's clock": ([after(LATER, Date=EARLIER)], 201, [25]),
    **{f"longer than the deadline: {each[:9]}": ([after(each)], 503, []) for each in LONGER},
}
"""What the server does first, the status that the caller gets, and the waits before each retry."""


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_what_a_caller_gets_and_when_one_key_is_sent(call, server, time, behaviour):
    script, status, waits = BEHAVIOURS[behaviour]
    server.script += script
    got = call("POST", server.url, json={"amount": 5})
    assert (got.status, time.waits) == (status, waits)
    assert server.keys == [got.key] * (len(waits) + 1)
    assert {request.body for request in server.seen} == {server.seen[0].body}
    assert len(server.done) <= 1
    assert status != 201 or server.done == [got.key]


class TestWaits:
    def test_with_trio_they_are_the_same(self, server, time):
        server.script += [DOWN, drop_after]
        assert with_async_httpx(backend="trio")("POST", server.url).is_replay
        assert time.waits == [1, 2]

    def test_they_are_random_from_nothing_to_the_longest(self, call, server, time):
        time.chance = 0.25
        server.script += [drop_before, DOWN]
        call("POST", server.url)
        assert time.waits == [0.25, 0.5]

    @pytest.mark.parametrize("name", ["Retry-After", "Date"])
    @pytest.mark.parametrize(
        "value",
        ["-5", "1.5", "1e3", "inf", "", "Fri, 31 Feb 2038 99:99:99 GMT", "Thu, 01 Jan 1970 00:00:00"],
    )
    def test_nonsense_in_a_header_harms_nobody(self, server, time, name, value):
        headers = {"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT", name: value}
        server.script += [respond(503, **headers)]
        assert with_requests()("POST", server.url).status == 201
        assert time.waits == [1]

    @pytest.mark.parametrize(
        ("deadline", "script", "status", "waits"),
        [
            (60, [after("40"), after("30")], 503, [40]),
            # Retry-After is no use here: the attempt may end at any moment before.
            (20, [after("60", 409)] * 99, 409, [1, 2, 4, 6.5, 3.25, 1.625, 0.8125]),
        ],
        ids=["of all waits together", "of a running attempt"],
    )
    def test_each_call_has_a_deadline_of_its_own(
        self, make_caller, server, time, deadline, script, status, waits
    ):
        call = make_caller(deadline=deadline)
        for _ in range(2):
            server.script.clear()
            server.script += script
            assert call("POST", server.url).status == status
        assert time.waits == waits * 2

    @pytest.mark.usefixtures("real_time")
    @pytest.mark.parametrize("timeout", [9, None])
    def test_no_attempt_waits_longer_than_the_call_has_left(self, make_caller, server, timeout):
        server.script += [hang]
        begun = monotonic()
        with pytest.raises(LOST) as lost:
            make_caller(timeout=timeout, deadline=0.2)("POST", server.url)
        assert monotonic() - begun < 5
        assert server.keys == [lost.value.request.headers["Idempotency-Key"]]


class TestKeys:
    @pytest.mark.parametrize("method", ["POST", "PATCH"])
    def test_a_call_gets_a_key_and_the_next_call_another(self, call, server, method):
        first, second = call(method, server.url), call(method, server.url)
        assert UUID.fullmatch(first.key)
        assert server.keys == [first.key, second.key]
        assert first.key != second.key

    @pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
    def test_other_methods_get_none_and_are_sent_once(self, call, server, method):
        server.script += [DOWN]
        assert call(method, server.url).status == 503
        assert server.keys == [None]

    @pytest.mark.parametrize("method", ["POST", "PUT", "HEAD"])
    def test_the_callers_own_key_is_kept_and_makes_the_call_repeatable(self, call, server, method):
        server.script += [drop_after]
        assert call(method, server.url, headers={"idempotency-key": '"order 7"'}).status == 201
        assert (server.keys, server.done) == (['"order 7"'] * 2, ['"order 7"'])

    @pytest.mark.parametrize("trouble", [drop_after, break_off])
    def test_the_key_of_an_error_can_be_passed_again(self, make_caller, server, trouble):
        server.script += [trouble] * 99
        with pytest.raises((*LOST, ChunkedEncodingError)) as lost:
            make_caller()("POST", server.url)
        key = lost.value.request.headers["Idempotency-Key"]
        assert set(server.keys) == {key}
        server.script.clear()
        assert make_caller()("POST", server.url, headers={"Idempotency-Key": key}).is_replay
        assert server.done == [key]

    @pytest.mark.parametrize("method", ["POST", "PUT"])
    @pytest.mark.parametrize("key", ["", b"", " "])
    def test_an_empty_key_is_refused_before_it_is_sent(self, call, server, method, key):
        with pytest.raises(ValueError, match="^The header Idempotency-Key is empty"):
            call(method, server.url, headers={"Idempotency-Key": key})
        assert server.seen == []


class TestTroubleOnTheWay:
    @pytest.mark.parametrize("late", [hang, stall])
    def test_a_server_that_does_not_respond_in_time_is_asked_again(self, make_caller, server, late):
        server.script += [late]
        got = make_caller(timeout=0.1)("POST", server.url)
        assert got.is_replay
        assert server.done == [got.key]

    def test_a_server_that_does_not_listen_yet_is_waited_for(self, call, stopped, time):
        time.at_wait = lambda: stopped.start() if len(time.waits) == 2 else None
        assert call("POST", stopped.url).status == 201
        assert len(time.waits) == 2

    @pytest.mark.parametrize(
        "whole",
        [
            "HTTP/1.1 201 X\r\nContent-Length: 2\r\n\r\n{}",
            "HTTP/1.0 201 X\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}",
            # Whole with the 0 for requests: http.client does not ask for what follows.
            "HTTP/1.1 201 X\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0",
        ],
        ids=["length", "HTTP/1.0", "chunked"],
    )
    def test_a_response_that_breaks_off_anywhere_is_asked_for_again(self, server, call, whole):
        ends = range(len(whole))
        for end in ends:
            server.script.append(written(whole[:end]))
            assert call("POST", server.url).is_replay, whole[:end]
        assert len(server.seen) == 2 * len(ends)

    def test_a_body_that_cannot_be_decoded_is_an_error_with_the_key(self, server, call):
        server.script += [respond(502, Content_Encoding="gzip")]
        with pytest.raises((ContentDecodingError, httpx.DecodingError)) as lost:
            call("POST", server.url)
        assert server.keys == [lost.value.request.headers["Idempotency-Key"]]

    def test_a_certificate_that_is_not_trusted_is_final(self, stopped, time):
        stopped.start(generate_adhoc_ssl_context())  # signed by itself
        with pytest.raises(requests.exceptions.SSLError, match="CERTIFICATE"):
            with_requests()("POST", stopped.url.replace("http:", "https:"))
        assert time.waits == []

    @pytest.mark.parametrize("url", ["ftp://api.example.com", "//api.example.com"])
    def test_a_wrong_address_is_final(self, call, time, url):
        with pytest.raises((requests.RequestException, httpx.TransportError)):
            call("POST", url)
        assert time.waits == []


class Once:
    """Each of its iterators is the same one, as with ``tqdm(rows)``."""

    def __init__(self):
        self.parts = iter([b"abc", b"def"])

    def __iter__(self):
        return self.parts


class Readable(Once):
    read = lambda self, _size=-1: next(self.parts, b"")  # noqa: E731


class TestBodies:
    def test_a_form_with_a_file_is_the_same_each_time(self, call, server):
        server.script += [drop_after]
        call("POST", server.url, files={"picture": ("a.png", io.BytesIO(b"png"))})
        assert server.seen[0] == server.seen[1]
        assert b"png" in server.seen[0].body

    @pytest.mark.parametrize("body", [Once, Readable])
    def test_what_can_be_read_once_is_refused_by_requests_and_kept_by_httpx(self, server, body):
        server.script += [drop_before, DOWN]
        with pytest.raises(requests.exceptions.UnrewindableBodyError, match="bytes, str") as refused:
            with_requests()("POST", server.url, content=body())
        assert refused.value.request.headers["Idempotency-Key"]
        assert server.seen == []
        with_httpx()("POST", server.url, content=body())
        assert [request.body for request in server.seen] == [b"abcdef"] * 3

    def test_an_asynchronous_generator_is_sent_whole_each_time(self, server):
        async def parts():
            yield b"abc"
            yield b"def"

        server.script += [drop_before, DOWN]
        with_async_httpx()("POST", server.url, content=parts())
        assert [request.body for request in server.seen] == [b"abcdef"] * 3

    def test_a_redirect_has_the_key_and_body_of_its_call(self, call, server):
        server.script += [drop_before, MOVED, DOWN]
        call("POST", server.url, content=b"abc")
        assert [seen.path for seen in server.seen] == ["/", "/", "/there", "/there"]
        assert [seen.body for seen in server.seen] == [b"abc"] * 4
        assert len(set(server.keys)) == 1

    @pytest.mark.parametrize("make_caller", [with_requests, with_httpx], indirect=True)
    def test_a_call_that_has_to_sign_in_first_is_one_call(self, make_caller, server):
        challenge = respond(401, WWW_Authenticate='Digest realm="r", nonce="n", qop="auth"')
        server.script += [challenge, DOWN, drop_after]
        digest = requests.auth.HTTPDigestAuth if make_caller is with_requests else httpx.DigestAuth
        assert make_caller()("POST", server.url, content=b"abc", auth=digest("alice", "pw")).is_replay
        assert server.keys == server.done * 4
        assert [seen.body for seen in server.seen] == [b"abc"] * 4


def test_each_retry_is_one_line_of_the_log_without_secrets(call, server, caplog):
    caplog.set_level("DEBUG", "flask_idempotency")
    server.script += [DOWN, BUSY, drop_before]
    url = server.url.replace("http://", "http://canary-user:canary-password@")
    headers = {"Idempotency-Key": "canary-key", "X-Token": "canary-token"}
    call("POST", f"{url}/pay?q=canary#canary", content=b"canary-body", headers=headers)
    lines = [line for line in caplog.records if line.name == "flask_idempotency.client"]
    assert [line.getMessage() for line in lines[:2]] == [
        f"POST {server.url}/pay: attempt 1 failed with 503; the next one begins in 1.00 s",
        f"POST {server.url}/pay: attempt 2 failed with 409; the next one begins in 2.00 s",
    ]
    assert len(lines) == 3
    assert {line.levelname for line in lines} == {"INFO"}
    assert "canary" not in str([vars(line) for line in lines])
