"""What only httpx has: transports that wrap others, and what stands in for a network in tests."""

from __future__ import annotations

import anyio
import httpx
import pytest
import respx

from flask_idempotency.client import AsyncIdempotentTransport, IdempotentTransport

URL = "https://api.example.com/payments"
PAID = {"id": 1}


def read(response):
    response.read()
    return response


def in_parts(response):
    async def later():
        yield response.content

    class Stream(httpx.SyncByteStream, httpx.AsyncByteStream):
        __iter__ = lambda self: iter([response.content])  # noqa: E731
        __aiter__ = lambda self: later()  # noqa: E731

    return httpx.Response(response.status_code, headers=response.headers, stream=Stream())


RESPONSES = {"read": read, "a stream": in_parts}
"""What a mock or a cache hands over: a response that was read, or one that can be read once."""


@pytest.fixture(params=["sync", "async"])
def post(request, time):
    """A function that posts through our transport to a mock, a cache or whatever else stands below."""

    def sync(wrapped=None):
        with httpx.Client(transport=IdempotentTransport(wrapped, policy=time.policy())) as client:
            return client.post(URL, json={"amount": 500})

    async def asynchronous(wrapped=None):
        async def sleep(seconds):
            time.sleep(seconds)

        transport = AsyncIdempotentTransport(wrapped, policy=time.policy(), sleep=sleep)
        async with httpx.AsyncClient(transport=transport) as client:
            return await client.post(URL, json={"amount": 500})

    return sync if request.param == "sync" else lambda wrapped=None: anyio.run(asynchronous, wrapped)


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

    def test_pytest_httpx_needs_no_change(self, post, httpx_mock):
        httpx_mock.add_exception(httpx.ReadTimeout("slow"))
        httpx_mock.add_response(status_code=503)
        httpx_mock.add_response(status_code=201, json=PAID)
        assert post().json() == PAID
        assert len({request.headers["Idempotency-Key"] for request in httpx_mock.get_requests()}) == 1

    def test_pytest_httpx_may_give_a_success_without_a_body(self, post, httpx_mock):
        httpx_mock.add_response(status_code=201)
        assert post().content == b""


class TestWhatIsWrapped:
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
