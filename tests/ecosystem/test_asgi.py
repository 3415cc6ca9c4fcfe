"""The application on an ASGI server: behind asgiref's and a2wsgi's adapters."""

from __future__ import annotations

import asyncio
from typing import Any

import a2wsgi
import httpx
import pytest
from asgiref.wsgi import WsgiToAsgi

ADAPTERS = pytest.mark.parametrize("adapter", [WsgiToAsgi, a2wsgi.WSGIMiddleware])


def send(adapter: Any, world: Any, *keys: str, body: bytes = b'{"amount": 5}') -> list[httpx.Response]:
    """All at once, as they come to one server."""

    async def all_of_them() -> list[httpx.Response]:
        transport = httpx.ASGITransport(adapter(world.app.wsgi_app))
        headers = {"X-User": "alice", "Content-Type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            requests = [
                client.post("/payments", content=body, headers={**headers, "Idempotency-Key": key})
                for key in keys
            ]
            return await asyncio.gather(*requests)

    return asyncio.run(all_of_them())


@ADAPTERS
def test_a_retry_gets_the_stored_response(world, add_view, adapter):
    add_view(world)
    [first], [replay] = (send(adapter, world, "key-1") for _ in range(2))
    assert (first.status_code, replay.headers["Idempotent-Replayed"]) == (201, "true")
    assert replay.content == first.content
    [changed] = send(adapter, world, "key-1", body=b"{}")
    assert changed.status_code == 422
    assert world.count() == 1
    world.assert_clean()


@ADAPTERS
def test_duplicates_at_once_pay_once(world, add_view, adapter):
    add_view(world, wait=10)
    answers = send(adapter, world, *["key-1"] * 5)
    assert {each.status_code for each in answers} <= {201, 409}
    assert len({each.content for each in answers if each.status_code == 201}) == 1
    assert world.count() == 1
    world.assert_clean()
