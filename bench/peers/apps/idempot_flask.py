"""idempot: its decorator for Flask."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import idempot
from flask import Response, make_response, request
from idempot.contrib.flask import idempotent
from idempot.models import StoredResponse

from bench.peers.shop import Shop


def protect(shop: Shop, _database_url: str, redis_url: str, *, kept_loop: bool = False) -> None:
    """``kept_loop``: not its decorator for Flask but the one for any framework, on one event loop."""
    # It stores 200 alone unless told otherwise.
    idempot.configure(backend="redis", redis_url=redis_url, cache_on_status=[200, 201])
    shop.app.post("/payments", endpoint="payments")(_on_a_loop(shop) if kept_loop else _in_flask(shop))


def _in_flask(shop: Shop) -> Any:
    @idempotent(required=True)
    def pay() -> Response:
        return make_response(shop.view())  # it takes no tuple with a dictionary

    return pay


def _on_a_loop(shop: Shop) -> Any:
    loop = asyncio.new_event_loop()

    @idempot.idempotent(required=True)
    async def pay(amount: int) -> StoredResponse:
        body = json.dumps(shop.pay(amount)).encode()
        return StoredResponse(201, {"Content-Type": "application/json"}, body)

    def view() -> Response:
        key, amount = request.headers["Idempotency-Key"], request.get_json()["amount"]
        stored = loop.run_until_complete(pay(idempotency_key=key, amount=amount))
        return Response(stored.body, stored.status_code, stored.headers)

    return view
