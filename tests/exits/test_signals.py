"""An exit, or a queue's time limit, inside a statement: it passes as itself, and the retry books."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from flask import Flask
from rq.timeouts import JobTimeoutException

from flask_idempotency import RequestInProgress
from tests.exits import shop
from tests.waiting import wait_until

EXITS = pytest.mark.parametrize("exits", [SystemExit, KeyboardInterrupt])
LIMITS = [SystemExit, SoftTimeLimitExceeded, JobTimeoutException]

run = partial(shop.idempotency.run, "order-1", scope=None, name="job")
run_leased = partial(run, shop.job, atomic=False, on_interrupted="retry")
run_atomic = partial(run, shop.atomic_job)


def result_of(retry: Callable[[], Any]) -> Any:
    """Retry as long as the server has not noticed that nobody waits for the first statement."""
    told: list[Any] = []

    def is_done() -> bool:
        try:
            told.append(retry())
        except RequestInProgress:
            return False
        return True

    wait_until(is_done, "the retry has a result")
    return told.pop()


def plain_request_works(app: Flask) -> None:
    before = shop.done()["payments"]
    assert app.test_client().post("/plain").status_code == 201
    assert shop.done()["payments"] == before + 1


@pytest.mark.parametrize("error", LIMITS)
def test_a_job_that_is_stopped_in_a_step_charges_once_and_books_once(shop_app, interrupted, error):
    """Its charge was made: were it stored as failed, nobody would ever book it."""
    with shop_app.app_context():
        with pytest.raises(error), interrupted(error()):
            run_leased(1)
        assert shop.done() == {"payments": 0, "charges": 1}
        assert result_of(partial(run_leased, 0)) == 2
        assert shop.done() == {"payments": 1, "charges": 1}
        assert run_leased(0) == 2, "the stored result"
    plain_request_works(shop_app)


@pytest.mark.parametrize("error", LIMITS)
def test_of_an_atomic_job_that_is_stopped_nothing_is_committed(shop_app, interrupted, error):
    with shop_app.app_context():
        with pytest.raises(error), interrupted(error()):
            run_atomic(1)
        assert shop.done()["payments"] == 0
        assert result_of(partial(run_atomic, 0)) == 2
        assert run_atomic(0) == 2, "the stored result"
    assert shop.done()["payments"] == 1
    plain_request_works(shop_app)


@EXITS
@pytest.mark.parametrize("kind", ["plain", "atomic", "leased"])
def test_an_exit_passes_through_a_view_as_without_the_extension(shop_app, interrupted, kind, exits):
    def post(seconds: int = 0) -> Any:
        headers = {"Idempotency-Key": "order-1", "X-Seconds": str(seconds)}
        return shop_app.test_client().post(f"/{kind}", headers=headers)

    def retry() -> Any:
        response = post()
        if response.status_code == 409:
            raise RequestInProgress
        return response

    with pytest.raises(exits), interrupted(exits()):
        post(1)
    assert shop.done()["payments"] == 0
    response = result_of(retry)
    assert (response.status_code, response.json) == (201, {"attempt": 2})
    assert "Idempotent-Replayed" not in response.headers
    assert shop.done() == {"payments": 1, "charges": int(kind == "leased")}
    plain_request_works(shop_app)
