"""``flask.after_this_request``: what the view registers belongs to the stored response."""

import functools

import pytest
import sqlalchemy as sa
from flask import Response, after_this_request, g, has_request_context

from flask_idempotency import idempotent
from flask_idempotency.flask_context import _cv_app, _is_merged


@pytest.fixture
def store():
    return "postgres"


@pytest.fixture
def shop(make_world):
    """An application in production that counts how often each function ran."""
    world = make_world(PROPAGATE_EXCEPTIONS=False)
    world.ran = []

    def register(name, change=lambda response: response):
        @after_this_request
        def function(response):
            world.ran.append(name)
            response.headers.add("X-Ran", f"{name} {len(world.ran)}")
            return change(response)

    world.register = register
    return world


def ran(response):
    return response.headers.getlist("X-Ran")


def pay(shop):
    shop.register("view")
    shop.db.session.add(shop.Payment(amount=5))
    shop.db.session.commit()
    return {"id": 1}, 201


@pytest.mark.parametrize("atomic", [True, False])
def test_what_the_view_registers_runs_once_and_its_effect_is_stored(shop, assert_replayed, atomic):
    shop.app.post("/payments", endpoint="pay")(idempotent(atomic=atomic)(functools.partial(pay, shop)))
    first, again = shop.post(), shop.post()
    assert ran(first) == ["view 1"]
    assert_replayed(first, again)
    assert shop.ran == ["view"]


def test_what_is_registered_before_the_view_or_above_it_runs_on_every_response(shop):
    shop.app.before_request(lambda: shop.register("before"))

    def above(view):
        @functools.wraps(view)
        def wrapper():
            shop.register("above")
            response = view()
            shop.register("above, later")
            return response

        return wrapper

    @shop.app.post("/payments")
    @above
    @idempotent
    def view():
        return pay(shop)

    first, again = shop.post(), shop.post()
    assert ran(first) == ["view 1", "before 2", "above 3", "above, later 4"]
    assert ran(again) == ["view 1", "before 5", "above 6", "above, later 7"]


def test_another_response_in_place_of_the_views_is_the_one_that_is_stored(shop, assert_replayed):
    @shop.app.post("/payments")
    @idempotent
    def view():
        shop.register("view", lambda response: Response("other", 202))
        return {}, 201

    first, again = shop.post(), shop.post()
    assert (first.status_code, first.text) == (202, "other")
    assert_replayed(first, again)


def test_the_response_that_the_functions_leave_says_whether_it_is_stored(shop):
    def unavailable(response):
        response.status_code = 503
        return response

    @shop.app.post("/payments")
    @idempotent
    def view():
        shop.db.session.add(shop.Payment(amount=5))
        shop.db.session.commit()
        shop.register("view", unavailable)
        return {}, 201

    assert [shop.post().status_code for _ in range(2)] == [503, 503]
    assert shop.ran == ["view", "view"]
    assert shop.count() == 0


def test_a_function_may_register_another(shop, assert_replayed):
    @shop.app.post("/payments")
    @idempotent
    def view():
        shop.register("one", lambda response: shop.register("two") or response)
        return {}

    first, again = shop.post(), shop.post()
    assert ran(first) == ["one 1", "two 2"]
    assert_replayed(first, again)


def test_a_function_may_commit_what_the_view_has_written(shop, assert_replayed):
    @shop.app.post("/payments")
    @idempotent
    def view():
        shop.register("view", lambda response: shop.db.session.commit() or response)
        shop.db.session.add(shop.Payment(amount=5))
        return {}, 201

    assert_replayed(shop.post(), shop.post())
    assert shop.count() == 1


def fail(_response):
    raise LookupError("a mistake in the function")


def test_a_function_that_raises_is_an_error_of_the_view(shop):
    @shop.app.post("/payments")
    @idempotent
    def view():
        answer = pay(shop)
        shop.register("failing", fail)
        shop.register("after it")
        return answer

    first = shop.post()
    assert first.status_code == 500
    assert shop.ran[:2] == ["view", "failing"]
    assert (shop.count(), shop.records()[0].state) == (0, "in_progress")
    assert "Idempotent-Replayed" not in shop.post().headers


def test_an_error_of_a_function_that_the_application_handles_is_stored_as_handled(
    shop, assert_replayed
):
    shop.app.register_error_handler(LookupError, lambda _error: ("handled", 409))

    @shop.app.post("/payments")
    @idempotent
    def view():
        shop.register("failing", fail)
        shop.register("after it")
        return {}

    first, again = shop.post(), shop.post()
    assert (first.status_code, first.text) == (409, "handled")
    assert_replayed(first, again)
    assert shop.ran == ["failing", "after it"]


@pytest.mark.parametrize("status", [409, 500, None])
@pytest.mark.parametrize("atomic", [True, False])
def test_what_a_view_registers_that_raises_runs_on_the_error_as_in_flask(shop, status, atomic):
    if status is not None:
        shop.app.register_error_handler(LookupError, lambda _error: ("handled", status))

    def view():
        shop.register("view")
        raise LookupError

    shop.app.post("/plain", endpoint="plain")(view)
    shop.app.post("/payments", endpoint="pay")(idempotent(atomic=atomic)(view))
    plain, first = shop.post("/plain"), shop.post()
    assert (first.status_code, first.data) == (plain.status_code, plain.data)
    assert (ran(plain), ran(first)) == (["view 1"], ["view 2"])
    again = shop.post()
    is_stored = status == 409 or not atomic
    assert ran(again) == (["view 2"] if is_stored else ["view 3"])


def test_an_async_view_and_an_async_function(shop, assert_replayed):
    @shop.app.post("/payments")
    @idempotent
    async def view():
        @after_this_request
        async def function(response):
            response.headers["X-Async"] = "yes"
            return response

        return {}

    first = shop.post()
    assert first.headers["X-Async"] == "yes"
    assert_replayed(first, shop.post())


def test_a_view_that_is_called_without_dispatch(shop):
    view = idempotent(functools.partial(pay, shop))
    shop.app.add_url_rule("/payments", "pay", view, methods=["POST"])
    headers = {"Idempotency-Key": "key-1"}
    for replayed in None, "true":
        with shop.app.test_request_context("/payments", method="POST", headers=headers):
            g.account_id = "alice"
            response = view()
            assert ran(response) == ["view 1"]
            assert response.headers.get("Idempotent-Replayed") == replayed
            context = [_cv_app.get()] if _is_merged else []  # which Flask 3.2 takes first
            assert ran(shop.app.process_response(*context, response)) == ["view 1"]


def test_what_a_function_of_run_registers_is_for_the_requests_own_response(shop):
    """Its result is no response: there is nothing that it could be stored with."""

    def send():
        if has_request_context():
            shop.register("run", lambda response: Response("changed by run", 202))
        return "sent"

    @shop.app.post("/invoices")
    def view():
        shop.register("view")
        return shop.idempotency.run("key-1", send, scope="alice", name="invoice")

    first, again = shop.post("/invoices"), shop.post("/invoices")
    assert (first.text, first.status_code) == ("changed by run", 202)
    assert again.text == "sent"
    assert ran(again) == ["view 3"]
    with shop.app.app_context():
        assert shop.idempotency.run("key-1", send, scope="alice", name="invoice") == "sent"


def test_a_problem_of_the_end_above_the_view_is_not_for_the_functions_of_the_view(shop, assert_problem):
    """What it registered is undone with it, and so are the headers that its response had."""
    shop.app.before_request(lambda: shop.register("before"))

    @shop.app.after_request
    def cut_off(response):
        if response.status_code == 201:
            shop.db.session.commit()
            pid = shop.db.session.scalar(sa.text("SELECT pg_backend_pid()"))
            shop.sql("SELECT pg_terminate_backend(:pid)", pid=pid)
        return response

    @shop.app.post("/payments")
    @idempotent
    def view():
        shop.register("view")
        shop.db.session.add(shop.Payment(amount=5))
        return {}, 201

    refused = shop.post()
    assert_problem(refused, 503, "store-unavailable", retry=True)
    assert shop.ran == ["view", "before"]
    assert ran(refused) == []
