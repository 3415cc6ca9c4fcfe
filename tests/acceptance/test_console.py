"""The operator's page of the example, under gunicorn with its two workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import requests

from laboratory import running
from tests.acceptance.conftest import Shop
from tests.waiting import wait_until

COUNTED = "SELECT coalesce(sum(count), 0) FROM idempotency_record_count"
SETTINGS = {"SECRET_KEY": "secret", "OPERATOR_PASSWORD": "sesame"}


@pytest.fixture(scope="module")
def shop(open_shop: Callable[..., Shop]) -> Shop:
    return open_shop(**SETTINGS)


def look(shop: Shop, password: str = SETTINGS["OPERATOR_PASSWORD"]) -> requests.Response:
    return requests.get(f"{shop.url}/operations/", auth=("ada", password), timeout=30)


def test_the_operator_sees_what_the_workers_did(shop: Shop, key: str) -> None:
    """Each worker writes within ten seconds, whichever of them serves the page."""
    before = shop.sql(COUNTED)
    for number in range(8):
        shop.pay(f"{key}-{number}")
    wait_until(lambda: shop.sql(COUNTED) == before + 8, "all workers have written")
    assert "payments.pay" in look(shop).text


def test_only_an_operator_gets_in(shop: Shop) -> None:
    assert look(shop).status_code == 200
    for refused in look(shop, "wrong"), look(shop, ""), shop.call("GET", "/operations/"):
        assert refused.status_code == 401
        assert refused.headers["WWW-Authenticate"].startswith("Basic ")


def test_without_a_password_nobody_is_an_operator(open_shop: Callable[..., Shop]) -> None:
    shop = open_shop(SECRET_KEY="secret")
    for password in "", "None", "sesame":
        assert look(shop, password).status_code == 401


@pytest.mark.parametrize("kind", ["gthread", "gevent", "sync"])
def test_workers_write_what_they_have_counted_when_they_stop(postgres: Any, kind: str) -> None:
    database_url = postgres.database(f"console_at_exit_{kind}")
    running.make_tables(database_url)
    environment = {"DATABASE_URL": database_url, "REDIS_URL": "", **SETTINGS}
    with running.gunicorn("example:create_app()", environment, "-k", kind) as (url, _):
        shop = Shop(url, database_url)
        for number in range(8):
            assert shop.pay(f"key-{number}").status_code == 201
    assert shop.sql(COUNTED) == 8
