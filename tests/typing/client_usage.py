"""Typed usage of ``flask_idempotency.client``: mypy checks it, nobody runs it."""

from __future__ import annotations

import httpx
import requests
from typing_extensions import assert_type

from flask_idempotency.client import (
    AsyncIdempotentClient,
    AsyncIdempotentTransport,
    IdempotentAdapter,
    IdempotentClient,
    IdempotentSession,
    IdempotentTransport,
    Retry,
    RetryBudget,
    RetryPolicy,
    attempts_of,
    derive_key,
    limit_retries,
    new_key,
    was_replayed,
)

assert_type(new_key(), str)
assert_type(derive_key("create-payment", {"order": 7, "lines": [1, None]}), str)

policy = RetryPolicy(retries=3, deadline=20, backoff=0.1)
session: requests.Session = IdempotentSession(policy, timeout=5)
response = session.post("https://api.example.com/", headers={"Idempotency-Key": new_key()})
assert_type(was_replayed(response), bool)
session.mount("https://", requests.adapters.HTTPAdapter(pool_maxsize=50))
requests.Session().mount("https://", IdempotentAdapter(requests.adapters.HTTPAdapter(), policy=policy))

client: httpx.Client = IdempotentClient(policy=policy, proxy="http://proxy.example.com", timeout=5)
client = httpx.Client(transport=IdempotentTransport(httpx.HTTPTransport(retries=1), policy=policy))
assert_type(was_replayed(client.post("https://api.example.com/")), bool)
asynchronous: httpx.AsyncClient = AsyncIdempotentClient(policy=policy)
asynchronous = httpx.AsyncClient(transport=AsyncIdempotentTransport(policy=policy))


def note(retry: Retry) -> None:
    assert_type((retry.attempt, retry.status), tuple[int, int | None])


shared = RetryPolicy(methods={"PUT"}, budget=RetryBudget(50), on_retry=note)
assert_type(IdempotentSession(shared).with_policy(policy), IdempotentSession)
client.post("https://api.example.com/", extensions={"retry_policy": policy})
assert_type(attempts_of(response), int)
with limit_retries(2):
    try:
        session.post("https://api.example.com/")
    except requests.RequestException as error:
        attempts_of(error)
    try:
        client.post("https://api.example.com/")
    except httpx.TransportError as error:
        attempts_of(error)
