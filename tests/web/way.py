"""Shops on each of two stores, for the tests of a request's way."""

import logging
from functools import wraps

import pytest

from flask_idempotency.session import stray
from tests.log import ours

STORES = pytest.mark.parametrize("store", ["postgres", "sql"], indirect=True)
KINDS = pytest.mark.parametrize("atomic", [True, False])


class Refused(Exception):
    """An error of the application."""


def fail(*_):
    raise Refused


def around(call):
    """A decorator: ``call`` gets the view, without arguments."""
    return lambda view: wraps(view)(lambda *args, **kwargs: call(lambda: view(*args, **kwargs)))


def is_replayed(response):
    return response.headers.get("Idempotent-Replayed") == "true"


def undone(caplog):
    """The warnings that something committed is not there."""
    texts = [line.getMessage() for line in ours(caplog) if line.levelno == logging.WARNING]
    return [text for text in texts if "undone" in text]


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
