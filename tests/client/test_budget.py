"""The retry budget: an outage costs a client's calls no more retries than it holds."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
import threading

import pytest
import requests

from flask_idempotency.client import IdempotentSession, RetryBudget, RetryPolicy
from flask_idempotency.client.retries import Attempts
from tests.client.conftest import LOST, drop_before, respond

IN_A_CHILD = """
import os
from flask_idempotency.client import RetryBudget, budget

whole = RetryBudget(5)
budget._lock.acquire()  # as another thread would, when the process is forked
child = os.fork()
if child == 0:
    os._exit(0 if whole.take(5) else 1)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or whole.left != 5)
"""


class TestBudget:
    def test_tokens_are_taken_while_there_are_enough(self):
        budget = RetryBudget(12)
        assert [budget.take(5) for _ in range(3)] == [True, True, False]
        assert budget.left == 2

    def test_it_never_holds_more_than_its_capacity(self):
        budget = RetryBudget(12)
        budget.take(5)
        budget.give(3)
        assert budget.left == 10
        budget.give(3)
        assert budget.left == 12

    def test_threads_take_no_token_twice(self):
        class Slow(int):
            """Lets another thread go ahead while tokens are compared with what is left."""

            def __gt__(self, left):
                other.start()
                other.join(0.05)
                return int(self) > left

        budget, taken = RetryBudget(5), []
        other = threading.Thread(target=lambda: taken.append(budget.take(5)))
        taken.append(budget.take(Slow(5)))
        other.join()
        assert (sorted(taken), budget.left) == ([False, True], 0)

    @pytest.mark.parametrize(
        "twin",
        [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))],  # noqa: S301
    )
    def test_a_copy_begins_with_what_is_left_and_counts_on_its_own(self, twin):
        budget = RetryBudget(10)
        budget.take(5)
        other = twin(budget)
        assert other.take(5)
        assert (budget.left, other.left) == (5, 0)

    def test_a_forked_process_counts_on_its_own_whatever_its_parents_threads_do(self):
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", IN_A_CHILD]
        assert subprocess.run(command, timeout=30, check=False).returncode == 0

    @pytest.mark.parametrize(
        ("value", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)]
    )
    def test_a_capacity_that_could_not_work_is_refused(self, value, error):
        text = f"capacity is {value!r}; allowed: a whole number, 0 or more"
        with pytest.raises(error, match=f"^{re.escape(text)}$"):
            RetryBudget(value)


class TestCalls:
    def test_an_outage_costs_all_calls_together_no_more_than_the_budget(self, make_caller, server):
        call = make_caller(budget=RetryBudget(50))
        server.script += [respond(503)] * 100
        assert {call("POST", server.url).status for _ in range(30)} == {503}
        assert len(server.seen) == 30 + 50 // 5

    def test_without_tokens_a_call_ends_at_once_with_its_error(self, make_caller, server, time):
        server.script += [drop_before]
        with pytest.raises(LOST):
            make_caller(budget=RetryBudget(4))("POST", server.url)
        assert time.waits == []

    def test_and_says_so(self, make_caller, server, caplog):
        server.script += [respond(503)]
        make_caller(budget=RetryBudget(0))("POST", server.url + "/pay?token=canary")
        [line] = [line for line in caplog.messages if "canary" not in line and "budget" in line]
        assert line == f"POST {server.url}/pay is not sent again: the retry budget is used up"

    def test_waiting_for_a_running_attempt_costs_nothing(self, make_caller, server):
        server.script += [respond(409, "request-in-progress")] * 7
        assert make_caller(budget=RetryBudget(0))("POST", server.url).status == 201

    @pytest.mark.parametrize(
        ("trouble", "left"),
        [([], 51), ([respond(503)], 50), ([respond(503)] * 3, 40), ([respond(503), respond(422)], 50)],
    )
    def test_a_final_response_gives_back_what_its_last_retry_cost(
        self, make_caller, server, trouble, left
    ):
        budget = RetryBudget(100)
        budget.take(50)
        server.script += trouble
        make_caller(budget=budget)("POST", server.url)
        assert budget.left == left

    @pytest.mark.parametrize(("budget", "most"), [({}, 100), ({"budget": None}, 999)])
    def test_only_without_a_budget_there_is_no_end_of_retries(self, time, budget, most):
        def retry():
            attempts.begin()
            return attempts.after_response(503, {}, b"")

        request = requests.Request("POST", "http://example.com")
        attempts = Attempts(time.policy(retries=999, backoff=0, **budget), request)
        assert len(list(iter(retry, None))) == most

    def test_policies_share_a_budget_only_if_they_are_given_one(self):
        budget = RetryBudget()
        assert RetryPolicy(budget=budget).budget is RetryPolicy(budget=budget).budget
        assert RetryPolicy().budget is not RetryPolicy().budget
        assert IdempotentSession().policy.budget is not IdempotentSession().policy.budget
