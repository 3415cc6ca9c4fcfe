"""The operator's page of the example, under gunicorn with its two workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import requests

from tests.acceptance.conftest import Shop

SETTINGS = {"SECRET_KEY": "secret", "OPERATOR_PASSWORD": "sesame"}


@pytest.fixture(scope="module")
def shop(open_shop: Callable[..., Shop]) -> Shop:
    return open_shop(**SETTINGS)


def look(shop: Shop, password: str = SETTINGS["OPERATOR_PASSWORD"]) -> requests.Response:
    return requests.get(f"{shop.url}/operations/", auth=("ada", password), timeout=30)


def test_only_an_operator_gets_in(shop: Shop) -> None:
    assert look(shop).status_code == 200
    for refused in look(shop, "wrong"), look(shop, ""), shop.call("GET", "/operations/"):
        assert refused.status_code == 401
        assert refused.headers["WWW-Authenticate"].startswith("Basic ")


def test_without_a_password_nobody_is_an_operator(open_shop: Callable[..., Shop]) -> None:
    shop = open_shop(SECRET_KEY="secret")
    for password in "", "None", "sesame":
        assert look(shop, password).status_code == 401
