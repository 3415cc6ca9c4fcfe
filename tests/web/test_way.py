"""The way of a request: where its operation ends, whatever the application does above its view.

Random ways: the programs of ``tests/differential``.
"""

import logging
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any

import flask_restful
import flask_restx
import pytest
import sqlalchemy as sa
from flask import abort, after_this_request, request
from werkzeug.exceptions import HTTPException, UnprocessableEntity

from flask_idempotency import (
    IdempotencyError,
    NotAtomic,
    TransactionConflict,
    current_operation,
    idempotent,
)
from tests.log import ours, undone
from tests.stores import on_sqlite
from tests.web.conftest import add, is_replayed

STORES = pytest.mark.parametrize("store", ["postgres", "sql"], indirect=True)
ON_SQLITE = pytest.mark.parametrize("store", ["sql"], indirect=True)
KINDS = pytest.mark.parametrize("atomic", [True, False])


class Refused(Exception):
    pass


class OutOfTime(BaseException):
    """As gevent's Timeout is: no Exception."""


def write(shop, who=5):
    shop.db.session.add(shop.Payment(amount=who))


def buy(shop, who=5):
    write(shop, who)
    shop.db.session.commit()


def rows(shop):
    """Who has written the rows that are there, in order."""
    return "".join(str(who) for (who,) in shop.sql("select amount from payment order by amount"))


@pytest.fixture
def make_shop(make_world, store):
    def make(**config):
        return make_world(**(on_sqlite(make_world) if store == "sql" else {}), **config)

    return make


@pytest.fixture
def shop(make_shop):
    return make_shop()


VIEW, ABOVE, HANDLER, AFTER = 1, 2, 3, 4
"""Who has written a row: its amount."""

ERRORS = {"refuse": Refused, "exit": SystemExit, "run out": OutOfTime}
WORDS = {
    "write": write,
    "buy": buy,
    "close": lambda _shop, _who: request.close(),
    "commit": lambda shop, _who: shop.db.session.commit(),
    "rollback": lambda shop, _who: shop.db.session.rollback(),
    "remove": lambda shop, _who: shop.db.session.remove(),
}


@dataclass
class Way:
    """What the view does, the decorator above it, the error handler, and a function after the request.

    Words in order: ``write`` a row, ``buy`` (write and commit), what the session can do, ``close`` the
    request, raise an error, or a status. One with ``!`` is for the first time alone.
    """

    view: str
    above: str = ""
    handler: Any = None
    handling: str = ""
    status: int = 409
    after: str = ""


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


def build(shop, way, **options):
    """Register what the way says; the lists of the view's runs, and of what it registered."""
    runs, marks = [], []

    def mark(response):
        marks.append(1)
        response.headers["X-Mark"] = str(len(marks))
        return response

    @idempotent(**options)
    def pay():
        runs.append(1)
        after_this_request(mark)
        do(shop, way.view, VIEW)
        return {"run": len(runs)}, 201

    @wraps(pay)
    def above():
        response = pay()
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

    shop.app.add_url_rule("/payments", "pay", above, methods=["POST"])
    if way.handler is not None:
        shop.app.register_error_handler(way.handler, handle)
    return runs, marks


def sent(shop):
    """What comes of a request: its status and whether it is a replay, or the error."""
    try:
        response = shop.post()
    except (Refused, ZeroDivisionError, SystemExit, OutOfTime) as error:
        return type(error)
    shop.__dict__.setdefault("responses", []).append(response)
    return f"{response.status_code}{' again' if is_replayed(response) else ''}"


# What comes of the first request and of its retry, and whose rows there are then.
WAYS = {
    # What the view has committed stays, whatever comes above.
    "a rollback after the request": (Way("buy", after="rollback"), "201", "201 again", "1"),
    "no session after the request": (Way("buy", after="remove"), "201", "201 again", "1"),
    "an error after the request": (Way("buy", after="refuse"), "500", "201 again", "1"),
    "an error above": (Way("buy", above="refuse!"), "500", "201 again", "1"),
    "an exit above": (Way("buy", above="exit!"), SystemExit, "201 again", "1"),
    # So does what goes with the response that the application makes of an error.
    **{
        f"an error that is handled, then {after or 'nothing'}": (
            Way("buy, refuse", handler=Refused, after=after),
            "500" if after == "refuse" else "409",
            "409 again",
            "1",
        )
        for after in ("", "rollback", "remove", "close", "refuse")
    },
    "an abort": (Way("buy, 410"), "410", "410 again", "1"),
    "an abort that is handled": (Way("buy, 410", handler=HTTPException), "409", "409 again", "1"),
    "handled by all": (Way("buy, refuse", handler=Exception), "409", "409 again", "1"),
    "handled as 500": (Way("buy, refuse", handler=500), "409", "409 again", "1"),
    "handled as success": (Way("buy, 410", handler=410, status=200), "200", "200 again", "1"),
    "what is left beside an error": (Way("write, refuse", handler=Refused), "409", "409 again", ""),
    # What the view left for a commit above it.
    "committed above": (Way("write", above="commit!"), "201", "201 again", "1"),
    # An exit leaves no lock: the retry runs.
    "an exit in the view": (Way("write, exit!, commit"), SystemExit, "201", "1"),
    "a time-out in the view": (Way("write, run out!, commit"), OutOfTime, "201", "1"),
    "an exit before a commit above": (Way("write", above="exit!, commit"), SystemExit, "201", "1"),
}
AUDITED = Way("write, 403", after="buy")
SWALLOWED = Way("buy, refuse", handler=500, handling="write", status=200)
ATOMIC_WAYS = {
    "an error before a commit above": (Way("write", above="refuse!, commit"), "500", "201", "1"),
    # What is not stored is rolled back before any function after the request: its audit stays.
    "an audit of a rejection": (AUDITED, "403", "403", "44"),
    # Flask swallows errors of functions after a request while it handles another error.
    "nobody commits in a handler": (SWALLOWED, "500", "500", ""),
    # As without the extension: a committed row is beyond what comes above, the rest goes.
    "all is rolled back": (Way("write", after="rollback, 409"), "409", "409", ""),
    "all is rejected": (Way("write", after="409"), "409", "409", ""),
    "the rest is rolled back": (Way("buy, write", after="rollback, 409"), "409", "201 again", "1"),
    "the rest is rejected": (Way("buy, write", after="409"), "409", "201 again", "1"),
}


@pytest.mark.parametrize(
    ("store", "atomic", "way", "first", "again", "left"),
    [
        pytest.param(store, atomic, *row, id=f"{name}, {'atomic' if atomic else 'leased'}, {store}")
        for store, atomic, more in (
            ("postgres", True, ATOMIC_WAYS),
            ("sql", True, ATOMIC_WAYS),
            ("postgres", False, {}),
        )
        for name, row in {**WAYS, **more}.items()
    ],
    indirect=["store"],
)
def test_what_the_view_committed_is_stored_and_stays(shop, atomic, way, first, again, left, caplog):
    """After an error in a function after the request, Flask calls once more what a view registered.

    The response is stored with what that has changed, and without headers for one origin.
    """
    runs, marks = build(shop, way, **({} if atomic else {"atomic": False, "on_interrupted": "retry"}))
    assert (sent(shop), sent(shop), rows(shop)) == (first, again, left)
    assert len(runs) == (1 if "again" in again else 2)
    assert len(marks) <= len(runs)
    if again == f"{first} again":
        made, replay = shop.responses
        assert (replay.data, replay.headers["X-Mark"]) == (made.data, "1")
        assert "Access-Control-Allow-Origin" not in replay.headers
    if shop.store != "sql":
        shop.assert_clean()
    if way.view == "write, refuse":
        assert len(undone(caplog)) == (0 if atomic else 1)


@STORES
@KINDS
@pytest.mark.parametrize("config", [{}, {"TESTING": True}, {"PROPAGATE_EXCEPTIONS": True}], ids=str)
@pytest.mark.parametrize("view", ["buy, refuse", "write, refuse"])
def test_an_error_that_nobody_handles_is_rolled_back_or_stored_as_failed(
    make_shop, atomic, config, view, caplog
):
    """Where the application makes no response of it, the request's end does that, and says it once."""
    shop, is_committed = make_shop(**config), view == "buy, refuse"
    runs, _ = build(shop, Way(view), atomic=atomic)
    first = Refused if config else "500"
    assert [sent(shop) for _ in range(3)] == [first, *([first] * 2 if atomic else ["500 again"] * 2)]
    assert (len(runs), rows(shop)) == ((3, "") if atomic else (1, "1" if is_committed else ""))
    if atomic and config:
        assert len(undone(caplog)) == is_committed


@STORES
@KINDS
def test_a_second_function_of_one_request_is_refused(shop, atomic, caplog):
    """An attempt never takes the response of another: what tries again stands below."""

    @idempotent(name="first", atomic=atomic)
    def first():
        buy(shop)
        raise Refused

    def both():
        with suppress(Refused):
            first()
        return idempotent(name="second", atomic=atomic)(lambda: buy(shop) or "")()

    shop.app.register_error_handler(Exception, lambda error: (str(error), 400))
    shop.app.add_url_rule("/payments", "pay", both, methods=["POST"])
    assert "what tries again do so below @idempotent" in shop.post().text
    shop.post()
    assert [each.status for each in shop.records() if each.status] == ([] if atomic else [500])
    assert shop.count() == (0 if atomic else 1)
    said = [line.getMessage() for line in ours(caplog, logging.ERROR)]
    assert len([text for text in said if "a second idempotent function" in text]) == 1


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_a_problem_at_the_end_is_written_in_place(shop, assert_problem):
    """The application's CORS headers stay, the view's own go."""

    @shop.app.after_request
    def commit(response):
        response.headers["Access-Control-Allow-Origin"] = "https://one.example"
        if response.status_code == 201:
            shop.db.session.commit()
            pid = shop.db.session.scalar(sa.text("SELECT pg_backend_pid()"))
            shop.sql("SELECT pg_terminate_backend(:pid)", pid=pid)
        return response

    location = {"X-View": "own", "Location": "/payments/1"}
    add(shop, lambda: write(shop) or ({"own": True}, 201, location))
    refused = shop.post()
    assert_problem(refused, 503, "store-unavailable", retry=True)
    assert refused.headers["Access-Control-Allow-Origin"] == "https://one.example"
    assert not location.keys() & set(refused.headers.keys())
    assert shop.count() == 0


def streams(shop):
    yield buy(shop) or "one"
    raise Refused


@STORES
@KINDS
@pytest.mark.parametrize("view", [streams, buy], ids=["a stream that fails", "no response"])
def test_what_fails_after_the_view_is_an_error_of_the_view(shop, assert_replayed, atomic, view):
    for error in Refused, TypeError:
        shop.app.register_error_handler(error, lambda _error: ({"refused": True}, 409))
    add(shop, lambda: view(shop), atomic=atomic)
    first = shop.post()
    assert (first.status_code, first.json, shop.count()) == (409, {"refused": True}, 1)
    assert_replayed(first, shop.post())


# Mistakes of the application: nothing is lost in silence, whatever handlers there are.


def no_json(_shop):
    current_operation.step("a", object)


def open_work(shop):
    write(shop)
    shop.db.session.flush()
    current_operation.step("a", int, atomic=True)


def run_inside(shop):
    shop.idempotency.run("k", int, scope=None, name="inner")


MISTAKES = {
    "nobody committed": (write, {}),
    "Put @idempotent below": (dict, None),
    "not JSON": (no_json, {"atomic": False}),
    "db.session held changes": (open_work, {"atomic": False}),
    "run() was called inside": (run_inside, {}),
}


@ON_SQLITE
@pytest.mark.parametrize("handler", [None, "the view", Exception, 500, IdempotencyError, NotAtomic])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_logged_once_whoever_handles_it(shop, handler, mistake, caplog):
    does, options = MISTAKES[mistake]

    def pay():
        with suppress(*[IdempotencyError] if handler == "the view" else []):
            does(shop)
        return {}, 201

    if handler not in (None, "the view"):

        async def handle(_error):
            return {"sorry": True}, 500

        shop.app.register_error_handler(handler, handle)
    if options is None:
        shop.app.add_url_rule("/payments", "pay", pay, methods=["POST"])
        idempotent(pay)
    else:
        add(shop, pay, **options)
    statuses = {shop.post().status_code for _ in range(3)}
    assert statuses == {500} or (handler == "the view" and statuses == {201})
    assert shop.count() == 0
    said = [line.getMessage() for line in ours(caplog, logging.ERROR) if mistake in line.getMessage()]
    assert len(said) == len(set(said)) > 0, said  # run() has a name of its own


# Frameworks make responses of errors in ways of their own.


def fail(_package, error=Refused):
    raise error


def invalid(_package):
    """As webargs and flask-smorest raise what marshmallow has found."""
    error = UnprocessableEntity()
    error.data = {"messages": {"json": {"amount": ["Not a number."]}}}
    raise error


# What the views of each end with. All but Flask-RESTful have a handler for an error.
FRAMEWORKS = {"restful": flask_restful, "restx": flask_restx}
ENDS = {
    "returns": (lambda _package: {}, 200),
    "aborts": (lambda package: package.abort(409, message="no", number=7), 409),
    "rejects": (lambda package: package.abort(403), 403),
    "is invalid": (invalid, 422),
    "lacks a field": (lambda _package: request.form["missing"], 400),
    "is handled": (fail, 409),
    "fails": (lambda _package: 1 // 0, 500),
}


@ON_SQLITE
@KINDS
@pytest.mark.parametrize("package", FRAMEWORKS.values(), ids=FRAMEWORKS)
@pytest.mark.parametrize(("ends", "status"), ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("propagates", [False, True])
def test_what_a_framework_makes_of_the_views_end_is_stored_or_undoes_it(
    make_shop, assert_problem, package, atomic, ends, status, propagates, caplog
):
    shop = make_shop(PROPAGATE_EXCEPTIONS=propagates)
    api = package.Api(shop.app)
    if package is flask_restx:
        api.errorhandler(Refused)(lambda _error: ({"refused": True}, 409))
    elif ends is fail:
        status = 500  # an unknown error

    def add(path, view, *decorators):
        members = {"post": lambda _self: view(), "method_decorators": list(decorators)}
        api.add_resource(type(path, (package.Resource,), members), f"/{path}")

    add("payments", lambda: (buy(shop), ends(package))[1], idempotent(atomic=atomic))
    add("plain", lambda: ends(package))
    add("conflicts", lambda: fail(package, TransactionConflict), idempotent)
    is_stored = status != 403 and not (atomic and status == 500)
    error = Refused if ends is fail else ZeroDivisionError
    first = error if propagates and status == 500 else str(status)
    assert [sent(shop), sent(shop)] == [first, f"{status} again" if is_stored else first]
    if first is not error:
        told = [(each.data, each.content_type) for each in (shop.post("/plain"), *shop.responses)]
        assert told == told[:1] * 3
    assert shop.count() == (1 if is_stored else 0 if atomic else 2)
    assert len(undone(caplog)) == (atomic and not is_stored)
    assert_problem(shop.post(key=None), 400, "key-required")
    assert_problem(shop.post(json={}), 422, "key-reused")
    assert_problem(shop.post("/conflicts"), 503, "transaction-conflict", retry=True)
