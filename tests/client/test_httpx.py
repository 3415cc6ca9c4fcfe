"""What only httpx has: transports, sync and async, and what users plug into them."""

from __future__ import annotations

import hashlib
import hmac
import ssl

import httpx
import pytest
import respx

from flask_idempotency.client import IdempotentTransport, new_key
from tests.certificates import self_signed
from tests.client import proxies
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

    def test_respx_needs_no_change(self):
        with respx.mock() as mock:
            sent = mock.post(URL).mock(side_effect=[httpx.ConnectError, httpx.Response(201, json=PAID)])
            assert client().post(URL).json() == PAID
            assert len({call.request.headers[KEY] for call in sent.calls}) == 1

    def test_pytest_httpx_needs_no_change(self, httpx_mock):
        httpx_mock.add_exception(httpx.ReadTimeout("slow"))
        limits = {"timeout": httpx.Timeout(5).as_dict()}  # the usual ones
        httpx_mock.add_response(status_code=201, json=PAID, match_extensions=limits)
        assert client().post(URL).json() == PAID
        assert len({request.headers[KEY] for request in httpx_mock.get_requests()}) == 1


@pytest.mark.usefixtures("time")
class TestTransport:
    def test_a_lost_response_is_asked_for_again_through_the_same_tunnel(self, stopped, tmp_path):
        certificate = tmp_path / "own.pem"
        certificate.write_bytes(self_signed())
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate)
        stopped.start(tls)
        stopped.script += [drop_after]
        trusted = ssl.create_default_context(cafile=certificate)
        with proxies.running() as proxy:
            way = httpx.HTTPTransport(proxy=f"http://{proxy.address}", verify=trusted)
            with client(way) as api:
                response = api.post(stopped.url.replace("http:", "https:"))
        assert proxy.seen == [("127.0.0.1", stopped.port)] * 2
        assert stopped.keys == [response.request.headers[KEY]] * 2

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

    def test_the_client_has_what_it_has_without_us(self, server):
        def note(response):
            noted.append(response.status_code)

        noted = []
        server.script += [respond(503)]
        with client(base_url=server.url, event_hooks={"response": [note]}) as api:
            response = api.post("/payments")
        assert (server.seen[0].path, noted) == ("/payments", [201])
        assert response.elapsed.total_seconds() >= 0

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

    def test_closing_the_client_closes_it(self):
        class Noted(httpx.MockTransport):
            def close(self):
                noted.append("closed")

        noted = []
        with client(Noted(lambda request: httpx.Response(201))) as api:
            api.post(URL)
        assert noted == ["closed"]


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
