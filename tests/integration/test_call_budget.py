"""What a request costs beyond the unprotected view, in function calls. Round trips: the file beside it.

The tables hold what the package takes now, so that nobody adds cost unnoticed. Lower them when you make
it cheaper; the goals are in ``bench/budgets.py``. ``make bench ARGS='--places "first, hybrid"'`` lists
where the calls go.
"""

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
    "first, hybrid": {"psycopg2": 563, "psycopg": 696},
    "first, postgres": {"psycopg2": 380, "psycopg": 515},
    "replay, hybrid": {"psycopg2": 443, "psycopg": 473},
    "replay, postgres": {"psycopg2": 356, "psycopg": 424},
    "duplicate, hybrid": {"psycopg2": 364, "psycopg": 364},
    "unprotected bare view": {"psycopg2": 45, "psycopg": 45},
    "unprotected empty view": {"psycopg2": 31, "psycopg": 31},
}
"""Function calls, Python's and C's, by driver; psycopg is the one that is compiled."""

PARTS = {
    "first, hybrid": {"metrics": 17, "traces": 88},
    "replay, postgres": {"metrics": 17, "traces": 148},
    "duplicate, hybrid": {"metrics": 17, "traces": 64},
}
"""Those that ``export_metrics`` adds, which counts the outcome and its seconds, and ``instrument_app``,
where the span records and nobody else hears of outcomes: more than half are the SDK's."""

MARGIN = 1.03
"""Other releases of the packages below may make a few calls more."""

NEWER_PYTHON = 25 if sys.version_info >= (3, 12) else 0
"""Calls that ``inspect`` makes beyond 3.11's to tell Flask that our hook is a plain function: 8
in 3.12, 14 in 3.13."""


ADD = {
    "metrics": lambda app: export_metrics(app, registry=CollectorRegistry()),
    "traces": instrument_app,
}


@pytest.fixture(scope="module")
def make_shops(postgres, redis_server):
    """A function that gives the applications on a driver, with a part added; each is made once."""
    urls = {name: postgres.database(f"budget_{name}") for name in STORES}
    with ExitStack() as stack:

        @cache
        def make(driver, part=None):
            made = {name: with_driver(url, driver) for name, url in urls.items()}
            shops = Shops(made, redis_server.url)
            stack.callback(shops.close)
            for client in shops.clients.values():
                if part and "idempotency" in client.application.extensions:
                    ADD[part](client.application)
            return shops

        yield make


def count(shops, path):
    with shops.path(path) as send:
        return count_calls(send)


@EACH
def test_a_path_makes_no_more_function_calls(make_shops, driver):
    shops = make_shops(driver)
    bases = {name: count(shops, name) for name in {*BASE.values()}}
    added = {name: count(shops, name) - bases[base] for name, base in BASE.items()}
    print(f"function calls added: {added}")
    most = {name: calls[driver] * MARGIN + NEWER_PYTHON for name, calls in CALLS.items()}
    assert [name for name in added if added[name] > most[name]] == []


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("part", ADD)
def test_a_part_adds_no_more_function_calls(make_shops, driver, part, name):
    # Its signals cost those without it a little, too.
    shops, with_it = make_shops(driver), make_shops(driver, part)
    with TracerProvider().get_tracer("test").start_as_current_span("request"):
        added = count(with_it, name) - count(shops, name)
    print(f"{name}: {added} function calls added by {part}")
    assert added <= PARTS[name][part] * MARGIN + NEWER_PYTHON
