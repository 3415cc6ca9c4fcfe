"""What is stored becomes older when a test says so, on every SQL store."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import pytest

from flask_idempotency import ConfigurationError, current_operation
from flask_idempotency.cli import cli
from flask_idempotency.testing import age
from tests.contract.test_requests import shop, store  # noqa: F401 -- fixtures
from tests.killed import Killed

SQL_STORES = pytest.mark.parametrize("store", ["hybrid", "postgres", "sql"], indirect=True)


def paying(shop, **options):  # noqa: F811
    """The numbers of the runs of its view."""
    runs = []

    def view():
        runs.append(current_operation.attempt)
        shop.pay()
        return {}, 201

    shop.view(view, **options)
    return runs


@SQL_STORES
def test_a_key_is_forgotten_when_its_retention_is_over(shop):  # noqa: F811
    runs = paying(shop, ttl=3600)
    shop.post()
    age(shop.app, timedelta(minutes=59))
    assert "Idempotent-Replayed" in shop.post().headers
    age(shop.app, 61)
    assert "Idempotent-Replayed" not in shop.post().headers
    assert runs == [1, 1]
    assert shop.count() == 2


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


@SQL_STORES
def test_an_operator_sees_how_old_it_is(shop):  # noqa: F811
    def die():
        raise Killed

    shop.view(die, atomic=False)
    with pytest.raises(Killed):
        shop.post()
    age(shop.app, 7200)
    output = shop.app.test_cli_runner().invoke(cli, ["list", "--json"]).output
    (line,) = json.loads(output)
    assert line["state"] == "interrupted"
    began = datetime.fromisoformat(line["created"])
    assert timedelta(hours=2) <= datetime.now(timezone.utc) - began < timedelta(hours=3)
    assert shop.post().status_code == 409, "what is interrupted does not expire"


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


@pytest.mark.parametrize("store", ["redis"], indirect=True)
def test_redis_is_refused(shop):  # noqa: F811
    with pytest.raises(ConfigurationError, match="test with the store 'sql'"):
        age(shop.app, 60)
