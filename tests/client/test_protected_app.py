"""The session against an application that this extension protects."""

from __future__ import annotations

import pytest

from flask_idempotency.client import IdempotentSession
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
