"""Endpoints as people write them, wrong and right ones: each is tested as it is, and in every crash.

Each is a function that gives a :class:`Zoo` its view ``POST /payments``. It may return what a test
passes to ``assert_idempotent``: arguments, or a function that makes them anew for each operation.
"""

from __future__ import annotations

import io
import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Response, redirect, request, stream_with_context

from flask_idempotency import IdempotencyError, after_commit, current_operation, idempotent
from flask_idempotency.testing import assert_idempotent, every_crash
from tests.testing_kit.conftest import Shop, make_shop
from tests.waiting import wait_until

pytestmark = pytest.mark.of_tests


class Zoo(Shop):
    """The shop with accounts, an outbox, and a ledger in a database of its own."""

    def __init__(self, store: str, uri: str, **config: Any) -> None:
        ledger = uri.replace("shop.db", "ledger.db")  # PostgreSQL: the same one, on another engine
        super().__init__(store, uri, SQLALCHEMY_BINDS={"ledger": ledger}, **config)
        self.over = threading.Event()

    def add_models(self) -> None:
        super().add_models()

        class Account(self.db.Model):
            user = sa.Column(sa.String, primary_key=True)
            balance = sa.Column(sa.Integer, nullable=False)

        class Message(self.db.Model):
            id = sa.Column(sa.Integer, primary_key=True)

        class Entry(self.db.Model):
            __bind_key__ = "ledger"
            id = sa.Column(sa.Integer, primary_key=True)

        self.Account, self.Message, self.Entry = Account, Message, Entry

    def close(self) -> None:
        self.over.set()
        with self.app.app_context():
            pools = [engine.pool for engine in self.db.engines.values()]
        wait_until(lambda: not any(pool.checkedout() for pool in pools), "no connection is in use")
        super().close()

    def charged(self) -> int:
        return len(self.charges)


@dataclass(frozen=True)
class Endpoint:
    """An endpoint, and the decisive words of what the kit says of it: none, if it is right."""

    build: Callable[[Zoo], Any]
    words: tuple[str, ...]
    stores: tuple[str, ...] = ("sql", "hybrid")

    def __str__(self) -> str:
        return self.build.__name__


ALICE, BOB = ({"headers": {"Authorization": f"Basic {user}"}} for user in ("YWxpY2U6", "Ym9iOg=="))

WRONG: list[Endpoint] = []
RIGHT: list[Endpoint] = []


def wrong(*words: str) -> Callable[[Callable[[Zoo], Any]], None]:
    return lambda build: WRONG.append(Endpoint(build, words))


def second_writer(build: Callable[[Zoo], Any]) -> None:
    words = ("The retry repeated", "write through db.session")
    WRONG.append(Endpoint(build, words, ("hybrid",)))


def right(build: Callable[[Zoo], Any]) -> None:
    RIGHT.append(Endpoint(build, ()))


# Not protected, or not as one thinks.


@wrong("ran no operation", "Is @idempotent on the view")
def no_protection(shop):
    shop.view(shop.pay, protect=None)


@wrong("ConfigurationError", "is not protected", "Put @idempotent below the route")
def protection_above_the_route(shop):
    @idempotent
    @shop.app.post("/payments")
    def pay():
        return shop.pay()


def without_the_key(application):
    def call(environ, start_response):
        environ.pop("HTTP_IDEMPOTENCY_KEY", None)
        return application(environ, start_response)

    return call


@wrong("key-required", "The route saw no key: middleware removed the header")
def a_middleware_that_strips_the_key(shop):
    shop.app.wsgi_app = without_the_key(shop.app.wsgi_app)
    shop.view(shop.pay)


@wrong("ran no operation", "The route saw no key: middleware removed the header")
def a_middleware_that_strips_a_key_that_nobody_misses(shop):
    shop.app.wsgi_app = without_the_key(shop.app.wsgi_app)
    shop.view(shop.pay, required=False)


@wrong("a duplicate got 200", "no replay", "an error handler turned a rejection into this response")
def a_handler_that_makes_every_rejection_a_success(shop):
    shop.app.register_error_handler(IdempotencyError, lambda error: {"error": str(error)})
    shop.view(lambda: shop.pay()[0])


# The wrong key, scope or fingerprint.


@wrong("taken for the first one", "The two share their keys", "scope=")
def one_scope_for_everybody(shop):
    shop.view(shop.pay)
    return {**ALICE, "other": BOB}


@wrong("the same key got 201", "was not rejected", "its scope, which must not come from the body")
def a_scope_from_the_body(shop):
    shop.view(shop.pay, scope=lambda: request.get_json()["account"])
    return {"json": {"account": "alice", "amount": 5}}


@wrong("the same key got 201", "was not rejected", "the route's fingerprint")
def a_fingerprint_without_the_amount(shop):
    shop.view(shop.pay, fingerprint=["/currency"])


@wrong("a duplicate got 422", "depend on a time or a random number")
def a_fingerprint_that_is_random(shop):
    shop.view(shop.pay, fingerprint=lambda: os.urandom(8))


@wrong("got 422", "A key must name the whole operation")
def a_natural_key_that_is_not_the_whole_identity(shop):
    shop.view(shop.pay, key=lambda: request.get_json()["order"])

    def requests():
        order = str(uuid.uuid4())
        first = {"order": order, "part": 1, "amount": 5}
        return {
            "json": first,
            "changed": {"json": {**first, "amount": 6}},
            "other": {"json": {**first, "part": 2}},
        }

    return requests


# An effect outside of the view.


@wrong("charges rose by 4", "before_request, after_request and teardown")
def a_charge_in_before_request(shop):
    shop.app.before_request(shop.charge)
    shop.view(shop.pay)
    return {"effects": shop.effects}


@wrong("charges rose by 4", "decorators above @idempotent")
def a_charge_in_a_decorator_above(shop):
    def billed(view):
        @wraps(view)
        def charge_and_view():
            shop.charge()
            return view()

        return charge_and_view

    shop.view(billed(idempotent(shop.pay)), protect=None)
    return {"effects": shop.effects}


@wrong("effects() rose by", "store=... rejects the response")
def a_rejected_response_with_a_call_outside(shop):
    def view():
        shop.charge()
        return {"status": "pending"}, 202

    shop.view(view, store=lambda response: response.status_code != 202)
    return {"effects": shop.charged}


# An effect in the view that no rollback undoes.


@wrong("\n  charges rose by 2, not by 1\n", "a call to another system", "a key from derive_key")
def a_charge_before_the_commit(shop):
    def view():
        shop.charge()
        return shop.pay()

    shop.view(view)
    return {"effects": shop.effects}


@wrong("\n  charges rose by 2, not by 1\n", "a call to another system", "a key from derive_key")
def a_charge_while_the_response_is_streamed(shop):
    def view():
        def lines():
            yield "begun\n"
            shop.charge()
            yield "charged\n"

        shop.pay()
        return Response(lines(), 201)

    shop.view(view)
    return {"effects": shop.effects}


@second_writer
def a_write_through_the_engine(shop):
    def view():
        with shop.db.engine.begin() as connection:
            connection.execute(sa.insert(shop.Payment))
        return {}, 201

    shop.view(view)


@wrong("NotAtomic", "uses another bind")
def a_write_to_another_bind(shop):
    def view():
        shop.db.session.add(shop.Entry())
        return shop.pay()

    shop.view(view)


@wrong("rows of entry (bind 'ledger') rose by 2", "another bind")
def a_write_to_another_bind_that_is_allowed(shop):
    def view():
        shop.db.session.add(shop.Entry())
        return shop.pay()

    shop.view(view, other_binds=["ledger"])


@wrong("rows of payment rose by 2", "by a commit in a view with atomic=False")
def a_commit_that_is_not_atomic_and_run_again(shop):
    shop.view(shop.pay, atomic=False, on_interrupted="retry")


@wrong("rose by 2", "between step 'charge' and its record", "derive_key('charge')")
def a_step_without_a_key(shop):
    def view():
        current_operation.step("charge", shop.charge)
        return {}, 201

    shop.view(view, atomic=False, on_interrupted="retry")
    return {"effects": shop.charged}


@wrong("rose by 2", "between step 'charge' and its record", "derive_key('charge')")
def a_step_whose_key_is_new_each_time(shop):
    def view():
        current_operation.step("charge", shop.charge, str(uuid.uuid4()))
        return {}, 201

    shop.view(view, atomic=False, on_interrupted="retry")
    return {"effects": shop.charged}


@wrong("rows of payment rose by 2", "by a commit in a view with atomic=False")
def a_step_that_commits_by_itself(shop):
    def view():
        current_operation.step("pay", lambda: shop.pay()[0])
        return {}, 201

    shop.view(view, atomic=False, on_interrupted="retry")


@wrong("NotAtomic", "made a request to its own application")
def a_request_to_another_protected_route(shop):
    @shop.app.post("/messages")
    @idempotent
    def send():
        shop.db.session.add(shop.Message())
        shop.db.session.commit()
        return {}, 201

    def view():
        key = {"Idempotency-Key": str(uuid.uuid4())}
        assert shop.client.post("/messages", headers=key).status_code == 201
        return shop.pay()

    shop.view(view)


# An effect that is lost.


@wrong("charges", "right after the commit", "after_commit")
def an_effect_due_after_the_commit(shop):
    def view():
        after_commit(shop.charge)
        return shop.pay()

    shop.view(view)
    return {"effects": shop.effects}


@wrong("and a retry", "rows of payment changed by +0, not by +1", "is above 1")
def a_view_that_trusts_the_attempt_before_it(shop):
    def view():
        if current_operation.attempt > 1:
            return {"id": 0}, 201
        return shop.pay()

    shop.view(view)


@wrong("rows of message changed by +0, not by +1", "current_operation.attempt is above 1")
def a_row_that_a_retry_forgets(shop):
    def view():
        if current_operation.attempt == 1:
            shop.db.session.add(shop.Message())
        return shop.pay()

    shop.view(view)


@wrong("rows of message rose by 2, not by 1", "current_operation.attempt is above 1")
def a_row_that_a_retry_doubles(shop):
    def view():
        shop.db.session.add_all(shop.Message() for _ in range(current_operation.attempt))
        return shop.pay()

    shop.view(view)


@wrong("nothing was counted", "Does the view commit it, and roll nothing back")
def a_success_with_an_error_inside(shop):
    def view():
        try:
            shop.db.session.add(shop.Payment())
            raise ValueError("no receipt")
        except ValueError as error:
            shop.db.session.rollback()
            return {"ok": False, "error": str(error)}

    shop.view(view)


@wrong("NotAtomic", "nobody committed")
def a_view_that_does_not_commit(shop):
    def view():
        payment = shop.Payment()
        shop.db.session.add(payment)
        shop.db.session.flush()
        return {"id": payment.id}, 201

    shop.view(view)


# A response that is not the stored one.


@wrong("header X-Request-Id", "after_request")
def a_random_header_on_each_response(shop):
    @shop.app.after_request
    def number(response):
        response.headers["X-Request-Id"] = str(uuid.uuid4())
        return response

    shop.view(shop.pay)


@wrong("body, 'served_at'", "after_request")
def a_body_with_the_time_of_sending(shop):
    @shop.app.after_request
    def envelope(response):
        body = {"data": response.get_json(), "served_at": time.time_ns()}
        response.set_data(shop.app.json.dumps(body))
        return response

    shop.view(shop.pay)


# A view that cannot be stopped, or does not stop.


@wrong("something caught the crash, and the first request got 500", "BaseException")
def a_view_that_catches_everything(shop):
    def view():
        try:
            return shop.pay()
        except BaseException:
            return {"ok": False}, 500

    shop.view(view)


@wrong("something caught the crash, and the view returned", "BaseException")
def a_view_that_succeeds_whatever_happens(shop):
    def view():
        try:
            return shop.pay()
        except BaseException:
            return {"ok": False}, 200

    shop.view(view)


@wrong("has not returned within 0.3 s", "It waits for what never comes")
def a_view_that_never_returns(shop):
    def view():
        shop.over.wait()
        return shop.pay()

    shop.view(view)
    return {"timeout": 0.3}


# Right ones.


@right
def an_insert(shop):
    shop.view(shop.pay)


@right
def an_outbox(shop):
    def view():
        shop.db.session.add(shop.Message())
        return shop.pay()

    shop.view(view)


@right
def steps_with_a_derived_key(shop):
    def view():
        current_operation.step("charge", shop.charge, current_operation.derive_key("charge"))
        current_operation.step("pay", lambda: shop.pay()[0], atomic=True)
        return {}, 201

    shop.view(view, atomic=False, on_interrupted="retry")
    return {"effects": shop.effects}


@right
def steps_in_a_loop(shop):
    def view():
        for number in range(3):
            current_operation.step(f"pay-{number}", lambda: shop.pay()[0], atomic=True)
        return {}, 201

    shop.view(view, atomic=False, on_interrupted="retry")


@right
def a_step_that_calls_another_protected_route(shop):
    @shop.app.post("/messages")
    @idempotent
    def send():
        shop.db.session.add(shop.Message())
        shop.db.session.commit()
        return {}, 201

    def call(key):
        return shop.client.post("/messages", headers={"Idempotency-Key": key}).status_code

    def view():
        assert current_operation.step("send", call, current_operation.derive_key("send")) == 201
        return {}, 201

    shop.view(view, atomic=False, on_interrupted="retry")


@right
def a_natural_key(shop):
    shop.view(lambda: shop.pay(request.get_json()["order"]), key=lambda: request.get_json()["order"])

    def requests():
        body = {"order": str(uuid.uuid4()), "amount": 5}
        return {"json": body, "changed": {"json": {**body, "amount": 6}}}

    return requests


@right
def a_form_with_a_redirect(shop):
    def view():
        payment, _ = shop.pay()
        return redirect(f"/payments/{payment['id']}", 303)

    shop.view(view)
    return {"json": None, "data": {"amount": "5"}}


@right
def a_file_upload(shop):
    def view():
        assert request.files["invoice"].read() == b"content"
        return shop.pay()

    shop.view(view)
    invoice = lambda: (io.BytesIO(b"content"), "invoice.pdf")  # noqa: E731
    return lambda: {"json": None, "data": {"invoice": invoice(), "amount": "5"}}


@right
def a_streamed_generator(shop):
    def view():
        def body():
            yield "id: "
            yield str(shop.pay()[0]["id"])

        return Response(stream_with_context(body()), 201)

    shop.view(view)


@right
def a_scope_for_each_user(shop):
    shop.view(shop.pay, scope=lambda: request.authorization.username)
    return {**ALICE, "other": BOB}


@right
def a_rejection_that_is_stored(shop):
    shop.view(lambda: ({"error": "no such customer"}, 404))
    return {"status": 404}


@right
def a_view_that_only_reads(shop):
    shop.view(lambda: {"payments": shop.payments()})
    return {"effects": dict}


@pytest.fixture(scope="session")
def kit_database(postgres):
    """One of its own, for the zoo's tables."""
    return postgres.database("zoo")


@pytest.fixture
def zoo(store, request, tmp_path):
    zoo = make_shop(store, tmp_path, request, Zoo)
    zoo.folder = tmp_path
    yield zoo
    zoo.close()


def each(endpoints):
    """A test of each endpoint on the stores where it is what it is."""
    pairs = [(endpoint, store) for endpoint in endpoints for store in endpoint.stores]
    names = [f"{endpoint}-{store}" for endpoint, store in pairs]
    return pytest.mark.parametrize(("endpoint", "store"), pairs, ids=names)


def check(zoo, endpoint):
    arguments = endpoint.build(zoo) or {}

    def send():
        own = arguments() if callable(arguments) else arguments
        assert_idempotent(zoo.client, "POST", "/payments", **{"json": {"amount": 5}, **own})

    send()
    for crash in every_crash(zoo.app):
        with crash:
            send()


@each(WRONG)
def test_a_wrong_endpoint_is_told_what_is_wrong(zoo, endpoint):
    with pytest.raises(Exception) as error:  # noqa: PT011 -- a refusal of the package's own, too
        check(zoo, endpoint)
    said = f"{error.typename}: {error.value}"
    assert [words for words in endpoint.words if words not in said] == [], said


@each(RIGHT)
def test_a_right_endpoint_passes(zoo, endpoint):
    check(zoo, endpoint)
