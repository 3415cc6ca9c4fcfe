"""Flask-Idempotency itself."""

from __future__ import annotations

from typing import Any

from flask import request

from bench.peers.shop import Shop
from flask_idempotency import Idempotency, current_operation, idempotent


def protect(
    shop: Shop,
    _database_url: str,
    redis_url: str,
    *,
    store: str,
    atomic: bool = True,
    step: bool = False,
) -> None:
    """``store`` as in ``IDEMPOTENCY_STORE``; ``step`` pays in a step that commits with its record."""
    shop.app.config.update(
        IDEMPOTENCY_STORE=store,
        IDEMPOTENCY_REDIS_URL=None if store == "postgres" else redis_url,
        IDEMPOTENCY_REDIS_PREFIX="shop:",
    )
    Idempotency(shop.app, shop.db, scope=None)

    def in_a_step() -> Any:
        return current_operation.step("pay", shop.pay, request.get_json()["amount"], atomic=True), 201

    options: dict[str, Any] = {"on_interrupted": "retry"} if step else {}
    protected = idempotent(atomic=atomic, **options)(in_a_step if step else shop.view)
    shop.app.post("/payments", endpoint="payments")(protected)
