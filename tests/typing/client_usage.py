"""Typed usage of ``flask_idempotency.client``: mypy checks it, nobody runs it."""

from __future__ import annotations

import httpx
import requests
from typing_extensions import assert_type

from flask_idempotency.client import IdempotentSession, IdempotentTransport, derive_key, new_key

assert_type(new_key(), str)
assert_type(derive_key("create-payment", {"order": 7, "lines": [1, None]}), str)

session = IdempotentSession()
session.deadline, session.timeout, session.header = 20, (3, 30), "X-Key"
session.post("https://api.example.com/", headers={"Idempotency-Key": new_key()})
session.mount("https://", requests.adapters.HTTPAdapter(pool_maxsize=50))
plain: requests.Session = session

transport = IdempotentTransport(httpx.HTTPTransport(proxy="http://proxy.example.com"))
transport.deadline = 20
assert_type(httpx.Client(transport=transport).post("https://api.example.com/"), httpx.Response)
asynchronous = httpx.AsyncClient(transport=IdempotentTransport(httpx.AsyncHTTPTransport()))
