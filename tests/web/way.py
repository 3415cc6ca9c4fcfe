"""Shops on each of two stores, for the tests of a request's way."""

import pytest

from flask_idempotency.session import stray

STORES = pytest.mark.parametrize("store", ["postgres", "sql"], indirect=True)
KINDS = pytest.mark.parametrize("atomic", [True, False])


@pytest.fixture(autouse=True)
def nobody_was_warned():
    stray.warn_once.cache_clear()


@pytest.fixture
def make_shop(make_world, store, tmp_path):
    def make(**config):
        if store == "sql":
            config.setdefault("SQLALCHEMY_DATABASE_URI", f"sqlite:///{tmp_path}/shop.db")
        return make_world(**config)

    return make
