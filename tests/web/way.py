"""Shops on each of two stores, and what the parts of an application do with a request, in words."""

import logging
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import pytest
from flask import abort, after_this_request, request

from flask_idempotency.session import stray
from tests.log import ours

STORES = pytest.mark.parametrize("store", ["postgres", "sql"], indirect=True)
KINDS = pytest.mark.parametrize("atomic", [True, False])

VIEW, ABOVE, HANDLER, AFTER = 1, 2, 3, 4
"""Who has written a row: its amount."""


class Refused(Exception):
    """An error of the application."""


class OutOfTime(BaseException):
    """As gevent's Timeout is: no Exception."""


ERRORS = {"refuse": Refused, "divide": ZeroDivisionError, "exit": SystemExit, "run out": OutOfTime}


@dataclass
class Way:
    """What the view does, the decorator above it, the error handler, and a function after the request.

    Words in order: ``write`` a row, ``buy`` (write and commit), what the session can do, ``close`` the
    request, raise an error, or a status. One with ``!`` is for the first time alone.
    """

    view: str
    above: str = ""
    catches: str = ""  # the errors of the view, and "responds" or raises "another"
    handler: Any = None
    handling: str = ""
    status: int = 409
    after: str = ""


def write(shop, who):
    shop.db.session.add(shop.Payment(amount=who))


def buy(shop, who):
    write(shop, who)
    shop.db.session.commit()


WORDS = {
    "write": write,
    "buy": buy,
    "close": lambda _shop, _who: request.close(),
    "commit": lambda shop, _who: shop.db.session.commit(),
    "rollback": lambda shop, _who: shop.db.session.rollback(),
    "remove": lambda shop, _who: shop.db.session.remove(),
}


def do(shop, words, who, response=None):
    done = shop.__dict__.setdefault("done", set())
    for told in filter(None, words.split(", ")):
        word = told.rstrip("!")
        if word != told and (who, told) in done:
            continue
        done.add((who, told))
        if word in ERRORS:
            raise ERRORS[word]
        if word in WORDS:
            WORDS[word](shop, who)
        elif response is None:
            abort(int(word))
        else:
            response.status_code = int(word)


def mark(marks, response):
    marks.append(1)
    response.headers["X-Mark"] = str(len(marks))
    return response


def build(shop, way, protect):
    """Register what the way says; the lists of the view's runs, and of what it registered."""
    runs, marks = [], []

    def pay():
        runs.append(1)
        after_this_request(partial(mark, marks))
        do(shop, way.view, VIEW)
        return {"run": len(runs)}, 201

    def decorator(view):
        try:
            response = view()
        except Exception as error:
            if way.catches == "another":
                raise Refused from error
            if way.catches != "responds":
                raise
            shop.db.session.rollback()
            response = {"caught": True}
        do(shop, way.above, ABOVE)
        return response

    def handle(_error):
        do(shop, way.handling, HANDLER)
        return {"handled": True}, way.status, {"Access-Control-Allow-Origin": "https://shop.example"}

    @shop.app.after_request
    def after(response):
        if not is_replayed(response):
            do(shop, way.after, AFTER, response)
        return response

    shop.app.add_url_rule("/payments", "pay", around(decorator)(protect(pay)), methods=["POST"])
    if way.handler is not None:
        shop.app.register_error_handler(way.handler, handle)
    return runs, marks


def rows(shop):
    """Who has written the rows that are there, in order."""
    return "".join(str(who) for (who,) in shop.sql("select amount from payment order by amount"))


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
