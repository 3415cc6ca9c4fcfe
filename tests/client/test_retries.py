"""What a client tells of its retries, and how a call, a method or a test changes them."""

from __future__ import annotations

import logging
import math
import pickle
import threading

import pytest
import requests

from flask_idempotency.client import (
    IdempotentSession,
    Retry,
    RetryBudget,
    attempts_of,
    limit_retries,
)
from flask_idempotency.client.retries import Attempts
from flask_idempotency.client.verdicts import retry_after
from flask_idempotency.core.errors import PROBLEMS, OperationFailed, Retryable
from tests.client.conftest import LOST, drop_before, respond, with_async_httpx, with_httpx
from tests.client.test_howto import DOCS

BUSY = respond(409, "request-in-progress")
DOWN = respond(503)
MOVED = respond(307, Location="/there")


def unpickled(value):
    return pickle.loads(pickle.dumps(value))  # noqa: S301


class TestNumbers:
    def test_failures_are_followed_by_retries_until_the_deadline(self, call, server, time):
        server.script += [DOWN] * 30
        assert call("POST", server.url).status == 503
        assert time.waits == [0.5, 1, 2, 4, 8, *[10] * 7]
        assert len(server.seen) == 13

    def test_or_by_as_many_as_are_wanted(self, make_caller, server):
        server.script += [DOWN] * 30
        assert make_caller(retries=5)("POST", server.url).status == 503
        assert len(server.seen) == 6

    def test_waiting_for_a_running_attempt_is_no_failure(self, make_caller, server):
        server.script += [BUSY, DOWN, BUSY, BUSY, DOWN, BUSY, DOWN]
        assert make_caller(retries=2)("POST", server.url).status == 503
        assert len(server.seen) == 7

    def test_no_retries_are_no_waiting_either(self, make_caller, server):
        server.script += [BUSY]
        assert make_caller(retries=0)("POST", server.url).status == 409

    def test_a_running_attempt_is_not_asked_for_without_a_pause(self, make_caller, server, time):
        server.script += [BUSY, BUSY]
        make_caller(backoff=0)("POST", server.url)
        assert time.waits == [0.1, 0.1]


class TestProblems:
    """The server's say is the type of its problem."""

    @pytest.mark.parametrize("problem", [*PROBLEMS, OperationFailed, Retryable], ids=lambda p: p.type)
    def test_each_of_a_protected_endpoint_is_final_or_worth_a_retry(self, call, server, problem):
        server.script += [respond(problem.status, problem.type)]
        again = {"request-in-progress", "store-unavailable", "transaction-conflict", "try-again"}
        assert call("POST", server.url).status == (201 if problem.type in again else problem.status)


class TestRetryAfter:
    @pytest.mark.parametrize("name", ["Retry-After", "Date"])
    @pytest.mark.parametrize(
        "value",
        [
            "-5", "1.5", "0", "٣", "1e3", "inf", "nan", "soon", "",
            "Fri, 01 Jan 0000 00:00:00 GMT",
            "Fri, 01 Jan 2038 00:00:30 +99999999999999",
            "Fri, 01 Jan 2038 00:00:30 -9999",
            "Fri, 01 Jan 99999 00:00:00 GMT",
            "Fri, 31 Feb 2038 99:99:99 GMT",
            "Thu, 01 Jan 1970 00:00:00 GMT",
        ],
    )  # fmt: skip
    def test_nonsense_harms_nobody(self, name, value):
        headers = {"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT", name: value}
        assert 0 <= retry_after(headers) < math.inf

    @pytest.mark.parametrize("value", ["91", "9" * 5000, "Fri, 31 Dec 9999 23:59:59 GMT"])
    def test_more_than_the_deadline_ends_the_call_with_its_response(self, call, server, time, value):
        server.script += [respond(503, Retry_After=value)]
        assert call("POST", server.url).status == 503
        assert time.waits == []


class TestAttempts:
    def test_a_response_says_how_many_attempts_it_took(self, call, server):
        server.script += [drop_before, DOWN, BUSY]
        got = call("POST", server.url)
        assert attempts_of(got.response) == attempts_of(unpickled(got.response)) == 4

    def test_and_so_does_an_error(self, make_caller, server):
        server.script += [drop_before] * 3
        with pytest.raises(LOST) as lost:
            make_caller(retries=2)("POST", server.url)
        assert attempts_of(lost.value) == attempts_of(unpickled(lost.value)) == 3

    def test_a_redirect_counts_its_own(self, call, server):
        server.script += [DOWN, MOVED, DOWN, DOWN]
        response = call("POST", server.url).response
        assert [attempts_of(each) for each in [*response.history, response]] == [2, 3]

    def test_what_is_not_sent_again_is_one(self, call, server):
        assert attempts_of(call("GET", server.url).response) == 1
        assert attempts_of(requests.ConnectionError()) == 1


class TestHook:
    def test_it_is_told_of_each_retry_before_the_wait(self, make_caller, server, time):
        def note(retry):
            told.append((len(time.waits), retry))

        told = []
        server.script += [DOWN, BUSY, drop_before]
        make_caller(on_retry=note)("POST", f"{server.url}/pay?token=1")
        assert [waits for waits, _ in told] == [0, 1, 2]
        *answered, lost = [retry for _, retry in told]
        seen = {"method": "POST", "url": f"{server.url}/pay", "error": None}
        assert answered == [
            Retry(attempt=1, seconds=0.5, status=503, **seen),
            Retry(attempt=2, seconds=1, status=409, **seen),
        ]
        assert (lost.attempt, lost.seconds, lost.status) == (3, 2, None)
        assert isinstance(lost.error, LOST)

    def test_the_last_failure_is_no_retry(self, make_caller, server):
        told = []
        server.script += [DOWN] * 2
        make_caller(retries=1, on_retry=told.append)("POST", server.url)
        assert [retry.attempt for retry in told] == [1]

    def test_what_it_raises_ends_the_call(self, make_caller, server, time):
        def give_up(retry):
            raise LookupError(retry.status)

        server.script += [DOWN]
        with pytest.raises(LookupError, match="503"):
            make_caller(on_retry=give_up)("POST", server.url)
        assert (len(server.seen), time.waits) == (1, [])


class TestLog:
    @pytest.fixture(autouse=True)
    def _all_lines(self, caplog):
        caplog.set_level(logging.DEBUG, "flask_idempotency")

    def test_each_retry_is_one_line(self, call, server, caplog):
        server.script += [DOWN, BUSY]
        call("POST", f"{server.url}/pay")
        lines = [r for r in caplog.records if r.name == "flask_idempotency.client"]
        assert [line.getMessage() for line in lines] == [
            f"POST {server.url}/pay: attempt 1 failed with 503; the next one begins in 0.50 s",
            f"POST {server.url}/pay: attempt 2 failed with 409; the next one begins in 1.00 s",
        ]
        assert {line.levelname for line in lines} == {"INFO"}
        assert (lines[0].attempt, lines[0].seconds, lines[0].method) == (1, 0.5, "POST")
        assert (lines[0].url, lines[0].status, lines[0].error) == (f"{server.url}/pay", 503, None)

    @pytest.mark.usefixtures("failing_log")
    def test_logging_that_fails_stops_no_retry(self, make_caller, server):
        server.script += [DOWN, BUSY, drop_before, DOWN]
        assert make_caller(budget=RetryBudget(30))("POST", server.url).status == 201
        assert len(set(server.keys)) == 1
        server.script += [DOWN] * 9
        assert make_caller(budget=RetryBudget(10))("POST", server.url).status == 503

    def test_the_page_shows_a_real_line(self, time, caplog):
        time.chance = 0.42
        request = requests.Request("POST", "https://api.example.com/payments")
        attempts = Attempts(time.policy(backoff=1), request)
        attempts.begin()
        attempts.after_response(503, {}, b"")
        [line] = caplog.messages
        page = (DOCS / "clients.md").read_text(encoding="utf-8")
        assert f"```text\n{line}\n```" in page

    def test_no_line_holds_a_secret(self, make_caller, server, caplog):
        server.script += [drop_before, DOWN, BUSY, drop_before, DOWN, DOWN]
        url = server.url.replace("http://", "http://canary-user:canary-password@")
        sent = {"Idempotency-Key": "canary-key", "X-Token": "canary-token"}
        make_caller(budget=RetryBudget(20))(
            "POST", f"{url}/pay?q=canary-query#canary-part", content=b"canary-body", headers=sent
        )
        lines = [r for r in caplog.records if r.name == "flask_idempotency.client"]
        assert len(lines) == 6  # five retries, and why there is no other
        assert {lines[0].error, lines[3].error} <= {"ConnectionError", "RemoteProtocolError"}
        assert "canary" not in str([vars(line) for line in lines])

    def test_nor_does_one_whose_error_names_the_url(self, make_caller, stopped, caplog):
        with pytest.raises(LOST):
            make_caller(retries=1)("POST", f"{stopped.url}/pay?q=canary")
        [line] = [r for r in caplog.records if r.name == "flask_idempotency.client"]
        assert line.error in {"ConnectionError", "ConnectError"}
        assert "canary" not in str(vars(line))


class TestMethods:
    @pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"])
    def test_a_method_that_is_safe_to_repeat_is_sent_again_without_a_key(
        self, make_caller, server, method
    ):
        server.script += [drop_before, DOWN]
        assert make_caller(methods=[method])(method, server.url).status == 201
        assert server.keys == [None] * 3

    def test_its_body_is_the_same_each_time(self, make_caller, server):
        server.script += [drop_before, DOWN]
        make_caller(methods=["PUT"])("PUT", server.url, content=b"abc")
        assert [seen.body for seen in server.seen] == [b"abc"] * 3

    def test_a_method_that_is_left_out_gets_no_key_and_is_sent_once(self, make_caller, server):
        server.script += [DOWN]
        assert make_caller(methods=["PATCH"])("POST", server.url).status == 503
        assert server.keys == [None]

    def test_but_a_key_that_the_caller_gives_makes_it_repeatable(self, make_caller, server):
        server.script += [DOWN]
        call = make_caller(methods=[])
        assert call("POST", server.url, headers={"Idempotency-Key": "mine"}).status == 201
        assert server.keys == ["mine"] * 2


class TestOneCall:
    def test_a_session_lends_all_it_has_to_a_call_with_another_policy(self, server, time):
        class Own(IdempotentSession):
            name = "shop"

        with Own(time.policy(retries=0)) as session:
            session.trust_env, session.name = False, "own"
            patient = session.with_policy(time.policy(retries=2))
            server.script += [DOWN, lambda handler: handler.respond(201, {"Set-Cookie": "a=1"}, b"")]
            assert patient.post(server.url).status_code == 201
            assert (patient.name, session.cookies["a"]) == ("own", "1")
            server.script += [DOWN]
            assert session.post(server.url).status_code == 503

    @pytest.mark.parametrize("make_caller", [with_httpx, with_async_httpx], indirect=True)
    def test_a_call_with_httpx_has_its_policy_in_an_extension(self, make_caller, server, time):
        call = make_caller(retries=0)
        patient = time.policy(retries=2, header="X-Key")
        server.script += [DOWN, MOVED, DOWN]
        got = call("POST", server.url, extensions={"retry_policy": patient})
        assert (got.status, got.response.request.headers.get("X-Key") is None) == (201, False)
        server.script += [DOWN]
        assert call("POST", server.url).status == 503

    @pytest.mark.parametrize("make_caller", [with_httpx, with_async_httpx], indirect=True)
    def test_anything_else_there_is_refused(self, call, server):
        with pytest.raises(
            TypeError, match="^The extension retry_policy is 3; allowed: a RetryPolicy$"
        ):
            call("POST", server.url, extensions={"retry_policy": 3})


class TestInTests:
    def test_retries_can_be_switched_off(self, call, server, time):
        server.script += [DOWN, BUSY]
        with limit_retries():
            assert [call("POST", server.url).status for _ in range(2)] == [503, 409]
        assert time.waits == []

    @pytest.mark.parametrize("trouble", [DOWN, BUSY, respond(429, Retry_After="5")])
    def test_or_limited_and_then_nothing_waits(self, call, server, time, trouble):
        server.script += [trouble] * 9
        with limit_retries(2):
            assert call("POST", server.url).status in {503, 409, 429}
        assert len(server.seen) == 3
        assert time.waits == [0, 0]

    def test_a_policy_may_allow_fewer(self, make_caller, server):
        server.script += [DOWN] * 9
        with limit_retries(5):
            make_caller(retries=1)("POST", server.url)
        assert len(server.seen) == 2

    def test_the_budget_is_left_for_the_next_test(self, make_caller, server):
        budget = RetryBudget(0)
        server.script += [DOWN]
        with limit_retries(1):
            assert make_caller(budget=budget)("POST", server.url).status == 201
        assert budget.left == 0

    def test_the_block_that_was_entered_last_counts_until_it_is_left(self, call, server):
        def sent():
            server.seen.clear()
            server.script.extend([DOWN] * 4)
            call("POST", server.url)
            server.script.clear()
            return len(server.seen)

        outer, inner = limit_retries(1), limit_retries(2)
        with outer:
            inner.__enter__()
            assert sent() == 3
        assert sent() == 3
        inner.__exit__(None, None, None)
        assert sent() == 5

    def test_it_holds_in_other_threads(self, call, server, time):
        server.script += [DOWN]
        with limit_retries():
            thread = threading.Thread(target=call, args=("POST", server.url))
            thread.start()
            thread.join()
        assert (len(server.seen), time.waits) == (1, [])

    @pytest.mark.parametrize(("value", "error"), [(-1, ValueError), (None, TypeError)])
    def test_a_limit_that_could_not_work_is_refused(self, value, error):
        with pytest.raises(error, match=f"^retries is {value}; allowed: a whole number, 0 or more$"):
            limit_retries(value)

    def test_it_is_no_decorator(self):
        """It would do nothing for an ``async def``: its block would end before the function begins."""
        with pytest.raises(TypeError, match="not callable"):

            @limit_retries()
            async def test():
                pass

    def test_a_block_in_itself_ends_once_for_each_time(self, call, server):
        server.script += [DOWN] * 2
        once = limit_retries()
        with once:
            with once:
                pass
            assert call("POST", server.url).status == 503
        assert call("POST", server.url).status == 201
        assert len(server.seen) == 3
