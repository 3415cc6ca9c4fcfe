"""What only httpx has: clients and transports, sync and async, and what users plug into them."""

from __future__ import annotations

import hashlib
import hmac

import httpx
import pytest
import respx

from flask_idempotency.client import attempts_of, was_replayed
from tests.client.conftest import break_off, drop_after, drop_before, respond

URL = "https://api.example.com/payments"
PAID = {"id": 1}
CHALLENGE = respond(401, WWW_Authenticate='Digest realm="r", nonce="n", qop="auth"')


@pytest.fixture(params=["client", "transport"])
def post(request, kind):
    """A function that posts with our client, or through our transport in another."""

    def post(wrapped=None, **options):
        wrapped = wrapped or kind.Network(verify=False)  # saves reading certificates
        if request.param == "transport":
            wrapped = kind.Transport(wrapped, **kind.ours())
        return kind.post(kind.client(transport=wrapped), URL, **options)

    return post


def read(response):
    response.read()
    return response


class Parts(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A stream that can be read once."""

    def __init__(self, *parts):
        self.parts = iter(parts)

    def __iter__(self):
        return self.parts

    async def __aiter__(self):
        for part in self.parts:
            yield part


def in_parts(response):
    return httpx.Response(
        response.status_code, headers=response.headers, stream=Parts(response.content)
    )


RESPONSES = {"read": read, "a stream": in_parts}
"""What a mock or a cache hands over: a response that was read, or one that can be read once."""


class TestBodiesOfTheOtherKind:
    @pytest.mark.parametrize("send", ["client", "transport"])
    def test_the_error_is_that_of_httpx(self, kind, send):
        async def asynchronous():
            yield b"abc"

        body = iter([b"abc"]) if kind.is_async else asynchronous()
        network = httpx.MockTransport(lambda _request: httpx.Response(201))
        if send == "transport":
            network = kind.Transport(network, **kind.ours())
        with pytest.raises(RuntimeError, match=r"^Attempted to send an a?sync request with an? "):
            kind.post(kind.client(transport=network), URL, content=body)


class TestMocks:
    @pytest.mark.parametrize("handed_over", RESPONSES.values(), ids=RESPONSES)
    def test_a_mock_transport_needs_no_change(self, post, time, handed_over):
        def handle(request):
            keys.append(request.headers["Idempotency-Key"])
            return handed_over(script.pop(0))

        keys, script = [], [httpx.Response(503), httpx.Response(201, json=PAID)]
        response = post(httpx.MockTransport(handle))
        assert (response.status_code, response.json()) == (201, PAID)
        assert keys == [response.request.headers["Idempotency-Key"]] * 2
        assert time.waits == [0.5]

    def test_a_problem_that_was_read_already_is_understood(self, post):
        problem = {"type": "/problems/request-in-progress"}
        headers = {"Content-Type": "application/problem+json"}
        script = [httpx.Response(409, json=problem, headers=headers), httpx.Response(201, json=PAID)]
        assert post(httpx.MockTransport(lambda request: script.pop(0))).json() == PAID

    def test_respx_needs_no_change(self, post):
        with respx.mock() as mock:
            route = mock.post(URL).mock(
                side_effect=[httpx.ConnectError, httpx.Response(201, json=PAID)]
            )
            assert post().json() == PAID
            one, two = (call.request.headers["Idempotency-Key"] for call in route.calls)
            assert one == two
            route.mock(return_value=httpx.Response(201, json=PAID))
            assert [post().json() for _ in range(2)] == [PAID] * 2

    def test_respx_may_stand_in_for_the_transports_of_the_client(self, kind):
        with respx.mock(using="httpx") as mock:
            route = mock.post(URL).mock(
                side_effect=[httpx.ConnectError, httpx.Response(201, json=PAID)]
            )
            assert kind.post(kind.client(verify=False), URL).json() == PAID
            assert len({call.request.headers["Idempotency-Key"] for call in route.calls}) == 1

    def test_pytest_httpx_needs_no_change(self, post, httpx_mock):
        httpx_mock.add_exception(httpx.ReadTimeout("slow"))
        httpx_mock.add_response(status_code=503)
        limits = {"timeout": httpx.Timeout(5).as_dict()}  # the usual ones
        httpx_mock.add_response(status_code=201, json=PAID, match_extensions=limits)
        assert post().json() == PAID
        assert len({request.headers["Idempotency-Key"] for request in httpx_mock.get_requests()}) == 1

    def test_pytest_httpx_may_give_a_success_without_a_body(self, post, httpx_mock):
        httpx_mock.add_response(status_code=201)
        assert post().content == b""


class TestWaysToTheNetwork:
    """The server is a proxy here: it sees the whole URL of a request that goes through it."""

    TARGET = "http://api.example.com/payments"

    def assert_sent_again(self, server, response):
        assert was_replayed(response)
        assert [seen.path for seen in server.seen] == [self.TARGET] * 2
        assert server.keys == [response.request.headers["Idempotency-Key"]] * 2

    @pytest.fixture(autouse=True)
    def lossy(self, server):
        server.script += [drop_after]

    def test_a_proxy_does_not_go_round_the_client(self, kind, server):
        client = kind.client(proxy=server.url, verify=False)
        self.assert_sent_again(server, kind.post(client, self.TARGET))

    def test_nor_does_a_proxy_beside_a_transport(self, kind, server):
        client = kind.client(proxy=server.url, transport=kind.Network(verify=False), verify=False)
        self.assert_sent_again(server, kind.post(client, self.TARGET))

    def test_nor_one_of_the_environment(self, kind, server, monkeypatch):
        monkeypatch.setenv("HTTP_PROXY", server.url)
        self.assert_sent_again(server, kind.post(kind.client(verify=False), self.TARGET))

    def test_nor_a_mounted_transport(self, kind, server):
        mounts = {"http://api.example.com": kind.Network(proxy=server.url, verify=False)}
        self.assert_sent_again(server, kind.post(kind.client(mounts=mounts, verify=False), self.TARGET))

    def test_a_mounted_transport_of_ours_keeps_its_policy(self, kind, server, time):
        server.script += [respond(503)] * 9
        own = kind.ours(policy=time.policy(retries=2))
        mounts = {"http://": kind.Transport(kind.Network(proxy=server.url, verify=False), **own)}
        client = kind.client(mounts=mounts, verify=False)
        assert kind.post(client, self.TARGET).status_code == 503
        assert len(server.seen) == 3


class TestClient:
    def test_a_call_can_have_a_policy_of_its_own(self, kind, client, server, time):
        server.script += [respond(503)] * 9
        patient = {"retry_policy": time.policy(retries=7, header="X-Key")}
        response = kind.run(client.post, server.url, extensions=patient)
        assert attempts_of(response) == 8
        assert response.request.headers["X-Key"]
        assert server.keys == [None] * 8  # as it is named in the client's own policy

    def test_the_deadline_counts_over_the_sign_in(self, kind, client, server, time):
        server.script += [respond(503, Retry_After="60"), CHALLENGE, respond(503, Retry_After="40")]
        response = kind.run(client.post, server.url, auth=httpx.DigestAuth("alice", "pw"))
        assert (response.status_code, time.waits) == (503, [60])

    def test_a_call_that_has_to_sign_in_first_has_one_key(self, kind, client, server):
        server.script += [CHALLENGE, respond(503), drop_after]
        auth = httpx.DigestAuth("alice", "pw")
        assert was_replayed(kind.run(client.post, server.url, content=b"abc", auth=auth))
        assert server.keys == server.done * 4
        assert [seen.body for seen in server.seen] == [b"abc"] * 4

    def test_a_request_that_is_sent_again_keeps_its_key_and_has_time_of_its_own(
        self, kind, client, server, time
    ):
        server.script += [respond(503, Retry_After="89"), drop_before]
        with pytest.raises(httpx.TransportError) as lost:
            kind.run(client.post, server.url)
        server.script += [respond(503, Retry_After="89")]
        assert kind.run(client.send, lost.value.request).status_code == 201
        assert time.waits == [89, 89]
        assert len(set(server.keys)) == 1

    def test_a_key_of_the_clients_headers_is_kept(self, kind, client, server):
        client.headers["idempotency-key"] = "of-the-job"
        kind.run(client.post, server.url)
        assert server.keys == ["of-the-job"]

    def test_it_takes_and_gives_what_httpx_does(self, kind, server):
        def note(response):
            noted.append(response.status_code)

        async def note_too(response):
            note(response)

        noted = []
        hooks = {"response": [note_too if kind.is_async else note]}
        client = kind.client(base_url=server.url, verify=False, event_hooks=hooks)
        assert isinstance(client, kind.Plain)
        server.script += [respond(503)]
        assert kind.post(client, "/payments").status_code == 201
        assert (server.seen[0].path, noted) == ("/payments", [201])


class Signature(httpx.Auth):
    """Signs as RFC 9421 describes it: the key and a digest of the body are among what is covered."""

    requires_request_body = True
    SECRET = b"shared"

    def auth_flow(self, request):
        request.headers["Content-Digest"] = hashlib.sha256(request.content).hexdigest()
        request.headers["Signature"] = self.of(request.headers)
        yield request

    def of(self, headers):
        covered = [headers[name] for name in ("Idempotency-Key", "Content-Digest")]
        return hmac.new(self.SECRET, "\n".join(covered).encode(), "sha256").hexdigest()


class TestSigning:
    def test_key_and_body_are_there_when_the_request_is_signed(self, kind, client, server):
        server.script += [drop_before]
        parts = Parts(b"a", b"bc")
        content = aiter(parts) if kind.is_async else iter(parts)
        response = kind.run(client.post, server.url, content=content, auth=Signature())
        sent = response.request.headers
        assert [seen.key for seen in server.seen] == [sent["Idempotency-Key"]] * 2
        assert [hashlib.sha256(seen.body).hexdigest() for seen in server.seen] == [
            sent["Content-Digest"]
        ] * 2
        assert sent["Signature"] == Signature().of(sent)

    def test_a_transport_can_sign_each_attempt_anew(self, kind, time):
        class Signing(httpx.MockTransport):
            def handle_request(self, request):
                request.headers["Nonce"] = str(len(nonces))
                return super().handle_request(request)

            async def handle_async_request(self, request):
                return self.handle_request(request)

        def handle(request):
            nonces.append((request.headers["Nonce"], request.headers["Idempotency-Key"]))
            return httpx.Response(503 if len(nonces) == 1 else 201)

        nonces = []
        response = kind.post(kind.client(transport=Signing(handle)), URL)
        key = response.request.headers["Idempotency-Key"]
        assert nonces == [("0", key), ("1", key)]


def events(handler):
    """Send one event, and the next when the first has been read."""
    handler.send_response(201)
    handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.wfile.write(b"data: 1\n\n")
    if handler.world.let_go.wait(10):
        handler.wfile.write(b"data: 2\n\n")
    handler.close_connection = True


def collect_sync(response, server):
    parts = []
    for part in response.iter_raw():
        parts.append(part)
        server.let_go.set()
    return b"".join(parts)


async def collect_async(response, server):
    parts = []
    async for part in response.aiter_raw():
        parts.append(part)
        server.let_go.set()
    return b"".join(parts)


class TestStreams:
    def test_a_success_that_the_caller_streams_is_left_to_read(self, kind, client, server):
        server.script += [respond(503), break_off]
        response = self.streamed(kind, client, server.url)
        assert response.status_code == 201
        with pytest.raises(httpx.RemoteProtocolError):
            kind.run(response.aread if kind.is_async else response.read)
        assert len(server.seen) == 2

    def test_a_failure_that_the_caller_streams_can_be_read(self, kind, client, server):
        server.script += [respond(422, "key-reused")]
        response = self.streamed(kind, client, server.url)
        collect = collect_async if kind.is_async else collect_sync
        assert b"key-reused" in kind.run(collect, response, server)

    def streamed(self, kind, client, url):
        return kind.run(client.send, client.build_request("POST", url), stream=True)

    @pytest.mark.parametrize("method", ["POST", "GET"])
    def test_an_event_stream_is_handed_over_as_it_comes(self, kind, server, method):
        server.script += [events]
        client = kind.Plain(transport=kind.Transport(kind.Network(verify=False), **kind.ours()))
        response = kind.run(client.send, client.build_request(method, server.url), stream=True)
        collect = collect_async if kind.is_async else collect_sync
        assert kind.run(collect, response, server) == b"data: 1\n\ndata: 2\n\n"
        kind.close(client)

    def test_the_response_to_a_call_without_a_key_is_not_read(self, kind):
        download = Parts(b"large")
        mock = httpx.MockTransport(lambda request: httpx.Response(200, stream=download))
        client = kind.client(transport=kind.Transport(mock, **kind.ours()))
        response = kind.run(client.send, client.build_request("GET", URL), stream=True)
        assert list(download.parts) == [b"large"]
        kind.run(response.aclose if kind.is_async else response.close)

    def test_the_caller_reads_a_stream_with_the_time_limits_of_the_call(self, kind, time):
        class Events(Parts):
            def __iter__(self):
                noted.append(extensions[0]["timeout"]["read"])
                return self.parts

            async def __aiter__(self):
                for part in iter(self):
                    yield part

        def handle(request):
            extensions.append(request.extensions)  # httpcore looks into the same dict when it reads
            noted.append(request.extensions["timeout"]["read"])
            headers = {"Content-Type": "text/event-stream"}
            return httpx.Response(200, headers=headers, stream=Events(b"data: 1\n\n"))

        extensions, noted = [], []
        client = kind.client(transport=httpx.MockTransport(handle), policy=time.policy(deadline=30))
        kind.post(client, URL, timeout=None)
        assert noted == [30, None]


class TestWhatIsWrapped:
    def test_it_has_the_time_limits_of_the_attempt_and_the_caller_those_of_the_call(self, kind, time):
        def handle(request):
            noted.append((request.extensions["timeout"]["read"], given["timeout"]["read"]))
            return httpx.Response(201)

        given, noted = {"timeout": {"read": 120}}, []
        transport = kind.Transport(httpx.MockTransport(handle), **kind.ours())
        client = kind.client(transport=transport)
        request = client.build_request("POST", URL)
        request.extensions = given  # calls at the same time may share it
        kind.run(client.send, request)
        assert noted == [(90, 120)]

    def test_the_client_opens_and_closes_it(self, post):
        class Noted(httpx.MockTransport):
            def __enter__(self):
                noted.append("opened")
                return self

            def __exit__(self, *error):
                noted.append("closed")

            async def __aenter__(self):
                return self.__enter__()

            async def __aexit__(self, *error):
                self.__exit__()

        noted = []
        post(Noted(lambda request: httpx.Response(201)))
        assert noted == ["opened", "closed"]
