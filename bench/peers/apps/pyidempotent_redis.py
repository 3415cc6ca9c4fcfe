"""pyidempotent: its decorator on a plain function, called in the view."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import redis.asyncio
from flask import request
from flask.typing import ResponseReturnValue
from pyidempotent import IdempotencyConflict, IdempotencyProcessing, idempotent
from pyidempotent.backends.redis import RedisBackend

from bench.peers.shop import Shop


def protect(shop: Shop, _database_url: str, redis_url: str, *, kept_loop: bool = False) -> None:
    """``kept_loop``: the function is a coroutine, and each thread has an event loop and a client."""
    pay = _on_a_loop(shop, redis_url) if kept_loop else _plain(shop, redis_url)

    @shop.app.post("/payments", endpoint="payments")
    def view() -> ResponseReturnValue:
        return pay(request, request.get_json()["amount"]), 201

    shop.app.register_error_handler(IdempotencyConflict, lambda error: ({}, 422))
    shop.app.register_error_handler(IdempotencyProcessing, lambda error: ({}, 409))


def _plain(shop: Shop, redis_url: str) -> Any:
    @idempotent(backend=RedisBackend(redis.asyncio.from_url(redis_url)))
    def pay(_request: Any, amount: int) -> dict[str, Any]:  # it finds the key in what has headers
        return shop.pay(amount)

    return pay


def _on_a_loop(shop: Shop, redis_url: str) -> Any:
    class Kept(threading.local):
        def __init__(self) -> None:
            self.loop = asyncio.new_event_loop()
            self.pay = idempotent(backend=RedisBackend(redis.asyncio.from_url(redis_url)))(pay)

    async def pay(_request: Any, amount: int) -> dict[str, Any]:
        return shop.pay(amount)

    kept = Kept()
    return lambda *given: kept.loop.run_until_complete(kept.pay(*given))
