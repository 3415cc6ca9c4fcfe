"""What only httpx has: transports, sync and async, and what users plug into them."""

from __future__ import annotations

import hashlib
import hmac

import httpx
import pytest

from flask_idempotency.client import IdempotentTransport, new_key
from tests.client.conftest import drop_after, drop_before, respond

URL = "https://api.example.com/payments"
KEY = "Idempotency-Key"
PAID = {"id": 1}


def client(wrapped=None, **options):
    wrapped = wrapped or httpx.HTTPTransport(verify=False)  # saves reading certificates
    return httpx.Client(transport=IdempotentTransport(wrapped), **options)


class Parts(httpx.SyncByteStream):
    """A stream that can be read once."""

    def __init__(self, *parts):
        self.parts = iter(parts)

    def __iter__(self):
        return self.parts


@pytest.mark.usefixtures("time")
class TestMocks:
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_mock_transport_needs_no_change(self, stream):
        def handle(request):
            keys.append(request.headers[KEY])
            response = script.pop(0)
            return response if not stream else in_parts(response)

        def in_parts(response):
            parts = Parts(response.content)
            return httpx.Response(response.status_code, headers=response.headers, stream=parts)

        problem = {"type": "/problems/request-in-progress"}
        keys, script = [], [httpx.Response(409, json=problem), httpx.Response(201, json=PAID)]
        response = client(httpx.MockTransport(handle)).post(URL)
        assert (response.status_code, response.json()) == (201, PAID)
        assert keys == [response.request.headers[KEY]] * 2


@pytest.mark.usefixtures("time")
class TestTransport:
    def test_the_request_of_an_error_that_is_sent_again_has_time_of_its_own(self, server, time):
        server.script += [respond(503, Retry_After="89"), drop_after]
        with client() as api:
            with pytest.raises(httpx.TransportError) as lost:
                api.post(server.url)
            server.script += [respond(503, Retry_After="89")]
            response = api.send(lost.value.request)
        assert response.headers["Idempotent-Replayed"] == "true"
        assert time.waits == [89, 89]
        assert len(server.done) == 1

    def test_a_key_of_the_clients_headers_is_kept(self, server):
        with client(headers={"idempotency-key": "of-the-job"}) as api:
            api.post(server.url)
        assert server.keys == ["of-the-job"]

    def test_a_response_that_the_caller_streams_was_read_before(self, server):
        server.script += [respond(503), respond(422, "key-reused")]
        with client() as api, api.stream("POST", server.url) as response:
            assert "key-reused" in "".join(response.iter_lines())

    def test_that_to_a_call_without_a_key_is_not_read(self):
        download = Parts(b"large")
        mock = httpx.MockTransport(lambda request: httpx.Response(200, stream=download))
        with client(mock) as api, api.stream("GET", URL):
            assert list(download.parts) == [b"large"]

    def test_a_time_limit_of_the_wrapped_transport_is_at_most_what_is_left(self, time):
        def handle(request):
            noted.append(request.extensions["timeout"]["read"])
            return httpx.Response(503 if len(noted) < 3 else 201)

        noted = []
        with client(httpx.MockTransport(handle)) as api:
            request = api.build_request("POST", URL, timeout=89)
            api.send(request)
        assert noted == [89, 89, 87]
        assert request.extensions["timeout"]["read"] == 89  # the caller may send it again


class Signature(httpx.Auth):
    """Signs as RFC 9421 describes it: the key and a digest of the body are among what is covered."""

    requires_request_body = True

    def auth_flow(self, request):
        digest = hashlib.sha256(request.content).hexdigest()
        covered = f"{request.headers[KEY]}\n{digest}".encode()
        request.headers["Signature"] = hmac.new(b"shared", covered, "sha256").hexdigest()
        yield request


@pytest.mark.usefixtures("time")
def test_a_signature_covers_the_key_that_the_caller_sets(server):
    signatures = []

    def lose(handler):
        signatures.append(handler.headers["Signature"])
        drop_before(handler)

    server.script += [lose]
    key = new_key()
    with client() as api:
        response = api.post(server.url, content=b"abc", headers={KEY: key}, auth=Signature())
    assert server.keys == [key] * 2
    assert signatures == [response.request.headers["Signature"]]
