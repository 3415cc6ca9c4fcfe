"""A response that broke off is no success, and one that never ends has a deadline."""

from __future__ import annotations

import time as real_time

import httpx
import pytest
import requests

from flask_idempotency.client import attempts_of, was_replayed
from tests.client.conftest import LOST, respond, trickle, with_async_httpx, written

WHOLE = (
    "HTTP/1.1 201 CREATED\r\n"
    "Server: gunicorn\r\n"
    "Date: Fri, 01 Jan 2038 00:00:30 GMT\r\n"
    "{}"
    "Content-Type: application/json\r\n"
    "{}"
    "\r\n"
    "{}"
)


class TestResponsesThatBreakOff:
    @pytest.mark.parametrize(
        "whole",
        [
            WHOLE.format("", "Content-Length: 2\r\n", "{}"),
            WHOLE.format("Connection: close\r\n", "Content-Length: 2\r\n", "{}"),
            # Whole with the 0 for requests: http.client does not ask for what follows.
            WHOLE.format("", "Transfer-Encoding: chunked\r\n", "2\r\n{}\r\n0\r\n\r\n")[:-4],
        ],
    )
    def test_one_is_asked_for_again_wherever_it_breaks_off(self, server, call, whole):
        ends = range(len(whole))
        for end in ends:
            server.script.append(written(whole[:end]))
            assert was_replayed(call("POST", server.url).response), whole[:end]
        assert len(server.seen) == 2 * len(ends)

    @pytest.mark.parametrize(
        "rest",
        ["201 CREATED\r\n\r\n{}", "409 CONFLICT\r\n\r\n{}", "201 CREATED\r\nConnection: close\r\n\r\n"],
    )
    def test_one_without_an_end_is_an_error_at_last(self, server, make_caller, rest):
        server.script += [written(f"HTTP/1.1 {rest}")] * 2
        with pytest.raises(LOST, match="broke off") as lost:
            make_caller(retries=1)("POST", server.url)
        assert server.keys == [lost.value.request.headers["Idempotency-Key"]] * 2

    @pytest.mark.parametrize(
        "legal",
        [
            "HTTP/1.0 200 OK\r\n\r\n{}",
            "HTTP/1.0 200 OK\r\n\r\n",
            "HTTP/1.1 200 OK\r\nConnection: Keep-Alive, Close\r\n\r\n{}",
            "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
            "HTTP/1.1 204 NO CONTENT\r\n\r\n",
            "HTTP/1.1 205 RESET CONTENT\r\n\r\n",
            "HTTP/1.1 304 NOT MODIFIED\r\n\r\n",
        ],
    )
    def test_what_http_allows_is_a_response(self, server, call, legal):
        server.script += [written(legal)]
        assert call("POST", server.url).body.decode() == legal.partition("\r\n\r\n")[2]
        assert len(server.seen) == 1

    @pytest.mark.parametrize("length", ["", "Content-Length: 5\r\n"])
    def test_a_head_request_expects_no_body(self, server, call, length):
        server.script += [written(f"HTTP/1.1 200 OK\r\n{length}\r\n")]
        assert call("HEAD", server.url, headers={"Idempotency-Key": "own"}).status == 200
        assert len(server.seen) == 1


class TestLengthsThatContradictEachOther:
    @pytest.mark.parametrize(
        "lengths",
        ["Content-Length: 2\r\nContent-Length: 5", "Content-Length: 2, 5", "Content-Length: 2x"],
    )
    def test_such_a_response_is_asked_for_again(self, server, call, lengths):
        server.script.append(written(f"HTTP/1.1 201 CREATED\r\n{lengths}\r\n\r\n{{}}"))
        assert was_replayed(call("POST", server.url).response)
        assert len(set(server.keys)) == 1 < len(server.seen)

    def test_it_is_an_error_at_last(self, server, make_caller):
        text = "HTTP/1.1 201 CREATED\r\nContent-Length: 2, 5\r\n\r\n{}"
        server.script += [written(text)] * 2
        with pytest.raises((*LOST, requests.exceptions.InvalidHeader)) as lost:
            make_caller(retries=1)("POST", server.url)
        assert attempts_of(lost.value) == len(server.seen) == 2
        del lost  # a circle; urllib3 leaves the socket to its frames

    @pytest.mark.parametrize(
        "lengths", ["Content-Length: 2\r\nContent-Length: 2", "Content-Length: 2,2"]
    )
    def test_the_same_length_twice_is_one(self, server, call, lengths):
        server.script.append(written(f"HTTP/1.1 201 CREATED\r\n{lengths}\r\n\r\n{{}}"))
        assert call("POST", server.url).body == b"{}"
        assert len(server.seen) == 1


class TestBodiesThatCannotBeDecoded:
    """A proxy's page, under the ``Content-Encoding`` of the server that it stands in for."""

    @pytest.mark.parametrize("encoding", ["gzip", "deflate"])
    def test_a_server_error_is_asked_for_again(self, server, call, encoding):
        server.script += [respond(502, Content_Encoding=encoding)] * 2
        assert call("POST", server.url).status == 201
        assert len(set(server.keys)) == 1
        assert len(server.seen) == 3

    @pytest.mark.parametrize(
        ("status", "attempts"), [(201, 1), (404, 1), (409, 1), (422, 1), (429, 3), (502, 3)]
    )
    def test_what_is_final_or_has_no_attempt_left_is_an_error(
        self, server, make_caller, status, attempts
    ):
        server.script += [respond(status, Content_Encoding="gzip")] * attempts
        with pytest.raises((requests.exceptions.ContentDecodingError, httpx.DecodingError)) as lost:
            make_caller(retries=2)("POST", server.url)
        assert attempts_of(lost.value) == len(server.seen) == attempts

    def test_a_stored_one_is_not_asked_for_again(self, server, call):
        replayed = respond(502, Content_Encoding="gzip", Idempotent_Replayed="true")
        server.script.append(replayed)
        with pytest.raises((requests.exceptions.ContentDecodingError, httpx.DecodingError)):
            call("POST", server.url)
        assert len(server.seen) == 1


class TestDeadline:
    @pytest.fixture
    def call(self, make_caller):
        return make_caller(deadline=0.3, timeout=9, clock=real_time.monotonic)

    @pytest.mark.parametrize("framing", ["Content-Length: 10000", "Transfer-Encoding: chunked"])
    @pytest.mark.parametrize("before", [[], [respond(307, Location="/there")]], ids=["", "redirected"])
    def test_it_ends_a_response_that_comes_a_few_bytes_at_a_time(self, server, call, framing, before):
        server.script += [*before, trickle("200 OK", framing)]
        begun = real_time.monotonic()
        with pytest.raises((requests.ReadTimeout, httpx.ReadTimeout)) as lost:
            call("POST", server.url)
        assert 0.3 < real_time.monotonic() - begun < 2
        assert str(lost.value.request.url).endswith("/there" if before else "")

    def test_it_does_so_where_nothing_can_be_decoded_yet(self, server, call):
        file_name_follows = b"\x1f\x8b\x08\x08" + bytes(6)
        framing = "Content-Encoding: gzip\r\nContent-Length: 10000"
        server.script += [trickle("200 OK", framing, file_name_follows)]
        with pytest.raises((requests.ReadTimeout, httpx.ReadTimeout)):
            call("POST", server.url)

    @pytest.mark.parametrize("make_caller", [with_async_httpx], indirect=True)
    def test_without_threads_it_also_ends_headers_that_do_so(self, server, call):
        def act(handler):
            for _ in range(100):
                handler.wfile.write(b".")
                handler.world.let_go.wait(0.02)
            handler.close_connection = True

        server.script += [act]
        with pytest.raises(httpx.ReadTimeout):
            call("POST", server.url)
