"""What only httpx has: transports, sync and async, and what users plug into them."""

from __future__ import annotations

import httpx
import pytest

from flask_idempotency.client import IdempotentTransport
from tests.client.conftest import drop_after, respond

URL = "https://api.example.com/payments"
KEY = "Idempotency-Key"

pytestmark = pytest.mark.usefixtures("time")


def client(wrapped=None, **options):
    wrapped = wrapped or httpx.HTTPTransport(verify=False)  # saves reading certificates
    return httpx.Client(transport=IdempotentTransport(wrapped), **options)


def test_the_request_of_an_error_that_is_sent_again_has_time_of_its_own(server, time):
    server.script += [respond(503, Retry_After="89"), drop_after]
    with client(headers={"idempotency-key": "of-the-job"}) as api:
        with pytest.raises(httpx.TransportError) as lost:
            api.post(server.url)
        server.script += [respond(503, Retry_After="89")]
        response = api.send(lost.value.request)
    assert response.headers["Idempotent-Replayed"] == "true"
    assert time.waits == [89, 89]
    assert server.done == ["of-the-job"]


def test_a_response_that_the_caller_streams_was_read_before(server):
    server.script += [respond(503), respond(422, "key-reused")]
    with client() as api, api.stream("POST", server.url) as response:
        assert "key-reused" in "".join(response.iter_lines())


def test_that_to_a_call_without_a_key_is_not_read():
    download = iter([b"large"])
    mock = httpx.MockTransport(lambda request: httpx.Response(200, content=download))
    with client(mock) as api, api.stream("GET", URL):
        assert list(download) == [b"large"]


def test_a_time_limit_of_the_wrapped_transport_is_at_most_what_is_left():
    def handle(request):
        noted.append(request.extensions["timeout"]["read"])
        return httpx.Response(503 if len(noted) < 3 else 201)

    noted = []
    with client(httpx.MockTransport(handle)) as api:
        request = api.build_request("POST", URL, timeout=89)
        api.send(request)
    assert noted == [89, 89, 87]
    assert request.extensions["timeout"]["read"] == 89  # the caller may send it again
