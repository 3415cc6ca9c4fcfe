"""One call, one key, one effect: each client against a server that drops, delays and duplicates."""

from __future__ import annotations

import gzip
import io
import json
import re
import ssl
import time as real_time

import httpx
import pytest
import requests
from requests.exceptions import ChunkedEncodingError

from flask_idempotency.client import problem_of, was_replayed
from tests.certificates import self_signed
from tests.client.conftest import (
    LOST,
    break_off,
    drop_after,
    drop_before,
    duplicate,
    hang,
    respond,
    stall,
    with_async_httpx,
    with_httpx,
    with_requests,
    work,
)

UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[47][0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")


class TestKeys:
    @pytest.mark.parametrize("method", ["POST", "PATCH"])
    def test_a_call_gets_a_key_and_the_next_call_another(self, call, server, method):
        first, second = call(method, server.url), call(method, server.url)
        assert UUID.fullmatch(first.key)
        assert server.keys == [first.key, second.key]
        assert first.key != second.key

    @pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
    def test_other_methods_get_none_and_are_sent_once(self, call, server, method):
        server.script += [respond(503)]
        assert call(method, server.url).status == 503
        assert server.keys == [None]

    @pytest.mark.parametrize("method", ["POST", "PATCH", "PUT", "DELETE"])
    def test_the_callers_own_key_is_kept_and_makes_the_call_repeatable(self, call, server, method):
        server.script += [drop_after]
        got = call(method, server.url, headers={"idempotency-key": '"order 7"'})
        assert got.status == 201
        assert server.keys == ['"order 7"'] * 2
        assert server.done == ['"order 7"']

    def test_a_key_stored_over_a_restart_finds_the_response(self, make_caller, server):
        before = make_caller(retries=0)
        server.script += [drop_after]
        with pytest.raises(LOST) as lost:
            before("POST", server.url, headers={"Idempotency-Key": "kept"})
        assert lost.value.request.headers["Idempotency-Key"] == "kept"
        got = make_caller()("POST", server.url, headers={"Idempotency-Key": "kept"})
        assert was_replayed(got.response)
        assert server.done == ["kept"]

    def test_the_header_can_have_another_name(self, make_caller, server):
        got = make_caller(header="X-Key")("POST", server.url)
        assert UUID.fullmatch(got.response.request.headers["X-Key"])
        assert server.keys == [None]

    @pytest.mark.parametrize("method", ["POST", "PUT"])
    @pytest.mark.parametrize("key", ["", b"", " "])
    def test_an_empty_key_is_refused_before_it_is_sent(self, call, server, method, key):
        """It comes from an empty file, an unset variable."""
        with pytest.raises(ValueError, match="^The header Idempotency-Key is empty"):
            call(method, server.url, headers={"Idempotency-Key": key})
        assert server.seen == []


class TestTroubleOnTheWay:
    @pytest.mark.parametrize("trouble", [drop_before, drop_after, break_off])
    def test_a_call_without_a_response_is_sent_again_with_its_key(self, call, server, trouble):
        server.script += [trouble, trouble]
        got = call("POST", server.url, json={"amount": 5})
        assert (got.status, json.loads(got.body)) == (201, {"id": 1})
        assert server.keys == [got.key] * 3
        assert server.done == [got.key]
        assert {request.body for request in server.seen} == {server.seen[0].body}
        assert was_replayed(got.response) == (trouble is not drop_before)

    @pytest.mark.parametrize("late", [hang, stall])
    def test_a_server_that_does_not_respond_in_time_is_asked_again(self, make_caller, server, late):
        server.script += [late]
        begun = real_time.monotonic()
        got = make_caller(timeout=0.1)("POST", server.url)
        assert real_time.monotonic() - begun < 5
        assert was_replayed(got.response)
        assert server.done == [got.key]

    def test_a_request_that_arrives_twice_has_one_effect(self, call, server):
        server.script += [duplicate]
        got = call("POST", server.url)
        assert was_replayed(got.response)
        assert server.done == [got.key]

    def test_a_server_that_does_not_listen_yet_is_waited_for(self, make_caller, stopped, time):
        time.at_wait = lambda: stopped.start() if len(time.waits) == 2 else None
        assert make_caller()("POST", stopped.url).status == 201
        assert len(time.waits) == 2

    def test_the_last_error_is_raised(self, make_caller, server):
        server.script += [drop_before] * 3
        with pytest.raises(LOST) as lost:
            make_caller(retries=2)("POST", server.url)
        assert server.keys == [lost.value.request.headers["Idempotency-Key"]] * 3

    def test_a_broken_response_is_an_error_at_last(self, make_caller, server):
        server.script += [break_off] * 2
        with pytest.raises((ChunkedEncodingError, httpx.RemoteProtocolError)) as lost:
            make_caller(retries=1)("POST", server.url)
        assert server.keys == [lost.value.request.headers["Idempotency-Key"]] * 2

    def test_errors_and_responses_count_together(self, make_caller, server):
        server.script += [drop_before, respond(503), drop_before, respond(429), work]
        assert make_caller(retries=3)("POST", server.url).status == 429
        assert len(server.seen) == 4


class TestAnswers:
    @pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 599])
    def test_what_says_not_now_is_asked_again(self, call, server, status):
        server.script += [respond(status)]
        assert call("POST", server.url).status == 201
        assert server.done == [server.keys[0]] == [server.keys[1]]

    @pytest.mark.parametrize("status", [200, 304, 400, 401, 407, 422])
    def test_what_says_no_is_final(self, call, server, status):
        server.script += [respond(status)]
        assert call("POST", server.url).status == status
        assert len(server.seen) == 1

    def test_the_first_attempt_may_still_run(self, call, server):
        server.script += [respond(409, "request-in-progress", Retry_After="1")] * 2
        got = call("POST", server.url)
        assert got.status == 201
        assert server.keys == [got.key] * 3

    @pytest.mark.parametrize(
        "problem", ["operation-interrupted", "response-not-kept", "key-expired", "out-of-stock", ""]
    )
    def test_any_other_conflict_is_final_and_whole(self, call, server, problem):
        server.script += [respond(409, problem, Retry_After="1")]
        got = call("POST", server.url)
        assert got.status == 409
        assert json.loads(got.body)["type"].endswith(f":{problem}")
        assert problem_of(got.response) == problem
        assert len(server.seen) == 1

    def test_a_compressed_problem_is_read_too(self, call, server):
        body = gzip.compress(json.dumps({"type": "/problems/request-in-progress"}).encode())
        headers = {"Content-Type": "application/json; charset=utf-8", "Content-Encoding": "gzip"}
        server.script += [lambda handler: handler.respond(409, headers, body)]
        assert call("POST", server.url).status == 201

    @pytest.mark.parametrize(
        ("problem", "headers"),
        [("operation-failed", {}), ("", {"Idempotent_Replayed": "true"})],
    )
    def test_an_error_that_was_stored_is_final(self, call, server, problem, headers):
        server.script += [respond(500, problem, **headers)]
        assert call("POST", server.url).status == 500
        assert len(server.seen) == 1

    def test_the_last_response_is_returned(self, make_caller, server):
        server.script += [respond(503)] * 3
        assert make_caller(retries=2)("POST", server.url).status == 503
        assert len(server.seen) == 3


class TestWaits:
    def test_they_double_up_to_the_longest(self, make_caller, server, time):
        server.script += [respond(503)] * 6
        make_caller(retries=6, backoff=0.5, backoff_max=5)("POST", server.url)
        assert time.waits == [0.5, 1, 2, 4, 5, 5]

    def test_they_are_random_from_nothing_to_the_longest(self, make_caller, server, time):
        time.chance = 0.25
        server.script += [drop_before, respond(503)]
        make_caller(backoff=1)("POST", server.url)
        assert time.waits == [0.25, 0.5]

    @pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
    def test_retry_after_is_the_least(self, call, server, time, status):
        server.script += [respond(status, "request-in-progress", Retry_After="7")]
        call("POST", server.url)
        assert time.waits == [7]

    @pytest.mark.parametrize("after", [{}, {"Retry_After": "1"}, {"Retry_After": "60"}])
    def test_but_not_while_the_first_attempt_runs(self, call, server, time, after):
        server.script += [respond(409, "request-in-progress", **after)] * 3
        assert call("POST", server.url).status == 201
        assert time.waits == [0.5, 1, 2]

    def test_a_running_attempt_is_asked_for_until_the_deadline(self, make_caller, server, time):
        server.script += [respond(409, "request-in-progress", Retry_After="60")] * 30
        assert make_caller(deadline=60)("POST", server.url).status == 409
        assert time.now == 59  # the last attempt has a second
        assert time.waits[-2:] == [10, 3.5]

    @pytest.mark.parametrize("deadline", [0.5, 1, 1.5])
    def test_a_short_deadline_leaves_time_to_ask_again(self, make_caller, server, time, deadline):
        server.script += [respond(409, "request-in-progress")]
        assert make_caller(deadline=deadline)("POST", server.url).status == 201
        assert time.waits == [pytest.approx(min(deadline / 2, 0.5))]

    def test_chance_does_not_end_the_call_long_before_its_deadline(self, make_caller, server, time):
        time.chance = 0.4
        server.script += [respond(409, "request-in-progress")] * 30
        assert make_caller(deadline=60)("POST", server.url).status == 409
        assert time.now == 59

    def test_retry_after_can_be_a_date_by_the_servers_clock(self, call, server, time):
        dates = {
            "Retry_After": "Fri, 01 Jan 2038 00:00:30 GMT",
            "Date": "Fri, 01 Jan 2038 00:00:05 GMT",
        }
        server.script += [respond(429, **dates)]
        call("POST", server.url)
        assert time.waits == [25]

    @pytest.mark.parametrize("value", ["soon", "-5", "1.5", "Fri, 99 Jan 2038", ""])
    def test_a_retry_after_that_says_nothing_is_passed_over(self, call, server, time, value):
        server.script += [respond(503, Retry_After=value)]
        assert call("POST", server.url).status == 201
        assert time.waits == [0.5]

    def test_a_wait_beyond_the_deadline_is_not_begun(self, make_caller, server, time):
        server.script += [respond(503, Retry_After="60")]
        got = make_caller(deadline=60)("POST", server.url)
        assert (got.status, time.waits) == (503, [])

    def test_the_deadline_counts_all_waits_together(self, make_caller, server, time):
        server.script += [respond(503, Retry_After="40"), respond(503, Retry_After="30")]
        got = make_caller(deadline=60)("POST", server.url)
        assert (got.status, time.waits) == (503, [40])

    def test_the_deadline_ends_a_call_without_a_response(self, make_caller, server):
        server.script += [drop_before] * 4
        with pytest.raises(LOST):
            make_caller(deadline=3)("POST", server.url)
        assert len(server.seen) == 3

    def test_no_attempt_waits_longer_than_the_call_has_left(self, make_caller, server):
        server.script += [hang]
        begun = real_time.monotonic()
        with pytest.raises(LOST):
            make_caller(timeout=9, deadline=0.2, clock=real_time.monotonic)("POST", server.url)
        assert real_time.monotonic() - begun < 5

    def test_the_deadline_counts_over_a_redirect(self, make_caller, server, time):
        moved = respond(307, Location="/there")
        server.script += [respond(503, Retry_After="40"), moved, respond(503, Retry_After="30")]
        got = make_caller(deadline=60)("POST", server.url)
        assert (got.status, time.waits) == (503, [40])
        assert [seen.path for seen in server.seen] == ["/", "/", "/there"]

    def test_a_redirect_waits_no_longer_than_the_call_has_left(self, make_caller, server):
        server.script += [respond(307, Location="/there"), hang]
        begun = real_time.monotonic()
        with pytest.raises(LOST):
            make_caller(timeout=9, deadline=0.5, clock=real_time.monotonic)("POST", server.url)
        assert real_time.monotonic() - begun < 5
        assert server.seen[-1].path == "/there"

    def test_the_next_call_has_time_of_its_own(self, make_caller, server, time):
        call = make_caller(deadline=60)
        server.script += [respond(503, Retry_After="40"), work, respond(503, Retry_After="40")]
        assert [call("POST", server.url).status for _ in range(2)] == [201, 201]
        assert time.waits == [40, 40]


class TestBodies:
    @pytest.mark.parametrize("make_caller", [with_httpx], indirect=True)
    def test_a_file_is_sent_whole_each_time(self, call, server):
        server.script += [drop_before, respond(503)]
        call("POST", server.url, content=io.BytesIO(b"abc" * 1000))
        assert [request.body for request in server.seen] == [b"abc" * 1000] * 3

    @pytest.mark.parametrize("make_caller", [with_httpx], indirect=True)
    def test_a_generator_is_sent_whole_each_time(self, call, server):
        server.script += [drop_before, respond(503)]
        call("POST", server.url, content=(part for part in (b"abc", b"def")))
        assert [request.body for request in server.seen] == [b"abcdef"] * 3

    @pytest.mark.parametrize("make_caller", [with_async_httpx], indirect=True)
    def test_an_asynchronous_generator_is_sent_whole_each_time(self, call, server):
        async def parts():
            yield b"abc"
            yield b"def"

        server.script += [drop_before, respond(503)]
        call("POST", server.url, content=parts())
        assert [request.body for request in server.seen] == [b"abcdef"] * 3

    def test_a_form_with_a_file_is_the_same_each_time(self, call, server):
        server.script += [drop_after]
        call("POST", server.url, files={"picture": ("a.png", io.BytesIO(b"png"))})
        assert server.seen[0] == server.seen[1]
        assert b"png" in server.seen[0].body

    def test_a_call_without_a_body_is_sent_again(self, call, server):
        server.script += [drop_after]
        assert call("POST", server.url).status == 201
        assert [request.body for request in server.seen] == [b"", b""]


class TestEncryption:
    def test_a_certificate_that_is_not_trusted_is_final(self, stopped, time, tmp_path):
        """With httpx: ``test_httpx_network``."""
        (tmp_path / "own.pem").write_bytes(self_signed())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "own.pem")
        stopped.start(context)
        with pytest.raises(requests.exceptions.SSLError, match="CERTIFICATE"):
            with_requests(time)("POST", stopped.url.replace("http:", "https:"))
        assert time.waits == []

    def test_a_handshake_that_fails_otherwise_is_tried_again(self, make_caller, server, time):
        with pytest.raises(LOST):
            make_caller(retries=2)("POST", server.url.replace("http:", "https:"))
        assert time.waits == [0.5, 1]
