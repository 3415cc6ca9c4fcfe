"""The way of a request: where its operation ends, whatever the application does above its view."""

import logging
from contextlib import nullcontext, suppress

import pytest
import sqlalchemy as sa
from flask import g
from werkzeug.exceptions import HTTPException

from flask_idempotency import NotAtomic, idempotent
from tests.log import ours
from tests.web.way import (
    KINDS,
    STORES,
    OutOfTime,
    Refused,
    Way,
    build,
    buy,
    is_replayed,
    make_shop,
    nobody_was_warned,
    rows,
    undone,
    write,
)

__all__ = ["make_shop", "nobody_was_warned"]

pytestmark = STORES


@pytest.fixture
def shop(make_shop):
    return make_shop()


def sent(shop):
    """What comes of a request: its status and whether it is a replay, or the error."""
    try:
        response = shop.post()
    except (Refused, SystemExit, OutOfTime) as error:
        return type(error)
    shop.__dict__.setdefault("responses", []).append(response)
    return f"{response.status_code}{' again' if is_replayed(response) else ''}"


# What comes of the first request and of its retry, and whose rows there are then.
WAYS = {
    # What the view has committed stays, whatever comes above.
    "a rollback after the request": (Way("buy", after="rollback"), "201", "201 again", "1"),
    "no session after the request": (Way("buy", after="remove"), "201", "201 again", "1"),
    "the request is closed": (Way("buy", after="close"), "201", "201 again", "1"),
    "an error after the request": (Way("buy", after="refuse"), "500", "201 again", "1"),
    "an error above": (Way("buy", above="refuse!"), "500", "201 again", "1"),
    "an exit above": (Way("buy", above="exit!"), SystemExit, "201 again", "1"),
    "a time-out above": (Way("buy", above="run out!"), OutOfTime, "201 again", "1"),
    # So does what goes with the response that the application makes of an error.
    **{
        f"an error that is handled, then {after or 'nothing'}": (
            Way("buy, refuse", handler=Refused, after=after),
            "500" if after == "refuse" else "409",
            "409 again",
            "1",
        )
        for after in ("", "rollback", "remove", "close")
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
    "an exit above an error": (
        Way("write, refuse!, commit", above="exit!", catches="responds"),
        SystemExit,
        "201",
        "1",
    ),
}
ATOMIC_WAYS = {
    "an error before a commit above": (Way("write", above="refuse!, commit"), "500", "201", "1"),
    # What is not stored is rolled back before any function after the request: its audit stays.
    "an audit of a rejection": (Way("write, 403", after="buy"), "403", "403", "44"),
    # Flask swallows errors of functions after a request while it handles another error.
    "nobody commits in a handler": (
        Way("buy, refuse", handler=500, handling="write", status=200),
        "500",
        "500",
        "",
    ),
    # As without the extension: a committed row is beyond what comes above, the rest goes.
    "all is rolled back above": (Way("write", after="rollback, 409"), "409", "409", ""),
    "all is rejected above": (Way("write", after="409"), "409", "409", ""),
    "the rest is rolled back above": (
        Way("buy, write", after="rollback, 409"),
        "409",
        "201 again",
        "1",
    ),
    "the rest is rejected above": (Way("buy, write", after="409"), "409", "201 again", "1"),
}


@pytest.mark.parametrize(
    ("atomic", "way", "first", "again", "left"),
    [
        pytest.param(atomic, *row, id=f"{name}, {'atomic' if atomic else 'leased'}")
        for atomic, ways in ((True, {**WAYS, **ATOMIC_WAYS}), (False, WAYS))
        for name, row in ways.items()
    ],
)
def test_what_the_view_committed_is_stored_and_stays(shop, atomic, way, first, again, left, caplog):
    """After an error in a function after the request, Flask calls once more what a view registered.

    The response is stored with what that has changed, and without headers for one origin.
    """
    options = {} if atomic else {"atomic": False, "on_interrupted": "retry"}
    runs, marks = build(shop, way, idempotent(**options))
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


CONFIGS = [{}, {"TESTING": True}, {"DEBUG": True}, {"PROPAGATE_EXCEPTIONS": True}]


@KINDS
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("view", ["buy, refuse", "write, refuse"])
def test_an_error_that_nobody_handles_is_rolled_back_or_stored_as_failed(
    make_shop, atomic, config, view, caplog
):
    """Where the application makes no response of it, the request's end does that, and says it once."""
    shop, is_committed = make_shop(**config), view == "buy, refuse"
    runs, _ = build(shop, Way(view), idempotent(atomic=atomic))
    first = Refused if config else "500"
    assert [sent(shop) for _ in range(3)] == [first, *([first] * 2 if atomic else ["500 again"] * 2)]
    assert (len(runs), rows(shop)) == ((3, "") if atomic else (1, "1" if is_committed else ""))
    if atomic and config:
        assert len(undone(caplog)) == is_committed


def add(shop, view, **options):
    shop.app.add_url_rule("/payments", "pay", idempotent(**options)(view), methods=["POST"])


@KINDS
@pytest.mark.parametrize("words", ["buy", "buy, refuse"])
def test_a_view_that_is_called_without_dispatch_has_no_hooks_and_needs_none(shop, atomic, words):
    """As a command or a test calls it: its error is the caller's, and undoes the payment."""
    build(shop, Way(words), idempotent(atomic=atomic))
    raises, headers = words != "buy", {"Idempotency-Key": "key-1"}
    for number in range(2):
        with shop.app.test_request_context("/payments", method="POST", headers=headers):
            g.account_id = "alice"
            with pytest.raises(Refused) if raises and (atomic or not number) else nullcontext():
                assert is_replayed(shop.app.view_functions["pay"]()) == bool(number)
        assert rows(shop) == ("" if raises and atomic else "1")


@KINDS
@pytest.mark.parametrize("same", [True, False])
def test_a_second_function_of_one_request_is_refused(shop, atomic, same, caplog):
    """An attempt never takes the response of another: what tries again stands below."""

    def pay():
        buy(shop, 5)
        raise Refused

    first = idempotent(name="first", atomic=atomic)(pay)
    then = first if same else idempotent(name="second", atomic=atomic)(lambda: buy(shop, 5) or "")

    def both():
        with suppress(Refused):
            first()
        return then()

    shop.app.register_error_handler(Exception, lambda error: (str(error), 400))
    shop.app.add_url_rule("/payments", "pay", both, methods=["POST"])
    assert "what tries again do so below @idempotent" in shop.post().text
    shop.post()
    assert [each.status for each in shop.records() if each.status] == ([] if atomic else [500])
    assert shop.count() == (0 if atomic else 1)
    said = [line.getMessage() for line in ours(caplog, logging.ERROR)]
    assert len([text for text in said if "a second idempotent function" in text]) == 1


def test_a_problem_at_the_end_is_written_in_place(shop, assert_problem):
    """The application's CORS headers stay, the view's own go."""
    if shop.store == "sql":
        return  # no connection that can be lost

    @shop.app.after_request
    def commit(response):
        response.headers["Access-Control-Allow-Origin"] = "https://one.example"
        if response.status_code == 201:
            shop.db.session.commit()
            pid = shop.db.session.scalar(sa.text("SELECT pg_backend_pid()"))
            shop.sql("SELECT pg_terminate_backend(:pid)", pid=pid)
        return response

    def pay():
        write(shop, 5)
        return {"own": True}, 201, {"X-View": "own", "Location": "/payments/1"}

    add(shop, pay)
    refused = shop.post()
    assert_problem(refused, 503, "store-unavailable", retry=True)
    assert refused.headers["Access-Control-Allow-Origin"] == "https://one.example"
    assert not {"X-View", "Location"} & set(refused.headers.keys())
    assert shop.count() == 0


@pytest.mark.parametrize("handler", [None, Exception, 500, NotAtomic])
@pytest.mark.parametrize("mistake", ["nobody committed", "Put @idempotent below"])
def test_a_mistake_is_logged_once_whatever_handlers_there_are(shop, handler, mistake, caplog):
    def pay():
        write(shop, 5)
        return {}, 201

    if handler is not None:
        shop.app.register_error_handler(handler, lambda _error: ({"sorry": True}, 500))
    if mistake == "nobody committed":
        add(shop, pay)
    else:
        shop.app.add_url_rule("/payments", "pay", pay, methods=["POST"])
        idempotent(pay)
    assert [shop.post().status_code for _ in range(3)] == [500] * 3
    assert shop.count() == 0
    said = [line.getMessage() for line in ours(caplog, logging.ERROR)]
    assert len([text for text in said if mistake in text]) == 1, said


@KINDS
def test_a_stream_that_fails_is_an_error_of_the_view(shop, assert_replayed, atomic):
    def pay():
        buy(shop, 5)
        yield "one"
        raise Refused

    shop.app.register_error_handler(Refused, lambda _error: ({"refused": True}, 409))
    add(shop, pay, atomic=atomic)
    first = shop.post()
    assert (first.status_code, first.json) == (409, {"refused": True})
    assert_replayed(first, shop.post())
    assert shop.count() == 1
