"""What is stored becomes older when a test says so, on every SQL store."""

from __future__ import annotations

from datetime import timedelta

import pytest

from flask_idempotency import ConfigurationError, current_operation
from flask_idempotency.testing import age
from tests.contract.test_requests import shop, store  # noqa: F401 -- fixtures

SQL_STORES = pytest.mark.parametrize("store", ["hybrid", "postgres", "sql"], indirect=True)


@SQL_STORES
def test_a_key_is_forgotten_when_its_retention_is_over(shop):  # noqa: F811
    shop.view(lambda: (shop.pay(), ({}, 201))[1], ttl=3600, max_attempts=1)
    shop.post()
    age(shop.app, timedelta(minutes=59))
    assert "Idempotent-Replayed" in shop.post().headers
    age(shop.app, 61)
    assert "Idempotent-Replayed" not in shop.post().headers
    age(shop.app, 3601)
    assert shop.post(json={"changed": True}).status_code == 201, "it is as new"
    assert shop.count() == 3


@SQL_STORES
def test_a_lease_is_over_and_the_next_attempt_takes_over(shop):  # noqa: F811
    inner = []

    def view():
        if current_operation.attempt == 1:
            inner.append(shop.post().status_code)
            age(shop.app, 61)
            inner.append(shop.post().status_code)
        return {}, 201

    shop.view(view, atomic=False, on_interrupted="retry", lease=60)
    assert shop.post().status_code == 409, "it was taken over"
    assert inner == [409, 201]


@pytest.mark.parametrize("store", ["hybrid", "postgres"], indirect=True)
def test_what_runs_just_now_is_not_waited_for(shop):  # noqa: F811
    def view():
        age(shop.app, 3600)
        shop.pay()
        return {}, 201

    shop.view(view, ttl=60)
    assert shop.post().status_code == 201
    assert shop.post().headers["Idempotent-Replayed"] == "true"
    assert shop.count() == 1


@pytest.mark.parametrize(
    ("store", "seconds", "error", "said"),
    [("redis", 60, ConfigurationError, "the store 'sql'"), ("sql", -1, ValueError, "not younger")],
    indirect=["store"],
)
def test_what_cannot_be_is_refused(shop, seconds, error, said):  # noqa: F811
    with pytest.raises(error, match=said):
        age(shop.app, seconds)
