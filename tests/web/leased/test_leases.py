"""Operations that are not atomic: one runs at a time, as long as its lease, and a late writer loses."""

import logging
from datetime import timedelta

import pytest

from flask_idempotency import ConfigurationError, current_operation
from flask_idempotency.cli import cli
from flask_idempotency.core.errors import LeaseLost
from tests.log import ours
from tests.web.leased.records import end_lease, steps


def test_it_runs_without_a_transaction(world, add):
    def view():
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        with pytest.raises(RuntimeError, match="no transaction"):
            current_operation.connection  # noqa: B018
        return {"committed": world.count()}

    runs = add(view)
    assert [world.post().json for _ in range(2)] == [{"committed": 1}] * 2
    assert (runs, world.count()) == ([1], 1)


def test_a_duplicate_is_rejected_while_the_lease_runs_though_the_retention_is_over(
    world, add, gate, background, assert_problem
):
    runs = add(lambda: gate() or {}, lease=30)
    first = background(world.post)
    gate.wait_until_reached()
    world.sql("update idempotency_record set expires_at = clock_timestamp() - interval '1 hour'")
    assert world.app.test_cli_runner().invoke(cli, ["purge"]).exit_code == 0
    duplicate = world.post()
    assert_problem(duplicate, 409, "request-in-progress", retry=True)
    assert 25 <= int(duplicate.headers["Retry-After"]) <= 30
    assert_problem(world.post(json={"amount": 6}), 422, "key-reused")
    gate.open()
    assert first.result().status_code == 201
    assert world.post().headers["Idempotent-Replayed"] == "true"
    assert runs == [1]


@pytest.mark.parametrize("place", ["between steps", "in a step"])
def test_who_was_taken_over_writes_nothing(world, add, gate, background, assert_problem, caplog, place):
    """Where both attempts may have called, the log says so: nobody else notices."""

    def view():
        if place == "in a step":
            current_operation.step("charge", lambda: current_operation.attempt == 1 and gate())
        elif current_operation.attempt == 1:
            gate()
            with pytest.raises(LeaseLost):
                current_operation.extend(10)
            with pytest.raises(LeaseLost):
                current_operation.step("charge", lambda: pytest.fail("it ran"))
        return {"attempt": current_operation.attempt}

    runs = add(view, on_interrupted="retry")
    first = background(world.post)
    gate.wait_until_reached()
    end_lease(world)
    assert world.post().json == {"attempt": 2}
    gate.open()
    assert_problem(first.result(), 409, "request-in-progress", retry=True)
    assert world.post().json == {"attempt": 2}
    assert runs == [1, 2]
    assert steps(world) == ([("charge", 2)] if place == "in a step" else [])
    expected = f"operation charge, record {world.records()[0].key.hex()[:8]}: another request took it"
    said = [line.message.startswith(expected) for line in ours(caplog, logging.ERROR)]
    assert said == ([True] if place == "in a step" else [])


def test_a_lease_is_extended_by_what_could_be_one(world, add):
    def view():
        for seconds in None, "30", 0, -1, True, float("nan"), float("inf"), 10**12:
            with pytest.raises(ConfigurationError, match="lease is .*; allowed: seconds"):
                current_operation.extend(seconds)
        current_operation.extend(timedelta(hours=1))
        left = "select extract(epoch from lease_expires_at - now()) from idempotency_record"
        return {"long": world.sql(left)[0][0] > 3500}

    add(view, lease=20)
    assert world.post().json == {"long": True}
