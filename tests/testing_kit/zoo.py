"""Endpoints as people write them, wrong and right ones, for the kit to tell apart.

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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import wraps
from typing import Any

import sqlalchemy as sa
from flask import Response, redirect, request, stream_with_context

from flask_idempotency import IdempotencyError, after_commit, current_operation, idempotent
from tests.testing_kit.conftest import Shop
from tests.waiting import wait_until


class Zoo(Shop):
    """The shop with accounts, an outbox, and a ledger in a database of its own."""

    def __init__(self, store: str, uri: str, **config: Any) -> None:
        ledger = uri.replace("shop.db", "ledger.db")  # PostgreSQL: the same one, on another engine
        super().__init__(store, uri, SQLALCHEMY_BINDS={"ledger": ledger}, **config)
        self.over = threading.Event()

    def add_models(self) -> None:
        """The tables."""
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
        """Let go of the view that never returns, too."""
        self.over.set()
        with self.app.app_context():
            pools = [engine.pool for engine in self.db.engines.values()]
        wait_until(lambda: not any(pool.checkedout() for pool in pools), "no connection is in use")
        super().close()

    def charged(self) -> int:
        """The charges at the provider."""
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
    """Add a wrong endpoint."""
    return lambda build: WRONG.append(Endpoint(build, words))


def second_writer(build: Callable[[Zoo], Any]) -> None:
    """Add one that writes outside the operation's transaction. SQLite itself lets nobody do that."""
    words = ("The retry repeated", "write through db.session")
    WRONG.append(Endpoint(build, words, ("hybrid",)))


def right(build: Callable[[Zoo], Any]) -> None:
    """Add a right endpoint."""
    RIGHT.append(Endpoint(build, ()))


# Not protected, or not as one thinks.


@wrong("ran no operation", "Is @idempotent on the view")
def no_protection(shop):
    """The decorator was forgotten on one route of twenty."""
    shop.view(shop.pay, protect=None)


@wrong("ConfigurationError", "is not protected", "Put @idempotent below the route")
def protection_above_the_route(shop):
    """Decorators look as if their order did not matter; Flask registered the view underneath."""

    @idempotent
    @shop.app.post("/payments")
    def pay():
        return shop.pay()


def without_the_key(application):
    """A WSGI middleware that passes on only the headers that it knows."""

    def call(environ, start_response):
        environ.pop("HTTP_IDEMPOTENCY_KEY", None)
        return application(environ, start_response)

    return call


@wrong("key-required", "The route saw no key: middleware removed the header")
def a_middleware_that_strips_the_key(shop):
    """The gateway in front has a list of headers, made years ago."""
    shop.app.wsgi_app = without_the_key(shop.app.wsgi_app)
    shop.view(shop.pay)


@wrong("ran no operation", "The route saw no key: middleware removed the header")
def a_middleware_that_strips_a_key_that_nobody_misses(shop):
    """The same, silently: where no key is required, the request goes through unprotected."""
    shop.app.wsgi_app = without_the_key(shop.app.wsgi_app)
    shop.view(shop.pay, required=False)


@wrong("a duplicate got 200", "no replay", "an error handler turned a rejection into this response")
def a_handler_that_makes_every_rejection_a_success(shop):
    """An error handler for all exceptions, in an API whose errors are 200 with a code inside."""
    shop.app.register_error_handler(IdempotencyError, lambda error: {"error": str(error)})
    shop.view(lambda: shop.pay()[0])


# The wrong key, scope or fingerprint.


@wrong("taken for the first one", "The two share their keys", "scope=")
def one_scope_for_everybody(shop):
    """``scope=None`` from the tutorial, in an API that has had users since."""
    shop.view(shop.pay)
    return {**ALICE, "other": BOB}


@wrong("the same key got 201", "was not rejected", "its scope, which must not come from the body")
def a_scope_from_the_body(shop):
    """The client says who it is: a changed body is another operation, and runs."""
    shop.view(shop.pay, scope=lambda: request.get_json()["account"])
    return {"json": {"account": "alice", "amount": 5}}


@wrong("the same key got 201", "was not rejected", "the route's fingerprint")
def a_fingerprint_without_the_amount(shop):
    """The list of fields was right before a field was added."""
    shop.view(shop.pay, fingerprint=["/currency"])


@wrong("a duplicate got 422", "depend on a time or a random number")
def a_fingerprint_that_is_random(shop):
    """A signature or a time of receipt is part of what the callable hashes."""
    shop.view(shop.pay, fingerprint=lambda: os.urandom(8))


@wrong("got 422", "A key must name the whole operation")
def a_natural_key_that_is_not_the_whole_identity(shop):
    """An order has several payments, but the key is the order alone."""
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
    """A quota or a fee that is booked for every request, replays too."""
    shop.app.before_request(shop.charge)
    shop.view(shop.pay)
    return {"effects": shop.effects}


@wrong("after a retry", "charges rose by 2", "before_request, after_request and teardown")
def a_charge_in_after_request(shop):
    """A notification for each success; a replay is one, too."""

    @shop.app.after_request
    def notify(response):
        if response.status_code == 201:
            shop.charge()
        return response

    shop.view(shop.pay)
    return {"effects": shop.effects}


@wrong("charges rose by 4", "decorators above @idempotent")
def a_charge_in_a_decorator_above(shop):
    """The billing decorator stands above @idempotent, and runs for each replay."""

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
    """``store`` turns a soft failure away, but the provider has been called."""

    def view():
        shop.charge()
        return {"status": "pending"}, 202

    shop.view(view, store=lambda response: response.status_code != 202)
    return {"effects": shop.charged}


# An effect in the view that no rollback undoes.


@wrong("\n  charges rose by 2, not by 1\n", "a call to another system")
def a_charge_before_the_commit(shop):
    """The order in which one thinks: money first, then the row."""

    def view():
        shop.charge()
        return shop.pay()

    shop.view(view)
    return {"effects": shop.effects}


@wrong("\n  charges rose by 2, not by 1\n", "a call to another system")
def a_charge_while_the_response_is_streamed(shop):
    """A generator "runs after the view": here it is read before the commit."""

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
    """Plain SQL is quicker to write than a model."""

    def view():
        with shop.db.engine.begin() as connection:
            connection.execute(sa.insert(shop.Payment))
        return {}, 201

    shop.view(view)


@second_writer
def a_thread_that_writes(shop):
    """Slow work is done beside the view, which waits for it."""

    def work():
        with shop.app.app_context():
            shop.pay()

    def view():
        with ThreadPoolExecutor() as pool:
            pool.submit(work)
        return {}, 201

    shop.view(view)


@wrong("NotAtomic", "uses another bind")
def a_write_to_another_bind(shop):
    """The ledger is a database of its own; no transaction spans both."""

    def view():
        shop.db.session.add(shop.Entry())
        return shop.pay()

    shop.view(view)


@wrong("rows of entry (bind 'ledger') rose by 2", "another bind")
def a_write_to_another_bind_that_is_allowed(shop):
    """``other_binds`` was set to silence the error."""

    def view():
        shop.db.session.add(shop.Entry())
        return shop.pay()

    shop.view(view, other_binds=["ledger"])


@wrong("rows of payment rose by 2", "by a commit in a view with atomic=False")
def a_commit_that_is_not_atomic_and_run_again(shop):
    """``on_interrupted="retry"`` was set so that nobody has to look at interrupted operations."""
    shop.view(shop.pay, atomic=False, on_interrupted="retry")


@wrong("rose by 2", "derive_key")
def a_step_without_a_key(shop):
    """A step looks as if it could not run twice; it can, until it is recorded."""

    def view():
        current_operation.step("charge", shop.charge)
        return {}, 201

    shop.view(view, atomic=False, on_interrupted="retry")
    return {"effects": shop.charged}


@wrong("rose by 2", "derive_key")
def a_step_whose_key_is_new_each_time(shop):
    """The provider asks for a key, so it gets one: a random one."""

    def view():
        current_operation.step("charge", shop.charge, str(uuid.uuid4()))
        return {}, 201

    shop.view(view, atomic=False, on_interrupted="retry")
    return {"effects": shop.charged}


@wrong("rows of payment rose by 2", "by a commit in a view with atomic=False")
def a_step_that_commits_by_itself(shop):
    """A step that writes rows is not atomic unless it says so."""

    def view():
        current_operation.step("pay", lambda: shop.pay()[0])
        return {}, 201

    shop.view(view, atomic=False, on_interrupted="retry")


@wrong("NotAtomic", "made a request to its own application")
def a_request_to_another_protected_route(shop):
    """One endpoint makes use of another by HTTP, with a key that is new for each attempt."""

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
    """``after_commit`` is not run twice, but a worker that dies does not run it at all."""

    def view():
        after_commit(shop.charge)
        return shop.pay()

    shop.view(view)
    return {"effects": shop.effects}


@wrong("and a retry", "rows of payment changed by +0, not by +1", "is above 1")
def a_view_that_trusts_the_attempt_before_it(shop):
    """A second attempt must be a retry, so the row is there: but it was rolled back."""

    def view():
        if current_operation.attempt > 1:
            return {"id": 0}, 201
        return shop.pay()

    shop.view(view)


@wrong("rows of message changed by +0, not by +1", "current_operation.attempt is above 1")
def a_row_that_a_retry_forgets(shop):
    """The first attempt has written the outbox's row: but it was rolled back."""

    def view():
        if current_operation.attempt == 1:
            shop.db.session.add(shop.Message())
        return shop.pay()

    shop.view(view)


@wrong("rows of message rose by 2, not by 1", "current_operation.attempt is above 1")
def a_row_that_a_retry_doubles(shop):
    """A second attempt is noted in the same table."""

    def view():
        shop.db.session.add_all(shop.Message() for _ in range(current_operation.attempt))
        return shop.pay()

    shop.view(view)


@wrong("nothing was counted", "Does the view commit it, and roll nothing back")
def a_success_with_an_error_inside(shop):
    """Every exception becomes 200 with a message; the rollback has taken the row away."""

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
    """The flush gave the row its id, so the response looks right."""

    def view():
        payment = shop.Payment()
        shop.db.session.add(payment)
        shop.db.session.flush()
        return {"id": payment.id}, 201

    shop.view(view)


# A response that is not the stored one.


@wrong("header X-Request-Id", "after_request")
def a_random_header_on_each_response(shop):
    """A request's id, made where every response passes."""

    @shop.app.after_request
    def number(response):
        response.headers["X-Request-Id"] = str(uuid.uuid4())
        return response

    shop.view(shop.pay)


@wrong("body, 'served_at'", "after_request")
def a_body_with_the_time_of_sending(shop):
    """An envelope around every body: {"data": …, "served_at": …}."""

    @shop.app.after_request
    def envelope(response):
        body = {"data": response.get_json(), "served_at": time.time_ns()}
        response.set_data(shop.app.json.dumps(body))
        return response

    shop.view(shop.pay)


# A view that cannot be stopped, or does not stop.


@wrong("something caught the crash, and the first request got 500", "BaseException")
def a_view_that_catches_everything(shop):
    """Nothing may ever come out of a view: so the worker cannot even exit."""

    def view():
        try:
            return shop.pay()
        except BaseException:
            return {"ok": False}, 500

    shop.view(view)


@wrong("something caught the crash, and the view returned", "BaseException")
def a_view_that_succeeds_whatever_happens(shop):
    """It shows the error in its body, and finds that good enough."""

    def view():
        try:
            return shop.pay()
        except BaseException:
            return {"ok": False}, 200

    shop.view(view)


@wrong("has not returned within 0.3 s", "It waits for what never comes")
def a_view_that_never_returns(shop):
    """It waits for an event, a lock or another service without a time limit."""

    def view():
        shop.over.wait()
        return shop.pay()

    shop.view(view)
    return {"timeout": 0.3}


# Right ones.


@right
def an_insert(shop):
    """What @idempotent is made for."""
    shop.view(shop.pay)


@right
def a_balance_that_is_locked_and_lowered(shop):
    """No row is added; the account has less."""
    with shop.app.app_context():
        shop.db.session.merge(shop.Account(user="alice", balance=100_000))
        shop.db.session.commit()
    alice = sa.select(shop.Account).filter_by(user="alice")

    def view():
        account = shop.db.session.scalars(alice.with_for_update()).one()
        account.balance -= 500
        shop.db.session.commit()
        return {"balance": account.balance}

    shop.view(view)
    return {"effects": lambda: shop.db.session.scalars(alice).one().balance}


@right
def an_upsert(shop):
    """It sets what the client says, whether the row is there or not, as PUT does."""

    def view():
        shop.db.session.merge(shop.Account(**request.get_json()))
        shop.db.session.commit()
        return {}

    shop.view(view)
    return lambda: {"json": {"user": str(uuid.uuid4()), "balance": 5}}


@right
def an_outbox(shop):
    """What must be sent is a row, committed with the payment; a worker sends it later."""

    def view():
        shop.db.session.add(shop.Message())
        return shop.pay()

    shop.view(view)


@right
def steps_with_a_derived_key(shop):
    """The provider knows the key of the dead attempt; the row commits with its step."""

    def view():
        current_operation.step("charge", shop.charge, current_operation.derive_key("charge"))
        current_operation.step("pay", lambda: shop.pay()[0], atomic=True)
        return {}, 201

    shop.view(view, atomic=False, on_interrupted="retry")
    return {"effects": shop.effects}


@right
def steps_in_a_loop(shop):
    """The dead attempt and its retry each write some of the rows."""

    def view():
        for number in range(3):
            current_operation.step(f"pay-{number}", lambda: shop.pay()[0], atomic=True)
        return {}, 201

    shop.view(view, atomic=False, on_interrupted="retry")


@right
def a_step_that_calls_another_protected_route(shop):
    """The other route knows the derived key, as any service with idempotency keys does."""

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
    """The order is the key, so even a client without keys cannot pay twice."""
    shop.view(lambda: shop.pay(request.get_json()["order"]), key=lambda: request.get_json()["order"])

    def requests():
        body = {"order": str(uuid.uuid4()), "amount": 5}
        return {"json": body, "changed": {"json": {**body, "amount": 6}}}

    return requests


@right
def a_form_with_a_redirect(shop):
    """Post, redirect, get: a replay redirects to the same page."""

    def view():
        payment, _ = shop.pay()
        return redirect(f"/payments/{payment['id']}", 303)

    shop.view(view)
    return {"json": None, "data": {"amount": "5"}}


@right
def a_file_upload(shop):
    """The fingerprint covers the file."""

    def view():
        assert request.files["invoice"].read() == b"content"
        return shop.pay()

    shop.view(view)
    invoice = lambda: (io.BytesIO(b"content"), "invoice.pdf")  # noqa: E731
    return lambda: {"json": None, "data": {"invoice": invoice(), "amount": "5"}}


@right
def a_streamed_generator(shop):
    """It is read to its end before the commit, so what it writes commits with the record."""

    def view():
        def body():
            yield "id: "
            yield str(shop.pay()[0]["id"])

        return Response(stream_with_context(body()), 201)

    shop.view(view)


@right
def a_scope_for_each_user(shop):
    """Two users may send the same key."""
    shop.view(shop.pay, scope=lambda: request.authorization.username)
    return {**ALICE, "other": BOB}


@right
def a_rejection_that_is_stored(shop):
    """404 is a final response: a retry gets it, too."""
    shop.view(lambda: ({"error": "no such customer"}, 404))
    return {"status": 404}


@right
def a_view_that_only_reads(shop):
    """A search by POST: no effect at all."""
    shop.view(lambda: {"payments": shop.payments()})
    return {"effects": dict}
