"""AWS Lambda Powertools: ``idempotent_function`` with its cache layer, called in the view."""

from __future__ import annotations

from typing import Any

import redis
from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function
from aws_lambda_powertools.utilities.idempotency.exceptions import (
    IdempotencyAlreadyInProgressError,
    IdempotencyValidationError,
)
from aws_lambda_powertools.utilities.idempotency.persistence.cache import CachePersistenceLayer
from flask import request
from flask.typing import ResponseReturnValue

from bench.peers.shop import Shop


def protect(
    shop: Shop, _database_url: str, redis_url: str, *, validate: bool = True, local_cache: bool = False
) -> None:
    """The header is the key; with ``validate`` the amount must be the same again."""
    client = redis.Redis.from_url(redis_url, decode_responses=True)
    config = IdempotencyConfig(
        event_key_jmespath="key",
        payload_validation_jmespath="amount" if validate else "",
        raise_on_no_idempotency_key=True,
        use_local_cache=local_cache,
    )

    @idempotent_function(
        data_keyword_argument="order",
        config=config,
        persistence_store=CachePersistenceLayer(client=client),
    )
    def pay(order: dict[str, Any]) -> dict[str, Any]:
        return shop.pay(order["amount"])

    @shop.app.post("/payments", endpoint="payments")
    def view() -> ResponseReturnValue:
        key = request.headers["Idempotency-Key"]
        return pay(order={"key": key, "amount": request.get_json()["amount"]}), 201

    shop.app.register_error_handler(IdempotencyValidationError, lambda error: ({}, 422))
    shop.app.register_error_handler(IdempotencyAlreadyInProgressError, lambda error: ({}, 409))
