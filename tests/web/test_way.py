"""The way of a request: where its operation ends, whatever the application does above its view.

Each view commits its payment in its own transaction, unless a test says otherwise.
"""

import logging
from contextlib import contextmanager, suppress
from functools import wraps

import pytest
import sqlalchemy as sa
from flask import abort, after_this_request, g, request, send_file, stream_with_context
from flask.views import MethodView
from werkzeug.exceptions import HTTPException

from flask_idempotency import NotAtomic, Retryable, current_operation, idempotent
from tests.log import ours
from tests.web.way import (
    KINDS,
    STORES,
    Refused,
    is_replayed,
    make_shop,
    nobody_was_warned,
    refuse,
    undone,
)

__all__ = ["make_shop", "nobody_was_warned"]

pytestmark = STORES

RAISES = pytest.mark.parametrize("raises", [True, False], ids=["raises", "returns"])


class OutOfTime(BaseException):
    """As gevent's Timeout is: no Exception."""


@pytest.fixture
def shop(make_shop):
    return make_shop()


def buy(shop, commit=True):
    shop.db.session.add(shop.Payment(amount=5))
    if commit:
        shop.db.session.commit()


def add(shop, view, *above, **options):
    """Register a protected view below the decorators ``above``, the innermost first."""
    protected = idempotent(**options)(view)
    for decorator in above:
        protected = decorator(protected)
    shop.app.add_url_rule("/payments", "pay", protected, methods=["POST"])


def around(call):
    """A decorator: ``call`` gets the view, without arguments."""
    return lambda view: wraps(view)(lambda *args, **kwargs: call(lambda: view(*args, **kwargs)))


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


@contextmanager
def dispatched_by_nobody(shop):
    """As a command or a test calls a view."""
    headers = {"Idempotency-Key": "key-1"}
    with shop.app.test_request_context("/payments", method="POST", headers=headers):
        g.account_id = "alice"
        yield shop.app.view_functions["pay"]


def in_class(function, **options):
    class Payments(MethodView):
        decorators = (idempotent(**options),)

        def post(self):
            return function()

    return Payments.as_view("pay")


def in_async(function, **options):
    async def pay():
        return function()

    return idempotent(**options)(pay)


def below_a_decorator(function, **options):
    return around(lambda view: view())(idempotent(**options)(function))


ENDS = {
    "returns": (lambda: ({}, 201), None, 201),
    "aborts": (lambda: abort(410), HTTPException, 410),
    "raises": (lambda: fail(), Refused, 409),  # noqa: PLW0108
    "raises, handled by all": (lambda: fail(), Exception, 409),  # noqa: PLW0108
    "raises, handled as 500": (lambda: fail(), 500, 409),  # noqa: PLW0108
    "raises, handled as success": (lambda: fail(), Refused, 200),  # noqa: PLW0108
}


def fail(*_):
    raise Refused


@KINDS
@pytest.mark.parametrize("make", [in_class, in_async, below_a_decorator])
@pytest.mark.parametrize("end", ENDS)
def test_the_response_that_the_application_makes_is_stored_with_the_commit(
    shop, assert_replayed, make, end, atomic
):
    """What the view registered for it runs once. Headers for one origin are not replayed to another."""
    ends, kind, status = ENDS[end]
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
    view = make(pay, atomic=atomic)
    shop.app.add_url_rule("/payments", "pay", view, methods=["POST"])
    first, again = (shop.post(headers={"Origin": origin}) for origin in ("https://one", "https://two"))
    assert (first.status_code, first.headers["X-Mark"], ran) == (status, "1", [[None]])
    if kind is not None:
        assert first.headers.pop("Access-Control-Allow-Origin") == "https://one"
    assert_replayed(first, again)
    assert shop.count() == 1


def after(shop, does):
    """Register a function after the request, which leaves a replay alone."""

    @shop.app.after_request
    def function(response):
        if not is_replayed(response):
            does(response)
        return response


ABOVE = {
    "rolls back": lambda shop: shop.db.session.rollback(),
    "removes the session": lambda shop: shop.db.session.remove(),
    "closes the request": lambda _shop: request.close(),
    "raises": fail,
}


@KINDS
@RAISES
@pytest.mark.parametrize("does", ABOVE)
def test_no_function_after_the_request_loses_the_payment(shop, atomic, raises, does):
    """After an error in one, Flask runs once more what is registered for the request."""
    ran = []
    pay, runs = paying(shop, Refused() if raises else None)

    def marking():
        after_this_request(lambda response: (ran.append(response.status_code), response)[1])
        return pay()

    shop.app.register_error_handler(Refused, refuse)
    after(shop, lambda _response: ABOVE[does](shop))
    add(shop, marking, atomic=atomic)
    first, again = shop.post(), shop.post()
    status = 409 if raises else 201
    assert first.status_code == (500 if does == "raises" else status)
    assert (again.status_code, is_replayed(again), ran) == (status, True, [status])
    assert (shop.count(), len(runs)) == (1, 1)


@KINDS
@pytest.mark.parametrize("kind", [Refused, SystemExit, OutOfTime])
def test_what_a_decorator_raises_after_the_view_comes_too_late(shop, atomic, kind):
    stored = []

    def fail_once(view):
        response = view()
        if not is_replayed(response):
            stored.extend(record.status for record in shop.records())
            raise kind
        return response

    add(shop, paying(shop)[0], around(fail_once), atomic=atomic)
    if kind is Refused:
        assert shop.post().status_code == 500
    else:
        with pytest.raises(kind):
            shop.post()
    again = shop.post()
    assert (again.status_code, is_replayed(again)) == (201, True)
    assert (shop.count(), stored) == (1, [201])


@KINDS
def test_a_view_that_is_called_without_dispatch_has_no_hooks_and_needs_none(shop, atomic):
    add(shop, paying(shop)[0], atomic=atomic)

    @shop.app.cli.command("pay")
    def pay():
        with dispatched_by_nobody(shop) as view:
            print(view().headers.get("Idempotent-Replayed"))

    run = shop.app.test_cli_runner().invoke
    assert [run(args=["pay"]).output.strip() for _ in range(2)] == ["None", "true"]
    assert shop.count() == 1


def test_an_error_without_dispatch_is_the_callers_and_undoes_the_payment(shop):
    add(shop, paying(shop, Refused())[0])
    for _ in range(2):
        with dispatched_by_nobody(shop) as view, pytest.raises(Refused):
            view()
        assert shop.count() == 0


@KINDS
def test_what_a_view_left_beside_its_error_is_dropped(shop, assert_replayed, atomic, caplog):
    """As in any application: nobody committed it. One that is not atomic is warned of."""
    shop.app.register_error_handler(Refused, refuse)
    add(shop, paying(shop, Refused(), commit=False)[0], atomic=atomic)
    assert_replayed(shop.post(), shop.post())
    assert (shop.count(), len(undone(caplog))) == (0, 0 if atomic else 1)


LETTING_OUT = [{"TESTING": True}, {"DEBUG": True}, {"PROPAGATE_EXCEPTIONS": True}]


@KINDS
@pytest.mark.parametrize("config", [{}, *LETTING_OUT], ids=str)
@pytest.mark.parametrize("commit", [True, False])
def test_an_error_that_nobody_handles_is_rolled_back_or_stored_as_failed(
    make_shop, atomic, config, commit, caplog
):
    """Where the application makes no response of it, the request's end does that, and says it once."""
    shop = make_shop(**config)
    pay, runs = paying(shop, Refused(), commit)
    add(shop, pay, atomic=atomic)
    for number in range(3):
        if config and (atomic or number == 0):
            with pytest.raises(Refused):
                shop.post()
        else:
            response = shop.post()
            assert response.status_code == 500
            assert is_replayed(response) == (not atomic and number > 0)
    assert (len(runs), shop.count()) == ((3, 0) if atomic else (1, int(commit)))
    if atomic and config:
        assert len(undone(caplog)) == commit


@pytest.mark.parametrize("config", LETTING_OUT, ids=str)
def test_retryable_frees_the_key_of_one_with_a_lease(make_shop, config):
    shop, ends = make_shop(**config), [Retryable()]

    def pay():
        if ends:
            raise ends.pop()
        return {}, 201

    add(shop, pay, atomic=False)
    assert [shop.post().status_code for _ in range(2)] == [503, 201]


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
    first, _ = paying(shop, Refused())
    second, second_runs = paying(shop)
    protected = [
        idempotent(name=f"n{each}", atomic=atomic)(view) for each, view in enumerate((first, second))
    ]

    def both():
        with suppress(Refused):
            protected[0]()
        return protected[0 if same else 1]()

    shop.app.register_error_handler(Exception, lambda error: (str(error), 400))
    shop.app.add_url_rule("/payments", "pay", both, methods=["POST"])
    assert "what tries again do so below @idempotent" in shop.post().text
    shop.post()
    assert [each.status for each in shop.records() if each.status] == ([] if atomic else [500])
    assert (shop.count(), second_runs) == (0 if atomic else 1, [])
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

    @shop.app.after_request
    def finish(response):
        if place == "after_request" and response.status_code < 500:
            end()
        return response

    add(shop, paying(shop, commit=False)[0], around(call))
    assert (shop.post().status_code, shop.count()) == (500, 0)
    again = shop.post()
    assert (again.status_code, is_replayed(again), shop.count()) == (201, False, 1)


def test_a_problem_at_the_end_is_written_in_place(shop, store, assert_problem):
    """The application's CORS headers stay, the view's own go."""
    if store == "sql":
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


@pytest.mark.parametrize("kind", ["rolls back", "rejects"])
def test_what_the_view_committed_stays_where_the_rest_is_dropped(shop, kind):
    """As without the extension: there a committed row is beyond what comes above."""

    def drop(response):
        if kind == "rolls back":
            shop.db.session.rollback()
        else:
            response.status_code = 409

    def pay():
        buy(shop)
        buy(shop, commit=False)
        return {}, 201

    after(shop, drop)
    add(shop, pay)
    assert shop.post().status_code == (201 if kind == "rolls back" else 409)
    assert is_replayed(shop.post())
    assert shop.count() == 1


@pytest.mark.parametrize("kind", ["rolls back", "rejects"])
def test_where_all_that_the_view_left_is_dropped_its_success_is_not_stored(shop, kind):
    def drop(response):
        shop.db.session.rollback() if kind == "rolls back" else None
        response.status_code = 409

    after(shop, drop)
    add(shop, paying(shop, commit=False)[0])
    assert [shop.post().status_code for _ in range(2)] == [409, 409]
    assert (shop.count(), [each.status for each in shop.records()]) == (0, [None])


@RAISES
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
@pytest.mark.parametrize("kind", ["stream", "file", "failing stream"])
def test_streams_and_files_are_read_to_their_end(shop, tmp_path, assert_replayed, atomic, kind):
    """One that fails is an error of the view."""
    (tmp_path / "receipt").write_bytes(b"paid" * 1000)

    def fail_late():
        buy(shop)
        yield "one"
        raise Refused

    def pay():
        if kind == "failing stream":
            return fail_late()
        buy(shop)
        if kind == "file":
            return send_file(tmp_path / "receipt", mimetype="text/plain")
        return stream_with_context(str(each) + request.path for each in range(3))

    shop.app.register_error_handler(Refused, refuse)
    add(shop, pay, atomic=atomic)
    first = shop.post(buffered=True)
    bodies = {"file": b"paid" * 1000, "stream": b"0/payments1/payments2/payments"}
    assert first.data == bodies.get(kind, b'{"refused":true}\n')
    assert_replayed(first, shop.post())
    assert shop.count() == 1
