"""A policy that could not work is refused where it is made, not in the first call that fails."""

from __future__ import annotations

import math
import re
from collections import Counter
from datetime import timedelta

import httpx
import pytest
from requests.adapters import HTTPAdapter

from flask_idempotency.client import (
    AsyncIdempotentClient,
    AsyncIdempotentTransport,
    IdempotentAdapter,
    IdempotentClient,
    IdempotentSession,
    IdempotentTransport,
    RetryBudget,
    RetryPolicy,
)
from flask_idempotency.client.retries import Attempts
from tests.client.outages import REQUEST, Outage

METHODS = "a set of DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"


class TestRetryPolicy:
    @pytest.mark.parametrize(
        ("name", "value", "allowed"),
        [
            ("retries", -1, "a whole number, 0 or more, or None"),
            ("deadline", 0, "a number of seconds above 0"),
            ("deadline", -1.5, "a number of seconds above 0"),
            ("deadline", math.nan, "a number of seconds above 0"),
            ("deadline", math.inf, "a number of seconds above 0"),
            ("backoff", -0.1, "a number of seconds, 0 or more"),
            ("backoff", math.nan, "a number of seconds, 0 or more"),
            ("backoff_max", math.inf, "a number of seconds, 0 or more"),
            ("methods", ["PSOT"], METHODS),
            ("methods", {"post"}, METHODS),
            ("methods", [None], METHODS),
            ("header", "", "the name of an HTTP header"),
            ("header", "Idempotency Key", "the name of an HTTP header"),
            ("permanent", (OSError(),), "a tuple of exception classes"),
        ],
    )
    def test_a_value_outside_of_its_range_is_named_with_what_is_allowed(self, name, value, allowed):
        text = f"{name} is {value!r}; allowed: {allowed}"
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            RetryPolicy(**{name: value})

    @pytest.mark.parametrize(
        ("name", "value", "allowed"),
        [
            ("retries", 1.0, "a whole number, 0 or more, or None"),
            ("retries", math.inf, "a whole number, 0 or more, or None"),
            ("retries", True, "a whole number, 0 or more, or None"),
            ("deadline", None, "a number of seconds above 0"),
            ("deadline", timedelta(seconds=5), "a number of seconds above 0"),
            ("backoff", "x", "a number of seconds, 0 or more"),
            ("backoff_max", None, "a number of seconds, 0 or more"),
            ("header", None, "the name of an HTTP header"),
            ("methods", "POST", METHODS),
            ("methods", None, METHODS),
            ("budget", 500, "a RetryBudget, or None"),
            ("on_retry", "print", "a callable, or None"),
            ("permanent", OSError, "a tuple of exception classes"),
            ("sleep", 1, "a callable"),
            ("clock", 1.0, "a callable"),
            ("random", 0.5, "a callable"),
        ],
    )
    def test_so_is_one_of_another_type(self, name, value, allowed):
        text = f"{name} is {value!r}; allowed: {allowed}"
        with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
            RetryPolicy(**{name: value})

    @pytest.mark.parametrize(
        "make",
        [
            IdempotentSession,
            lambda policy: IdempotentAdapter(policy=policy),
            lambda policy: IdempotentClient(policy=policy),
            lambda policy: AsyncIdempotentClient(policy=policy),
            lambda policy: IdempotentTransport(policy=policy),
            lambda policy: AsyncIdempotentTransport(policy=policy),
        ],
    )
    @pytest.mark.parametrize("value", [0, 5.0, RetryPolicy, {"retries": 3}])
    def test_something_else_in_its_place_is_refused_where_it_is_given(self, make, value):
        text = f"policy is {value!r}; allowed: a RetryPolicy, or None"
        with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
            make(value)

    def test_a_call_with_a_policy_of_its_own_needs_one(self):
        with pytest.raises(TypeError, match="^policy is None; allowed: a RetryPolicy$"):
            IdempotentSession().with_policy(None)

    def test_the_ends_of_the_ranges_are_taken(self):
        RetryPolicy(retries=0, deadline=0.001, backoff=0, backoff_max=0, methods=())
        RetryBudget(0)

    def test_nobody_changes_the_methods_of_a_policy_later(self):
        methods = ["PUT"]
        policy = RetryPolicy(methods=methods)
        methods.append("GET")
        assert policy == RetryPolicy(methods={"PUT"})
        assert hash(policy) == hash(RetryPolicy(methods=("PUT",)))

    @pytest.mark.parametrize("attempt", [0, 3, 8, 10])
    @pytest.mark.parametrize("seconds", [30, 45])
    def test_the_usual_one_outlives_a_fail_over(self, seconds, attempt):
        """Also if an attempt takes as long as the time-out. Seven at a time, says the page."""
        calls = failed = 0
        for seed in range(300):
            outage = Outage(seconds, attempt, seed=seed)
            outage.run(outage.policy(), [0.0] * 7)
            assert len(outage.sent) <= 7 + 100
            calls, failed = calls + outage.calls, failed + outage.failed
        assert calls == 2100
        assert failed < calls / 100

    def test_it_outlives_70_seconds_of_silence(self):
        """Says the page."""
        outage = Outage(70, 10)
        outage.run(outage.policy(budget=None), [0.0] * 1000)
        assert outage.failed == 0

    @pytest.mark.parametrize("callers", [10, 100])
    def test_more_calls_at_a_time_need_a_budget_of_75_tokens_each(self, callers):
        """Says the page."""
        outage = Outage(45)
        outage.run(outage.policy(budget=RetryBudget(75 * callers)), [0.0] * callers)
        assert outage.failed < callers / 100
        assert len(outage.sent) <= callers * 16

    @pytest.mark.parametrize("callers", [1, 10, 100])
    def test_its_budget_bounds_what_an_outage_is_sent(self, callers):
        """Callers that have no retries left go on to their next call, a second after the last."""
        outage = Outage(45, pause=1)
        outage.run(outage.policy(), [each / callers for each in range(callers)])
        assert len(outage.sent) <= outage.calls + 100
        assert len(outage.sent) <= 45 * callers + 100
        most = max(Counter(int(at) for at in outage.sent).values())
        assert most <= 3 * callers + 2

    def test_a_thousand_calls_of_an_outage_are_1100_requests(self):
        policy, requests_sent = RetryPolicy(sleep=lambda _seconds: None), 0
        for _ in range(1000):
            attempts, again = Attempts(policy, REQUEST), True
            while again:
                attempts.begin()
                requests_sent += 1
                again = attempts.after_response(503, {}, b"") is not None
        assert requests_sent == 1100

    def test_a_wait_after_very_many_failures_is_the_longest(self, time):
        policy = time.policy(retries=5000, backoff=0.1, backoff_max=7)
        attempts = Attempts(policy, REQUEST)
        for _ in range(5000):
            attempts.begin()
        assert attempts.after_response(503, {}, b"") == 7


class TestWhatIsWrapped:
    @pytest.mark.parametrize(
        ("make", "value", "allowed"),
        [
            (IdempotentAdapter, HTTPAdapter, "an adapter of requests that is not an IdempotentAdapter"),
            (
                IdempotentAdapter,
                RetryPolicy(),
                "an adapter of requests that is not an IdempotentAdapter",
            ),
            (
                IdempotentTransport,
                httpx.AsyncHTTPTransport(),
                "an httpx.BaseTransport that is not an IdempotentTransport",
            ),
            (
                AsyncIdempotentTransport,
                httpx.HTTPTransport(),
                "an httpx.AsyncBaseTransport that is not an AsyncIdempotentTransport",
            ),
        ],
    )
    def test_something_that_cannot_send_is_refused_at_once(self, make, value, allowed):
        text = f"wrapped is {value!r}; allowed: {allowed}"
        with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
            make(value)

    @pytest.mark.parametrize("make", [IdempotentAdapter, IdempotentTransport, AsyncIdempotentTransport])
    def test_one_of_ours_would_multiply_the_attempts(self, make):
        with pytest.raises(ValueError, match=f"allowed: .* that is not an {make.__name__}$"):
            make(make())
