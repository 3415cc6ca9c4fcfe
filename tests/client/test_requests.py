"""What only requests has: the session, and what users plug into it."""

from __future__ import annotations

import base64
import copy
import hashlib
import hmac
import io
import pickle

import pytest
import requests
import requests_mock
from requests.adapters import HTTPAdapter
from requests.auth import AuthBase
from requests.exceptions import ChunkedEncodingError, ReadTimeout, TooManyRedirects
from requests_toolbelt.adapters.source import SourceAddressAdapter

from flask_idempotency.client import IdempotentSession
from tests.client.conftest import break_off, drop_after, drop_before, hang, respond, work, written

API = "https://api.example.com/payments"
KEY = "Idempotency-Key"


@pytest.fixture
def session(time):
    with IdempotentSession() as session:
        session.trust_env = False
        yield session


def was_replayed(response):
    return response.headers.get("Idempotent-Replayed") == "true"


def unpickled(value):
    return pickle.loads(pickle.dumps(value))  # noqa: S301


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

    def test_a_prepared_request_that_is_sent_again_keeps_its_key(self, server, session):
        prepared = requests.Request("POST", server.url).prepare()
        first, second = session.send(prepared), session.send(prepared)
        assert not was_replayed(first)
        assert was_replayed(second)

    def test_so_does_the_request_of_an_error(self, server, session):
        server.script += [drop_after] * 99
        with pytest.raises(requests.ConnectionError) as lost:
            session.post(server.url, json={"amount": 5})
        server.script.clear()
        assert was_replayed(session.send(lost.value.request))
        assert len(server.done) == 1

    def test_a_key_of_the_sessions_headers_is_kept(self, server, session):
        session.headers["idempotency-key"] = "of-the-job"
        session.post(server.url, headers={"Accept": None})
        assert server.keys == ["of-the-job"]

    @pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, unpickled])
    def test_a_copy_and_one_in_another_process_are_the_same_session(self, server, time, twin):
        original = IdempotentSession()
        original.trust_env, original.timeout, original.header = False, 0.1, "X-Key"
        server.script += [drop_before, hang]
        with twin(original) as session:
            assert was_replayed(session.post(server.url)) is False  # the server knows no X-Key
        assert len(server.seen) == 3

    def test_a_circle_of_redirects_is_followed_once(self, server, session):
        session.max_redirects = 2
        server.script += [respond(307, Location="/")] * 9
        with pytest.raises(TooManyRedirects) as lost:
            session.post(server.url)
        assert server.keys == [lost.value.request.headers[KEY]] * 3

    def test_a_file_is_sent_from_where_it_stands(self, server, session):
        file = io.BytesIO(b"head abc")
        file.seek(5)
        server.script += [drop_before, respond(307, Location="/there")]
        session.post(server.url, data=file)
        assert [seen.body for seen in server.seen] == [b"abc"] * 3


class TestStreamedResponses:
    """A success that the caller streams is not read here, but its headers are looked at."""

    def test_one_is_left_to_the_caller_to_read(self, server, session):
        server.script += [respond(503), break_off]
        with session.post(server.url, stream=True) as response:
            assert response.status_code == 201
            with pytest.raises(ChunkedEncodingError):
                response.content  # noqa: B018
        assert len(server.seen) == 2


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

    @pytest.mark.parametrize("coding", ["chunked ", "chunked, chunked", "identity, chunked", "Chunked"])
    def test_chunks_are_read_as_a_plain_session_reads_them(self, server, session, coding):
        head = f"HTTP/1.1 201 CREATED\r\nTransfer-Encoding: {coding}\r\nConnection: close\r\n\r\n"
        whole = head + '4\r\n{"id\r\n4\r\n":1}\r\n0\r\n\r\n'
        server.script += [written(whole[: whole.index("}")]), work, written(whole)]
        assert was_replayed(session.post(server.url)), "a body that was cut off"
        assert session.post(server.url).content == b'{"id":1}'

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


class Custom(HTTPAdapter):
    """An adapter of the application's own, which says so."""

    def send(self, request, **kwargs):
        request.headers["X-Sent-By"] = "custom"
        return super().send(request, **kwargs)


class TestAdapters:
    @pytest.mark.parametrize("adapter", [Custom(max_retries=0), SourceAddressAdapter("127.0.0.2")])
    def test_each_attempt_goes_through_the_one_that_is_mounted(self, server, session, adapter):
        def note(handler):
            noted.append((handler.client_address[0], handler.headers["X-Sent-By"]))
            work(handler)

        noted = []
        session.mount(server.url, adapter)
        server.script += [drop_after, note]
        assert was_replayed(session.post(server.url))
        assert noted == [
            ("127.0.0.1", "custom") if isinstance(adapter, Custom) else ("127.0.0.2", None)
        ]


class TestMocks:
    def test_with_the_mocker_of_requests_mock_a_call_has_its_key_and_is_sent_once(self, session):
        with requests_mock.Mocker() as mock:
            mock.post(API, status_code=503)
            assert session.post(API).status_code == 503
            assert mock.last_request.headers[KEY]


class MessageSignature(AuthBase):
    """Signs as RFC 9421 describes it, with the digest of RFC 9530."""

    INPUT = '("@method" "@path" "content-digest" "idempotency-key");created=1;alg="hmac-sha256"'

    def __call__(self, request):
        digest = base64.b64encode(hashlib.sha256(request.body).digest()).decode()
        request.headers["Content-Digest"] = f"sha-256=:{digest}:"
        request.headers["Signature-Input"] = f"sig={self.INPUT}"
        request.headers["Authorization"] = self.sign(request.method, request.path_url, request.headers)
        return request

    def sign(self, method, path, headers):
        values = {"@method": method, "@path": path, "@signature-params": self.INPUT}
        values |= {name: headers[name] for name in ("content-digest", "idempotency-key")}
        base = "\n".join(f'"{name}": {value}' for name, value in sorted(values.items()))
        return hmac.new(b"secret", base.encode(), "sha256").hexdigest()


class TestSignatures:
    def test_one_over_key_and_body_holds_in_each_attempt(self, server, session):
        def verify(handler):
            expected = auth.sign(handler.command, handler.path, handler.headers)
            right.append(handler.headers["Authorization"] == expected)
            (drop_after, work)[len(right) - 1](handler)

        right, auth = [], MessageSignature()
        server.script += [verify] * 2
        assert was_replayed(session.post(server.url, data=b"abc", auth=auth))
        assert right == [True, True]


def test_a_key_that_is_none_is_refused_as_an_empty_one(server):
    """It comes from an empty column."""
    with pytest.raises(ValueError, match="^The header Idempotency-Key is empty"):
        IdempotentSession().post(server.url, headers={"Idempotency-Key": None})
    assert server.seen == []
