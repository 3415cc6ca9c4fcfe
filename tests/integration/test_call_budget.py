"""What a request costs beyond the unprotected view, in function calls. Round trips: the file beside it.

The tables hold what the package takes now, so that nobody adds cost unnoticed. Lower them when you make
it cheaper; the goals are in ``bench/budgets.py``. ``make bench ARGS='--places "first, hybrid"'`` lists
where the calls go.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import cache

import pytest
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry

from bench.budgets import BASE
from bench.calls import count_calls
from bench.paths import Shops
from bench.run import STORES
from flask_idempotency.integrations.opentelemetry import instrument_app
from flask_idempotency.integrations.prometheus import export_metrics
from tests.drivers import EACH, with_driver

pytestmark = pytest.mark.usefixtures("nobody_listens")

CALLS = {
    "psycopg2": {
        "first, hybrid": 673,
        "first, postgres": 383,
        "replay, hybrid": 490,
        "replay, postgres": 349,
        "duplicate, hybrid": 403,
        "unprotected bare view": 45,
        "unprotected empty view": 31,
    },
    "psycopg": {
        "first, hybrid": 751,
        "first, postgres": 461,
        "replay, hybrid": 528,
        "replay, postgres": 461,
        "duplicate, hybrid": 403,
        "unprotected bare view": 45,
        "unprotected empty view": 31,
    },
}
"""Function calls, Python's and C's, by driver; psycopg is the one that is compiled."""

PARTS = {
    "first, hybrid": {"metrics": 17, "traces": 88},
    "replay, postgres": {"metrics": 17, "traces": 147},
    "duplicate, hybrid": {"metrics": 17, "traces": 64},
}
"""Those that ``export_metrics`` adds, which counts the outcome and its seconds, and ``instrument_app``,
where the span records and nobody else hears of outcomes: more than half are the SDK's."""

MARGIN = 1.03
"""Other releases of the packages below may make a few calls more."""

NEWER_PYTHON = 25 if sys.version_info >= (3, 12) else 0
"""Calls that ``inspect`` makes beyond 3.11's to tell Flask that our hook is a plain function: 8
in 3.12, 14 in 3.13."""


@pytest.fixture(scope="module")
def urls(postgres):
    return {name: postgres.database(f"budget_{name}") for name in STORES}


@pytest.fixture(scope="module")
def make_shops(urls, redis_server):
    """A function that gives the applications on a driver, with a part added; each is made once."""
    with ExitStack() as stack:

        @cache
        def make(driver, add=None):
            made = {name: with_driver(url, driver) for name, url in urls.items()}
            shops = Shops(made, redis_server.url)
            stack.callback(shops.close)
            for client in shops.clients.values():
                if add and "idempotency" in client.application.extensions:
                    add(client.application)
            return shops

        yield make


def count(shops, path):
    with shops.path(path) as send:
        return count_calls(send)


@EACH
@pytest.mark.parametrize("name", BASE)
def test_a_path_makes_no_more_function_calls(make_shops, driver, name):
    shops = make_shops(driver)
    added = count(shops, name) - count(shops, BASE[name])
    print(f"{name}: {added} function calls added")
    assert added <= CALLS[driver][name] * MARGIN + NEWER_PYTHON


ADD = {
    "metrics": lambda app: export_metrics(app, registry=CollectorRegistry()),
    "traces": instrument_app,
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("part", ADD)
def test_a_part_adds_no_more_function_calls(make_shops, driver, part, name):
    # Its signals cost those without it a little, too.
    shops, with_it = make_shops(driver), make_shops(driver, ADD[part])
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("request"):
        added = count(with_it, name) - count(shops, name)
    print(f"{name}: {added} function calls added by {part}")
    assert added <= PARTS[name][part] * MARGIN + NEWER_PYTHON
