"""The way of a request: where its operation ends, whatever the application does above its view.

Each view commits its payment in its own transaction, unless a test says otherwise.
"""

import logging
from contextlib import nullcontext, suppress

import pytest
import sqlalchemy as sa
from flask import abort, after_this_request, g, request
from werkzeug.exceptions import HTTPException

from flask_idempotency import NotAtomic, current_operation, idempotent
from tests.log import ours
from tests.web.way import (
    KINDS,
    STORES,
    Refused,
    around,
    fail,
    is_replayed,
    make_shop,
    nobody_was_warned,
    undone,
)

__all__ = ["make_shop", "nobody_was_warned"]

pytestmark = STORES


class OutOfTime(BaseException):
    """As gevent's Timeout is: no Exception."""


@pytest.fixture
def shop(make_shop):
    return make_shop()


def buy(shop, commit=True):
    shop.db.session.add(shop.Payment(amount=5))
    if commit:
        shop.db.session.commit()


def add(shop, view, above=lambda view: view, **options):
    shop.app.add_url_rule("/payments", "pay", above(idempotent(**options)(view)), methods=["POST"])


def paying(shop, error=None, commit=True):
    """A view that buys; then it raises ``error``, or responds with 201. And the list of its runs."""
    runs = []

    def pay():
        runs.append(current_operation.attempt)
        buy(shop, commit)
        if error is not None:
            raise error
        return {"run": len(runs)}, 201

    return pay, runs


def after(shop, does):
    """Register a function after the request, which leaves a replay alone."""

    @shop.app.after_request
    def function(response):
        if not is_replayed(response):
            does(response)
        return response


ENDS = {
    "returns": (lambda: ({}, 201), None, 201),
    "aborts": (lambda: abort(410), HTTPException, 410),
    "raises": (fail, Refused, 409),
    "raises, handled by all": (fail, Exception, 409),
    "raises, handled as 500": (fail, 500, 409),
    "raises, handled as success": (fail, Refused, 200),
}


@KINDS
@pytest.mark.parametrize(("ends", "kind", "status"), ENDS.values(), ids=ENDS)
def test_the_response_that_the_application_makes_is_stored_with_the_commit(
    shop, assert_replayed, ends, kind, status, atomic
):
    """What the view registered for it runs once. Headers for one origin are not replayed to another."""
    ran = []

    def pay():
        @after_this_request
        def mark(response):
            ran.append([record.status for record in shop.records()] if shop.store != "sql" else [None])
            response.headers["X-Mark"] = str(len(ran))
            return response

        buy(shop)
        return ends()

    def handle(_error):
        allowed = {"Access-Control-Allow-Origin": request.headers["Origin"]}
        return {"handled": True}, status, allowed

    if kind is not None:
        shop.app.register_error_handler(kind, handle)
    add(shop, pay, around(lambda view: view()), atomic=atomic)
    first, again = (shop.post(headers={"Origin": origin}) for origin in ("https://one", "https://two"))
    assert (first.status_code, first.headers["X-Mark"], ran) == (status, "1", [[None]])
    if kind is not None:
        assert first.headers.pop("Access-Control-Allow-Origin") == "https://one"
    assert_replayed(first, again)
    assert shop.count() == 1


ABOVE = {
    "rolls back": lambda shop: shop.db.session.rollback(),
    "removes the session": lambda shop: shop.db.session.remove(),
    "closes the request": lambda _shop: request.close(),
    "raises": fail,
}


@KINDS
@pytest.mark.parametrize("error", [Refused(), None], ids=["raises", "returns"])
@pytest.mark.parametrize("does", ABOVE)
def test_no_function_after_the_request_loses_the_payment(shop, atomic, error, does):
    """After an error in one, Flask runs once more what is registered for the request."""
    ran = []
    pay, runs = paying(shop, error)

    def marking():
        after_this_request(lambda response: (ran.append(response.status_code), response)[1])
        return pay()

    shop.app.register_error_handler(Refused, lambda _error: ({"refused": True}, 409))
    after(shop, lambda _response: ABOVE[does](shop))
    add(shop, marking, atomic=atomic)
    first, again = shop.post(), shop.post()
    status = 409 if error else 201
    assert first.status_code == (500 if does == "raises" else status)
    assert (again.status_code, is_replayed(again), ran) == (status, True, [status])
    assert (shop.count(), len(runs)) == (1, 1)


@KINDS
@pytest.mark.parametrize("kind", [Refused, SystemExit, OutOfTime])
def test_what_a_decorator_raises_after_the_view_comes_too_late(shop, atomic, kind):
    def fail_once(view):
        response = view()
        if not is_replayed(response):
            raise kind
        return response

    add(shop, paying(shop)[0], around(fail_once), atomic=atomic)
    with nullcontext() if kind is Refused else pytest.raises(kind):
        assert shop.post().status_code == 500
    again = shop.post()
    assert (again.status_code, is_replayed(again), shop.count()) == (201, True, 1)


@KINDS
@pytest.mark.parametrize("error", [None, Refused()])
def test_a_view_that_is_called_without_dispatch_has_no_hooks_and_needs_none(shop, atomic, error):
    """As a command or a test calls it: its error is the caller's, and undoes the payment."""
    add(shop, paying(shop, error)[0], atomic=atomic)
    headers = {"Idempotency-Key": "key-1"}
    for number in range(2):
        with shop.app.test_request_context("/payments", method="POST", headers=headers):
            g.account_id = "alice"
            with pytest.raises(Refused) if error and (atomic or not number) else nullcontext():
                response = shop.app.view_functions["pay"]()
                assert is_replayed(response) == bool(number)
        assert shop.count() == (0 if error and atomic else 1)


@KINDS
def test_what_a_view_left_beside_its_error_is_dropped(shop, assert_replayed, atomic, caplog):
    """As in any application: nobody committed it. One that is not atomic is warned of."""
    shop.app.register_error_handler(Refused, lambda _error: ({"refused": True}, 409))
    add(shop, paying(shop, Refused(), commit=False)[0], atomic=atomic)
    assert_replayed(shop.post(), shop.post())
    assert (shop.count(), len(undone(caplog))) == (0, 0 if atomic else 1)


@KINDS
@pytest.mark.parametrize(
    "config", [{}, {"TESTING": True}, {"DEBUG": True}, {"PROPAGATE_EXCEPTIONS": True}], ids=str
)
@pytest.mark.parametrize("commit", [True, False])
def test_an_error_that_nobody_handles_is_rolled_back_or_stored_as_failed(
    make_shop, atomic, config, commit, caplog
):
    """Where the application makes no response of it, the request's end does that, and says it once."""
    shop = make_shop(**config)
    pay, runs = paying(shop, Refused(), commit)
    add(shop, pay, atomic=atomic)
    for number in range(3):
        with pytest.raises(Refused) if config and (atomic or number == 0) else nullcontext():
            response = shop.post()
            assert response.status_code == 500
            assert is_replayed(response) == (not atomic and number > 0)
    assert (len(runs), shop.count()) == ((3, 0) if atomic else (1, int(commit)))
    if atomic and config:
        assert len(undone(caplog)) == commit


@KINDS
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, OutOfTime])
@pytest.mark.parametrize("place", ["view", "above", "above an error"])
def test_an_exit_leaves_no_lock_and_passes_as_itself(shop, atomic, kind, place):
    """The view has not committed; the next retry finds its row free, and runs."""
    runs = []

    def pay():
        runs.append(1)
        buy(shop, commit=len(runs) > 1)
        if len(runs) == 1 and place != "above":
            raise kind if place == "view" else Refused
        return {}, 201

    def leave(view):
        response = None
        with suppress(Refused):
            response = view()
        if len(runs) == 1:
            raise kind
        return response

    options = {} if atomic else {"atomic": False, "on_interrupted": "retry"}
    add(shop, pay, around(leave), **options)
    with pytest.raises(kind):
        shop.post()
    assert shop.count() == 0
    again = shop.post()
    assert (again.status_code, is_replayed(again)) == (201, False)
    assert (shop.count(), len(runs)) == (1, 2)
    if shop.store != "sql":
        shop.assert_clean()


@KINDS
@pytest.mark.parametrize("same", [True, False])
def test_a_second_function_of_one_request_is_refused(shop, atomic, same, caplog):
    """An attempt never takes the response of another: what tries again stands below."""
    (failing, _), (second, runs) = paying(shop, Refused()), paying(shop)
    first = idempotent(name="first", atomic=atomic)(failing)
    then = first if same else idempotent(name="second", atomic=atomic)(second)

    def both():
        with suppress(Refused):
            first()
        return then()

    shop.app.register_error_handler(Exception, lambda error: (str(error), 400))
    shop.app.add_url_rule("/payments", "pay", both, methods=["POST"])
    assert "what tries again do so below @idempotent" in shop.post().text
    shop.post()
    assert [each.status for each in shop.records() if each.status] == ([] if atomic else [500])
    assert (shop.count(), runs) == (0 if atomic else 1, [])
    said = [line.getMessage() for line in ours(caplog, logging.ERROR)]
    assert len([text for text in said if "a second idempotent function" in text]) == 1


@pytest.mark.parametrize("place", ["decorator", "after_request"])
def test_an_error_above_what_the_view_left_undoes_it(shop, place):
    fails = [Refused()]

    def end():
        if fails:
            raise fails.pop()
        shop.db.session.commit()

    def call(view):
        response = view()
        if place == "decorator":
            end()
        return response

    if place == "after_request":
        after(shop, lambda response: end() if response.status_code < 500 else None)
    add(shop, paying(shop, commit=False)[0], around(call))
    assert (shop.post().status_code, shop.count()) == (500, 0)
    again = shop.post()
    assert (again.status_code, is_replayed(again), shop.count()) == (201, False, 1)


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
        buy(shop, commit=False)
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
    if handler is not None:
        shop.app.register_error_handler(handler, lambda _error: ({"sorry": True}, 500))
    pay, _ = paying(shop, commit=False)
    if mistake == "nobody committed":
        add(shop, pay)
    else:
        shop.app.add_url_rule("/payments", "pay", pay, methods=["POST"])
        idempotent(pay)
    assert [shop.post().status_code for _ in range(3)] == [500] * 3
    assert shop.count() == 0
    said = [line.getMessage() for line in ours(caplog, logging.ERROR)]
    assert len([text for text in said if mistake in text]) == 1, said


def test_no_success_is_sent_for_what_is_not_stored(shop):
    """Flask swallows errors of functions after a request while it handles another error."""

    def apologize(_error):
        buy(shop, commit=False)  # nobody commits
        return {"fine": True}, 200

    shop.app.register_error_handler(500, apologize)
    add(shop, paying(shop, Refused())[0])
    assert (shop.post().status_code, shop.count()) == (500, 0)


@pytest.mark.parametrize("rolls_back", [True, False])
@pytest.mark.parametrize("commits", [True, False])
def test_where_what_the_view_left_is_dropped_its_success_is_stored_for_what_it_committed(
    shop, rolls_back, commits
):
    """As without the extension: there a committed row is beyond what comes above."""

    def drop(response):
        if rolls_back:
            shop.db.session.rollback()
        response.status_code = 409

    def pay():
        buy(shop, commit=commits)
        buy(shop, commit=False)
        return {}, 201

    after(shop, drop)
    add(shop, pay)
    assert shop.post().status_code == 409
    again = shop.post()
    assert (again.status_code, is_replayed(again)) == ((201, True) if commits else (409, False))
    assert (shop.count(), shop.records()[0].status) == ((1, 201) if commits else (0, None))


@pytest.mark.parametrize("raises", [True, False])
def test_an_audit_above_a_rejection_stays(shop, raises):
    """What is not stored is rolled back before any after_request function."""

    def audit(response):
        shop.db.session.add(shop.Payment(amount=response.status_code))
        shop.db.session.commit()

    def pay():
        buy(shop, commit=False)
        return abort(403) if raises else ({}, 403)

    after(shop, audit)
    add(shop, pay)
    assert shop.post().status_code == 403
    assert shop.sql("select amount from payment") == [(403,)]


@KINDS
def test_a_stream_that_fails_is_an_error_of_the_view(shop, assert_replayed, atomic):
    def pay():
        buy(shop)
        yield "one"
        raise Refused

    shop.app.register_error_handler(Refused, lambda _error: ({"refused": True}, 409))
    add(shop, pay, atomic=atomic)
    first = shop.post()
    assert (first.status_code, first.json) == (409, {"refused": True})
    assert_replayed(first, shop.post())
    assert shop.count() == 1
