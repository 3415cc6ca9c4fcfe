"""The way of a request: where its operation ends, whatever the application does above its view.

Each view commits its payment in its own transaction, unless a test says otherwise.
"""

import logging
from contextlib import suppress
from functools import wraps

import pytest
import sqlalchemy as sa
from flask import (
    abort,
    after_this_request,
    g,
    request,
    send_file,
    stream_with_context,
)
from flask.views import MethodView
from werkzeug.exceptions import HTTPException

from flask_idempotency import NotAtomic, Retryable, current_operation, idempotent
from tests.web.way import KINDS, STORES, make_shop, nobody_was_warned

__all__ = ["make_shop", "nobody_was_warned"]

pytestmark = STORES


class Refused(Exception):
    """An error of the application."""


class OutOfTime(BaseException):
    """As gevent's Timeout is: no Exception."""


@pytest.fixture
def shop(make_shop):
    return make_shop()


def buy(shop, commit=True):
    shop.db.session.add(shop.Payment(amount=5))
    if commit:
        shop.db.session.commit()


def add(shop, view, *above, path="/payments", endpoint="pay", **options):
    """Register a protected view below the decorators ``above``, the innermost first."""
    protected = idempotent(**options)(view)
    for decorator in above:
        protected = decorator(protected)
    shop.app.add_url_rule(path, endpoint, protected, methods=["POST"])


def paying(shop, error=None, commit=True):
    """A view that buys; then it raises ``error``, or responds with 201. And the list of its runs."""
    runs = []

    def pay():
        buy(shop, commit)
        runs.append(current_operation.attempt)
        if error is not None:
            raise error
        return {"run": len(runs)}, 201

    return pay, runs


def is_replayed(response):
    return response.headers.get("Idempotent-Replayed") == "true"


def told(caplog, level):
    return [
        each.getMessage()
        for each in caplog.records
        if each.levelno == level and each.name.startswith("flask_idempotency")
    ]


def undone(caplog):
    """The warnings that something committed is not there."""
    return [text for text in told(caplog, logging.WARNING) if "undone" in text]


class TestReturned:
    """A view that leaves nothing for anybody above it has ended when it returns."""

    @KINDS
    @pytest.mark.parametrize("does", ["rollback", "raise", "remove"])
    def test_no_audit_above_it_loses_the_payment(self, shop, assert_replayed, atomic, does):
        @shop.app.after_request
        def audit(response):
            if does == "raise" and not is_replayed(response):
                raise Refused
            shop.db.session.rollback() if does == "rollback" else shop.db.session.remove()
            return response

        pay, runs = paying(shop)
        add(shop, pay, atomic=atomic)
        first, again = shop.post(), shop.post()
        assert first.status_code == (500 if does == "raise" else 201)
        assert (again.status_code, again.json, is_replayed(again)) == (201, {"run": 1}, True)
        assert (shop.count(), len(runs)) == (1, 1)

    @KINDS
    @pytest.mark.parametrize("commit", [True, False], ids=["commits", "leaves it to a function above"])
    def test_a_view_may_close_its_request(self, shop, assert_replayed, atomic, commit):
        pay, runs = paying(shop, commit=commit)

        def closing():
            request.close()
            response = pay()
            request.close()
            return response

        @shop.app.after_request
        def commits(response):
            request.close()
            shop.db.session.commit()
            return response

        add(shop, closing, atomic=atomic)
        first, again = shop.post(), shop.post()
        assert (first.status_code, is_replayed(again)) == (201, True)
        assert (shop.count(), len(runs)) == (1, 1)

    @KINDS
    def test_it_is_stored_before_a_decorator_above_it_goes_on(self, shop, atomic):
        seen = []

        def looking(view):
            @wraps(view)
            def look():
                response = view()
                seen.append([record.status for record in shop.records()])
                return response

            return look

        add(shop, paying(shop)[0], looking, atomic=atomic)
        assert shop.post().status_code == 201
        assert seen == [[201]]

    @KINDS
    @pytest.mark.parametrize("kind", [Refused, SystemExit, KeyboardInterrupt, OutOfTime])
    def test_what_a_decorator_raises_after_it_comes_too_late(self, shop, atomic, kind):
        def failing_once(view):
            @wraps(view)
            def fail():
                response = view()
                if not is_replayed(response):
                    raise kind
                return response

            return fail

        add(shop, paying(shop)[0], failing_once, atomic=atomic)
        if kind is Refused:
            assert shop.post().status_code == 500
        else:
            with pytest.raises(kind):
                shop.post()
        again = shop.post()
        assert (again.status_code, is_replayed(again)) == (201, True)
        assert shop.count() == 1

    @KINDS
    def test_a_view_that_is_called_without_dispatch_has_no_hooks_and_needs_none(self, shop, atomic):
        pay, runs = paying(shop)
        add(shop, pay, atomic=atomic)
        headers = {"Idempotency-Key": "key-1"}
        for _ in range(2):
            with shop.app.test_request_context("/payments", method="POST", headers=headers):
                g.account_id = "alice"
                response = shop.app.view_functions["pay"]()
                assert response.status_code == 201
        assert is_replayed(response)
        assert (shop.count(), len(runs)) == (1, 1)

    @KINDS
    def test_a_command_may_call_it(self, shop, atomic):
        add(shop, paying(shop)[0], atomic=atomic)

        @shop.app.cli.command("pay-twice")
        def pay_twice():
            for _ in range(2):
                with shop.app.test_request_context(
                    "/payments", method="POST", headers={"Idempotency-Key": "key-1"}
                ):
                    g.account_id = "alice"
                    print(shop.app.view_functions["pay"]().headers.get("Idempotent-Replayed"))

        result = shop.app.test_cli_runner().invoke(args=["pay-twice"])
        assert result.output.split() == ["None", "true"]
        assert shop.count() == 1

    def test_an_error_without_dispatch_is_the_callers_and_undoes_the_payment(self, shop):
        add(shop, paying(shop, Refused())[0])
        headers = {"Idempotency-Key": "key-1"}
        for count in range(2):
            with shop.app.test_request_context("/payments", method="POST", headers=headers):
                g.account_id = "alice"
                with pytest.raises(Refused):
                    shop.app.view_functions["pay"]()
            assert shop.count() == 0, count


HANDLERS = ["class", "blueprint", "all", "500"]


def refuse(shop, kind, status=409):
    """Register a handler that responds with ``status`` to the view's error."""

    def handle(_error):
        return {"refused": True}, status

    if kind == "500":
        shop.app.register_error_handler(500, handle)
    elif kind == "blueprint":
        shop.app.error_handler_spec["pay"][None][Refused] = handle
    else:
        shop.app.register_error_handler(Refused if kind == "class" else Exception, handle)


def passing(view):
    """A decorator that only looks on."""

    @wraps(view)
    def look_on(*args, **kwargs):
        try:
            return view(*args, **kwargs)
        finally:
            request.environ["seen"] = True

    return look_on


class TestRaised:
    """The response to a view's error is what the application makes of it."""

    @KINDS
    @pytest.mark.parametrize("handler", ["class", "all", "500"])
    @pytest.mark.parametrize("commit", [True, False])
    def test_a_handlers_response_below_500_is_stored(
        self, shop, assert_replayed, atomic, handler, commit, caplog
    ):
        """What a view has left beside its error is dropped, as in any application, and said."""
        refuse(shop, handler)
        pay, runs = paying(shop, Refused(), commit)
        add(shop, pay, passing, atomic=atomic)
        first, again = shop.post(), shop.post()
        assert (first.status_code, first.json) == (409, {"refused": True})
        assert_replayed(first, again)
        assert len(runs) == 1
        assert shop.count() == commit
        assert len(undone(caplog)) == (not commit)

    @pytest.mark.parametrize("handler", ["class", "all", "500"])
    def test_a_handlers_success_is_stored_with_the_commit_or_not_given(self, shop, handler):
        refuse(shop, handler, 200)
        add(shop, paying(shop, Refused())[0])
        assert [shop.post().status_code for _ in range(2)] == [200, 200]
        assert shop.count() == 1

    @KINDS
    def test_an_error_that_nobody_handles_is_rolled_back_or_stored_as_failed(self, shop, atomic):
        pay, runs = paying(shop, Refused())
        add(shop, pay, passing, atomic=atomic)
        first, again = shop.post(), shop.post()
        assert (first.status_code, again.status_code) == (500, 500)
        assert (len(runs), shop.count()) == ((2, 0) if atomic else (1, 1))
        assert is_replayed(again) is not atomic

    @KINDS
    def test_aborting_is_stored_as_the_application_shows_it(self, shop, assert_replayed, atomic):
        shop.app.register_error_handler(HTTPException, lambda error: ({"code": error.code}, error.code))

        def pay():
            buy(shop)
            abort(410)

        add(shop, pay, passing, atomic=atomic)
        first = shop.post()
        assert (first.status_code, first.json) == (410, {"code": 410})
        assert_replayed(first, shop.post())
        assert shop.count() == 1

    @KINDS
    @pytest.mark.parametrize("raises", [True, False])
    def test_what_the_view_registered_runs_once_before_the_response_is_stored(
        self, shop, assert_replayed, atomic, raises
    ):
        ran = []

        def pay():
            @after_this_request
            def mark(response):
                ran.append(
                    [record.status for record in shop.records()] if shop.store != "sql" else None
                )
                response.headers["X-Mark"] = str(len(ran))
                return response

            buy(shop)
            if raises:
                raise Refused
            return {}, 201

        refuse(shop, "class")
        add(shop, pay, atomic=atomic)
        first, again = shop.post(), shop.post()
        assert first.headers["X-Mark"] == "1"
        assert_replayed(first, again)
        assert len(ran) == 1

    @KINDS
    @pytest.mark.parametrize("raises", [True, False])
    def test_it_runs_once_when_a_later_function_fails(self, shop, atomic, raises):
        """Flask runs what is registered for the request again after an error in it."""
        ran = []

        @shop.app.after_request
        def audit(response):
            if not is_replayed(response):
                raise ZeroDivisionError
            return response

        def pay():
            @after_this_request
            def mark(response):
                ran.append(response.status_code)
                return response

            buy(shop)
            if raises:
                raise Refused
            return {}, 201

        refuse(shop, "class")
        add(shop, pay, atomic=atomic)
        first, again = shop.post(), shop.post()
        status = 409 if raises else 201
        assert (first.status_code, again.status_code, ran) == (500, status, [status])
        assert is_replayed(again)
        assert shop.count() == 1

    @KINDS
    def test_headers_for_one_origin_are_not_replayed_to_another(self, shop, atomic):
        """As of flask-cors' decorator, which stands below ours or registers for the request."""

        def handle(_error):
            allowed = {"Access-Control-Allow-Origin": request.headers["Origin"], "X-Own": "own"}
            return {"refused": True}, 409, allowed

        shop.app.register_error_handler(Refused, handle)
        add(shop, paying(shop, Refused())[0], atomic=atomic)
        first = shop.post(headers={"Origin": "https://one.example"})
        again = shop.post(headers={"Origin": "https://two.example"})
        assert first.headers["Access-Control-Allow-Origin"] == "https://one.example"
        assert is_replayed(again)
        assert "Access-Control-Allow-Origin" not in again.headers
        assert again.headers["X-Own"] == "own"


LETTING_OUT = [
    {"TESTING": True},
    {"DEBUG": True},
    {"PROPAGATE_EXCEPTIONS": True},
]


class TestWithoutResponse:
    """Where the application makes no response of the error, the request's end ends it."""

    @pytest.mark.parametrize("config", LETTING_OUT)
    @pytest.mark.parametrize("commit", [True, False])
    def test_an_atomic_one_is_rolled_back_which_is_said_once(self, make_shop, config, commit, caplog):
        shop = make_shop(**config)
        pay, runs = paying(shop, Refused(), commit)
        add(shop, pay)
        for _ in range(3):
            with pytest.raises(Refused):
                shop.post()
        assert (shop.count(), len(runs)) == (0, 3)
        assert len(undone(caplog)) == commit

    @pytest.mark.parametrize("config", LETTING_OUT)
    def test_one_with_a_lease_is_stored_as_failed(self, make_shop, config, assert_problem):
        shop = make_shop(**config)
        pay, runs = paying(shop, Refused())
        add(shop, pay, atomic=False)
        with pytest.raises(Refused):
            shop.post()
        again = shop.post()
        assert (again.status_code, is_replayed(again)) == (500, True)
        assert (shop.count(), len(runs)) == (1, 1)

    @pytest.mark.parametrize("config", LETTING_OUT)
    def test_retryable_frees_the_key_of_one_with_a_lease(self, make_shop, config):
        shop = make_shop(**config)
        runs = []

        def pay():
            runs.append(1)
            if len(runs) == 1:
                raise Retryable
            return {}, 201

        add(shop, pay, atomic=False)
        assert shop.post().status_code == 503
        assert shop.post().status_code == 201

    @KINDS
    @pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, OutOfTime])
    @pytest.mark.parametrize("place", ["view", "above", "above an error"])
    def test_an_exit_leaves_no_lock_and_passes_as_itself(self, shop, atomic, kind, place):
        """The view has not committed; the next retry finds its row free, and runs."""
        runs = []

        def pay():
            runs.append(1)
            buy(shop, commit=len(runs) > 1)
            if len(runs) == 1 and place != "above":
                raise kind if place == "view" else Refused
            return {}, 201

        def exiting(view):
            @wraps(view)
            def leave():
                response = None
                with suppress(Refused):
                    response = view()
                if len(runs) == 1:
                    raise kind
                return response

            return leave

        options = {} if atomic else {"atomic": False, "on_interrupted": "retry"}
        add(shop, pay, exiting, **options)
        with pytest.raises(kind):
            shop.post()
        assert shop.count() == 0
        again = shop.post()
        assert (again.status_code, is_replayed(again)) == (201, False)
        assert (shop.count(), len(runs)) == (1, 2)
        if shop.store != "sql":
            shop.assert_clean()


def swallowing(*functions):
    """A view that calls functions one after another, and swallows their errors."""

    def view():
        results = []
        for function in functions:
            try:
                results.append(function().get_json())
            except Exception as error:
                results.append(type(error).__name__)
        return {"results": results}, 201

    return view


class TestCalledByOthers:
    """An attempt never takes the response of another."""

    @pytest.mark.parametrize("atomic", [True, False])
    def test_a_second_function_of_one_request_is_refused(self, shop, atomic, caplog):
        second_runs = []

        @idempotent(name="first", atomic=atomic)
        def first():
            buy(shop)
            raise Refused

        second = idempotent(name="second", atomic=atomic)(lambda: second_runs.append(1))
        shop.app.post("/payments", endpoint="both")(swallowing(first, second))
        assert shop.post().json == {"results": ["Refused", "ConfigurationError"]}
        assert shop.post().json["results"][1] == "ConfigurationError"
        assert [each.status for each in shop.records() if each.status] == ([] if atomic else [500])
        assert shop.count() == (0 if atomic else 1)
        assert second_runs == []
        ours = told(caplog, logging.ERROR)
        assert len([text for text in ours if "a second idempotent function" in text]) == 1, ours

    @pytest.mark.parametrize("atomic", [True, False])
    def test_what_tries_a_view_again_stands_below(self, shop, atomic):
        """Above, the second try is refused, and its response is not taken for the first one's."""
        runs = []

        def twice(view):
            @wraps(view)
            def again():
                with suppress(Refused):
                    return view()
                return view()

            return again

        def pay():
            buy(shop)
            runs.append(1)
            if len(runs) == 1:
                raise Refused
            return {}, 201

        shop.app.register_error_handler(Exception, lambda error: (str(error), 400))
        add(shop, pay, twice, atomic=atomic)
        refused, again = shop.post(), shop.post()
        assert "what tries again do so below @idempotent" in refused.text
        assert (again.status_code, is_replayed(again)) == ((201, False) if atomic else (500, True))
        assert (shop.count(), len(runs)) == ((1, 2) if atomic else (1, 1))

    @pytest.mark.parametrize("place", ["decorator", "after_request"])
    def test_an_error_above_what_the_view_left_undoes_it(self, shop, place):
        fails = [True]

        def fail():
            if fails:
                fails.pop()
                raise ZeroDivisionError
            shop.db.session.commit()

        def failing(view):
            @wraps(view)
            def call():
                response = view()
                if place == "decorator":
                    fail()
                return response

            return call

        @shop.app.after_request
        def after(response):
            if place == "after_request" and response.status_code < 500:
                fail()
            return response

        add(shop, paying(shop, commit=False)[0], failing)
        assert shop.post().status_code == 500
        assert shop.count() == 0
        again = shop.post()
        assert (again.status_code, is_replayed(again)) == (201, False)
        assert shop.count() == 1

    def test_a_problem_is_written_in_place(self, shop, assert_problem, store):
        """The application's CORS headers stay, the view's own go."""
        if store == "sql":
            return  # SQLite has no deadlocks, nor deferred constraints but of foreign keys
        shop.sql(
            "ALTER TABLE payment ADD CONSTRAINT late UNIQUE (amount) DEFERRABLE INITIALLY DEFERRED"
        )

        @shop.app.after_request
        def commit(response):
            response.headers["Access-Control-Allow-Origin"] = "https://one.example"
            if response.status_code == 201:
                shop.db.session.commit()
                session = shop.db.session
                pid = session.scalar(sa.text("SELECT pg_backend_pid()"))
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
    def test_a_mistake_is_logged_once_whatever_handlers_there_are(self, shop, handler, caplog):
        if handler is not None:
            shop.app.register_error_handler(handler, lambda _error: ({"sorry": True}, 500))
        add(shop, paying(shop, commit=False)[0])  # nobody commits
        for _ in range(3):
            assert shop.post().status_code == 500
        assert shop.count() == 0
        ours = told(caplog, logging.ERROR)
        assert len([text for text in ours if "nobody committed" in text]) == 1, ours

    @pytest.mark.parametrize("handler", [None, Exception, 500])
    def test_a_mistake_in_the_set_up_is_logged_once(self, shop, handler, caplog):
        if handler is not None:
            shop.app.register_error_handler(handler, lambda _error: ({"sorry": True}, 500))
        pay = paying(shop)[0]
        shop.app.add_url_rule("/payments", "pay", pay, methods=["POST"])
        idempotent(pay)
        for _ in range(3):
            assert shop.post().status_code == 500
        assert shop.count() == 0
        ours = [text for text in told(caplog, logging.ERROR) if "Put @idempotent below" in text]
        assert len(ours) == 1, ours

    @pytest.mark.parametrize("raises", [True, False])
    def test_a_commit_beside_what_is_not_stored_is_said_once(self, shop, raises, caplog):
        def pay():
            buy(shop)
            if raises:
                abort(403)
            return {}, 403

        add(shop, pay)
        for _ in range(3):
            assert shop.post().status_code == 403
        assert shop.count() == 0
        assert len(undone(caplog)) == 1

    def test_so_is_one_beside_an_error_of_what_the_view_registered(self, shop, caplog):
        """Flask hands that to the handler, too: the client sees its 409, and nothing is stored."""

        def pay():
            @after_this_request
            def fail(_response):
                raise ZeroDivisionError

            buy(shop)
            raise Refused

        refuse(shop, "all")
        add(shop, pay)
        assert [shop.post().status_code for _ in range(2)] == [409, 409]
        assert shop.count() == 0
        assert len(undone(caplog)) == 1

    def test_no_success_is_sent_for_what_is_not_stored(self, shop):
        """Flask swallows errors of functions after a request while it handles another error."""

        def apologize(_error):
            buy(shop, commit=False)  # nobody commits
            return {"fine": True}, 200

        shop.app.register_error_handler(500, apologize)
        pay, _ = paying(shop, Refused())
        add(shop, pay)
        response = shop.post()
        assert shop.count() == 0
        assert response.status_code == 500

    @pytest.mark.parametrize("kind", ["rolls back", "rejects"])
    def test_what_the_view_committed_stays_where_the_rest_is_dropped(self, shop, kind):
        """As without the extension: there a committed row is beyond what comes above."""

        @shop.app.after_request
        def drop(response):
            if kind == "rolls back":
                shop.db.session.rollback()
            else:
                response.status_code = 409
            return response

        def pay():
            buy(shop)
            buy(shop, commit=False)
            return {}, 201

        add(shop, pay)
        assert shop.post().status_code == (201 if kind == "rolls back" else 409)
        assert shop.count() == 1
        again = shop.post()
        assert again.headers["Idempotent-Replayed"] == "true"
        assert shop.count() == 1

    @pytest.mark.parametrize("raises", [True, False])
    def test_an_audit_above_a_rejection_stays(self, shop, raises):
        """What is not stored is rolled back before any after_request function."""

        @shop.app.after_request
        def audit(response):
            shop.db.session.add(shop.Payment(amount=response.status_code))
            shop.db.session.commit()
            return response

        def pay():
            buy(shop, commit=False)
            if raises:
                abort(403)
            return {}, 403

        add(shop, pay)
        assert shop.post().status_code == 403
        assert shop.sql("select amount from payment") == [(403,)]


class TestKindsOfViews:
    @KINDS
    @pytest.mark.parametrize("raises", [True, False])
    def test_async(self, shop, assert_replayed, atomic, raises):
        async def pay():
            buy(shop)
            if raises:
                raise Refused
            return {}, 201

        refuse(shop, "class")
        add(shop, pay, atomic=atomic)
        first = shop.post()
        assert first.status_code == (409 if raises else 201)
        assert_replayed(first, shop.post())
        assert shop.count() == 1

    @KINDS
    @pytest.mark.parametrize("raises", [True, False])
    def test_methods(self, shop, assert_replayed, atomic, raises):
        pay, runs = paying(shop, Refused() if raises else None)

        class Payments(MethodView):
            decorators = (idempotent(atomic=atomic), passing)

            def post(self):
                return pay()

        refuse(shop, "class")
        shop.app.add_url_rule("/payments", view_func=Payments.as_view("payments"))
        first = shop.post()
        assert first.status_code == (409 if raises else 201)
        assert_replayed(first, shop.post())
        assert (shop.count(), len(runs)) == (1, 1)

    @KINDS
    @pytest.mark.parametrize("kind", ["stream", "file"])
    def test_streams_and_files(self, shop, tmp_path, assert_replayed, atomic, kind):
        (tmp_path / "receipt").write_bytes(b"paid" * 1000)

        def pay():
            buy(shop)
            if kind == "file":
                return send_file(tmp_path / "receipt", mimetype="text/plain")
            return stream_with_context(str(each) + request.path for each in range(3))

        add(shop, pay, atomic=atomic)
        first = shop.post(buffered=True)
        assert first.data == (b"paid" * 1000 if kind == "file" else b"0/payments1/payments2/payments")
        assert_replayed(first, shop.post())
        assert shop.count() == 1

    def test_a_stream_that_fails_is_an_error_of_the_view(self, shop):
        def pay():
            def lines():
                buy(shop)
                yield "one"
                raise Refused

            return lines()

        refuse(shop, "class")
        add(shop, pay)
        assert [shop.post().status_code for _ in range(2)] == [409, 409]
        assert shop.count() == 1

    def test_reading_passes_untouched(self, shop):
        @idempotent
        def pay():
            return {"read": True}

        shop.app.add_url_rule("/payments", "pay", pay, methods=["GET", "POST"])
        for method in "GET", "HEAD", "OPTIONS":
            assert shop.post(method=method, key="not, a key").status_code == 200
        assert shop.records() == []
