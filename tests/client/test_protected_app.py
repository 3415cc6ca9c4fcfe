"""The clients, and Stripe's SDK, against an application that this extension protects."""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest
import stripe
from flask import request

from flask_idempotency import idempotent
from flask_idempotency.client import IdempotentSession
from flask_idempotency.core.errors import Problem
from servers import FaultProxy
from tests.served import served


@pytest.fixture
def store() -> str:
    return "postgres"


@pytest.fixture
def serve(world):
    """A function that serves the application, behind a proxy that can lose responses."""
    with served(world.app) as url, FaultProxy(url) as proxy:
        yield proxy


@pytest.fixture
def api(serve, time):
    """A session whose waits take no time."""
    with IdempotentSession() as session:
        session.trust_env = False
        session.headers["X-User"] = "alice"
        yield session


def was_replayed(response):
    return response.headers.get("Idempotent-Replayed") == "true"


class TestSession:
    def test_a_lost_response_is_replayed(self, world, add_view, serve, api):
        runs = add_view(world)
        serve.lose_answer(b"POST /payments")
        response = api.post(f"{serve.url}/payments", json={"amount": 5})
        assert (response.status_code, was_replayed(response)) == (201, True)
        assert (runs, world.count()) == ([1], 1)

    @pytest.mark.parametrize("atomic", [True, False])
    def test_it_waits_for_the_first_attempt_that_still_runs(
        self, world, add_view, serve, api, time, gate, background, atomic
    ):
        add_view(world, during=gate, atomic=atomic)  # Retry-After is the lease, 60 s
        first = background(world.post, key="pay-7", json={"amount": 5})
        gate.wait_until_reached()
        time.at_wait = lambda: (gate.open(), first.result(10))
        headers = {"Idempotency-Key": "pay-7"}
        response = api.post(f"{serve.url}/payments", json={"amount": 5}, headers=headers)
        assert (response.status_code, was_replayed(response)) == (201, True)
        assert response.content == first.result().data
        assert time.waits == [1]

    def test_an_atomic_operation_that_failed_is_run_again(self, world, add_view, serve, api):
        world.app.config["PROPAGATE_EXCEPTIONS"] = False
        failing = iter([True, False])

        def during():
            if next(failing):
                raise RuntimeError

        runs = add_view(world, during=during)
        response = api.post(f"{serve.url}/payments", json={"amount": 5})
        assert (response.status_code, was_replayed(response)) == (201, False)
        assert (runs, world.count()) == ([1, 2], 1)

    def test_a_key_that_was_used_for_another_request_is_final(self, world, add_view, serve, api, time):
        add_view(world)
        headers = {"Idempotency-Key": "pay-7"}
        assert api.post(f"{serve.url}/payments", json={"amount": 5}, headers=headers).ok
        changed = api.post(f"{serve.url}/payments", json={"amount": 6}, headers=headers)
        assert (changed.status_code, time.waits) == (422, [])


# Stripe's way to hand its body to httpx, which would like another.
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
class TestStripe:
    """An independent client: it makes its own keys, retries, and reads the replay header."""

    @pytest.fixture
    def shop(self, world):
        @world.app.before_request
        def log():
            seen.append(request.headers.get("Idempotency-Key"))

        @world.app.post("/v1/customers")
        @idempotent(scope=lambda: request.authorization.token)
        def create_customer():
            if request.form.get("name") == "busy" and not busy.pop():
                return {"error": {"type": "api_error", "message": "busy"}}, 503
            payment = world.Payment(amount=1, note=request.form["email"])
            world.db.session.add(payment)
            world.db.session.commit()
            return {"id": f"cus_{payment.id}", "object": "customer", "email": payment.note}

        @world.app.errorhandler(Problem)
        def as_stripe_does(problem):
            reused = problem.type == "key-reused"
            kind = "idempotency_error" if reused else "invalid_request_error"
            status = 400 if reused else problem.status
            return {"error": {"type": kind, "message": problem.detail}}, status

        seen, busy = [], [True, False]
        return seen

    @pytest.fixture(params=["requests", "httpx", "async httpx"])
    def create(self, request, shop, serve, monkeypatch):
        """The call that makes a customer, with each HTTP client that the SDK can use."""
        monkeypatch.setattr("stripe.HTTPClient.INITIAL_DELAY", 0.01)
        monkeypatch.setattr("stripe.HTTPClient.MAX_DELAY", 0.01)
        monkeypatch.setattr("stripe.enable_telemetry", False)
        monkeypatch.setattr("stripe.api_base", serve.url)
        monkeypatch.setattr("stripe.api_key", "sk_test_alice")
        monkeypatch.setattr("stripe.max_network_retries", 2)
        monkeypatch.setenv("NO_PROXY", "*")
        if request.param == "requests":
            http = stripe.RequestsClient()
        else:
            http = stripe.HTTPXClient(allow_sync_methods=request.param == "httpx")
        monkeypatch.setattr("stripe.default_http_client", http)
        with closing(asyncio.new_event_loop()) as loop:
            if request.param == "async httpx":
                make = stripe.Customer.create_async
                yield lambda **values: loop.run_until_complete(make(**values))
            else:
                yield stripe.Customer.create
            if request.param != "requests":
                loop.run_until_complete(http.close_async())
        if request.param != "async httpx":
            http.close()

    def test_a_call_after_a_lost_response_has_one_effect(self, world, create, shop, serve):
        serve.lose_answer(b"POST /v1/customers")
        customer = create(email="a@example.com")
        assert customer.id == "cus_1"
        assert customer.last_response.headers["Idempotent-Replayed"] == "true"
        assert len(shop) == 2
        assert len(set(shop)) == 1
        assert world.count() == 1

    def test_each_call_has_a_key_of_its_own(self, world, create, shop):
        one = create(email="a@example.com")
        two = create(email="b@example.com")
        assert "Idempotent-Replayed" not in one.last_response.headers
        assert (one.id, two.id) == ("cus_1", "cus_2")
        assert len(set(shop)) == 2

    def test_a_response_that_was_not_stored_is_asked_again(self, world, create, shop):
        customer = create(email="a@example.com", name="busy")
        assert customer.email == "a@example.com"
        assert len(shop) == 2
        assert len(set(shop)) == 1
        assert world.count() == 1

    def test_a_key_of_the_callers_is_replayed_and_guarded(self, world, create, shop):
        first = create(email="a@example.com", idempotency_key="mine")
        again = create(email="a@example.com", idempotency_key="mine")
        assert again.to_dict() == first.to_dict()
        assert again.last_response.headers["Idempotent-Replayed"] == "true"
        with pytest.raises(stripe.IdempotencyError, match="used for another request"):
            create(email="b@example.com", idempotency_key="mine")
        assert shop == ["mine"] * 3
