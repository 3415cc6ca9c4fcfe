"""A view that gunicorn's time-out ends inside a statement: the retry books once, charged once."""

from __future__ import annotations

import http.client
import json
import os
from contextlib import suppress
from typing import Any

import pytest

from laboratory import running
from tests.drivers import ways
from tests.exits import shop
from tests.integration.apps import gunicorn_conf
from tests.waiting import wait_until

# SystemExit can come between many statements; in psycopg2's one, SIGKILL comes a second later.
SLEEPS = {"many statements": (0.05, 1000), "one statement": (30, 1)}
CONFIG = ("--config", gunicorn_conf.__file__, "--workers", "1", "--timeout", "1")


@ways("sleep", SLEEPS)
@pytest.mark.parametrize("kind", ["atomic", "leased"])
def test_the_time_out_of_gunicorn(database, monkeypatch, kind, sleep):
    monkeypatch.setenv("LEASE", "2")  # for a worker that was killed in psycopg2's one statement
    seconds, times = sleep

    with running.gunicorn("tests.exits.shop:create_app()", os.environ, *CONFIG) as (url, _):

        def post(**headers: str) -> Any:
            return running.send(url, "POST", f"/{kind}", {"Idempotency-Key": "order-1", **headers})

        with suppress(OSError, http.client.HTTPException):  # no response at all is as good
            assert post(**{"X-Seconds": str(seconds), "X-Times": str(times)}).status == 500
        assert shop.done() == {"payments": 0, "charges": int(kind == "leased")}
        told: list[Any] = []
        wait_until(lambda: told.append(post()) or told[-1].status != 409, "the retry has a response")
        retry, again = told[-1], post()
        assert (retry.status, json.loads(retry.body)) == (201, {"attempt": 2})
        assert (again.headers["Idempotent-Replayed"], again.body) == ("true", retry.body)
        assert shop.done() == {"payments": 1, "charges": int(kind == "leased")}
        assert running.send(url, "POST", "/plain", {}).status == 201
