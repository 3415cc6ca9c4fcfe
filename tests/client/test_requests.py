"""What only requests has: the session, and what users plug into it."""

from __future__ import annotations

import io

import pytest
import requests
from requests.adapters import HTTPAdapter
from requests.exceptions import ChunkedEncodingError, ReadTimeout

from flask_idempotency.client import IdempotentSession
from tests.client.conftest import break_off, drop_after, drop_before, hang, respond, work, written

KEY = "Idempotency-Key"


@pytest.fixture
def session(time):
    with IdempotentSession() as session:
        session.trust_env = False
        yield session


def was_replayed(response):
    return response.headers.get("Idempotent-Replayed") == "true"


class TestSession:
    @pytest.mark.parametrize("timeout", [0.1, (5, 0.1)])
    def test_a_call_can_have_a_time_limit_of_its_own(self, server, session, timeout):
        server.script += [hang]
        assert was_replayed(session.post(server.url, timeout=timeout))

    def test_its_time_limit_holds_for_a_call_without_a_key(self, server, session):
        server.script += [hang]
        session.timeout = 0.1
        with pytest.raises(ReadTimeout):
            session.get(server.url)
        assert len(server.seen) == 1

    def test_a_prepared_request_and_that_of_an_error_keep_their_key(self, server, session):
        prepared = requests.Request("POST", server.url).prepare()
        assert [was_replayed(session.send(prepared)) for _ in range(2)] == [False, True]
        server.script += [drop_after] * 99
        with pytest.raises(requests.ConnectionError) as lost:
            session.post(server.url, json={"amount": 5})
        server.script.clear()
        assert was_replayed(session.send(lost.value.request))
        assert len(server.done) == 2

    def test_a_key_of_the_sessions_headers_is_kept_and_none_is_an_empty_one(self, server, session):
        session.headers["idempotency-key"] = "of-the-job"
        session.post(server.url, headers={"Accept": None})
        session.post(server.url, headers={KEY.encode(): b"of-the-call"})
        assert server.keys == ["of-the-job", "of-the-call"]
        with pytest.raises(ValueError, match="^The header Idempotency-Key is empty"):
            session.post(server.url, headers={KEY: None})

    def test_a_file_is_sent_from_where_it_stands(self, server, session):
        file = io.BytesIO(b"head abc")
        file.seek(5)
        server.script += [drop_before, respond(307, Location="/there")]
        session.post(server.url, data=file)
        assert [seen.body for seen in server.seen] == [b"abc"] * 3

    def test_a_success_that_the_caller_streams_is_the_callers_to_read(self, server, session):
        server.script += [respond(503), break_off]
        with session.post(server.url, stream=True) as response:
            assert response.status_code == 201
            with pytest.raises(ChunkedEncodingError):
                response.content  # noqa: B018
        assert len(server.seen) == 2

    def test_an_error_that_breaks_off_is_asked_for_again_even_if_the_caller_streams(
        self, server, session
    ):
        server.script += [written("HTTP/1.1 422 X\r\nContent-Length: 9\r\n\r\n{}")]
        with session.post(server.url, stream=True) as response:
            assert was_replayed(response)

    def test_each_attempt_goes_through_the_mounted_adapter_and_keeps_its_signature(
        self, server, session
    ):
        class Custom(HTTPAdapter):
            def send(self, request, **kwargs):
                sent.append(request.headers["Signature"] == f"{request.headers[KEY]} {request.body}")
                return super().send(request, **kwargs)

        def sign(request):
            request.headers["Signature"] = f"{request.headers[KEY]} {request.body}"
            return request

        sent = []
        session.mount(server.url, Custom(max_retries=0))
        server.script += [drop_after]
        assert was_replayed(session.post(server.url, data=b"abc", auth=sign))
        assert sent == [True, True]


class TestFraming:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        "rest",
        [
            "201 CREATED\r\nConnection: close\r\n\r\n{}",
            "409 CONFLICT\r\n\r\n{}",
            "201 CREATED\r\nTransfer-Encoding: unchunked\r\n\r\n{}",
            "103 Early Hints\r\nContent-Length: 0\r\n\r\n",
        ],
    )
    def test_one_without_an_end_is_an_error_at_last(self, server, session, rest, stream):
        server.script += [written(f"HTTP/1.1 {rest}")] * 99
        with pytest.raises(requests.ConnectionError, match="broke off") as lost:
            session.post(server.url, stream=stream)
        assert server.keys == [lost.value.request.headers[KEY]] * 12

    def test_a_response_after_an_interim_one_is_that_of_its_own_call(self, server, session):
        """http.client takes each 1xx but 100 for the response, and the real one comes after it."""

        def hint(handler):
            status, headers, body = handler.world.work(handler.key)
            handler.wfile.write(b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>\r\n\r\n")
            handler.world.let_go.wait(0.05)
            handler.respond(status, headers, body)

        server.script += [hint, hint, work, work, hint]
        assert [session.post(server.url).json()["id"] for _ in range(4)] == [1, 2, 3, 4]
        assert [session.post(server.url, stream=True).json()["id"] for _ in range(2)] == [5, 6]
