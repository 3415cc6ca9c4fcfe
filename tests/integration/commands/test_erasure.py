"""``flask idempotency forget``: what is deleted before it expires."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import redis

from flask_idempotency import idempotent
from flask_idempotency.cli import cli, decisions
from flask_idempotency.core.keys import scope_tail
from flask_idempotency.operate import erase as erasure
from flask_idempotency.operate.decide import Operator
from flask_idempotency.operate.find import Sought
from tests.killed import Killed

ALICE = ["forget", "--scope", "alice"]


def die() -> None:
    raise Killed


def test_it_counts_and_asks_first_and_says_what_it_leaves(world, run, pay):
    ask = world.app.test_cli_runner().invoke
    pay()
    world.app.view_functions["brief"] = idempotent(atomic=False)(die)
    with pytest.raises(Killed):
        pay("/brief")
    left = "1 record left, interrupted: release or resolve it, then run this again\n"
    result = ask(cli, ALICE, input="n\n")
    counted = "1 record to erase. Retries of these requests will run again.\n"
    assert (result.exit_code, counted + left in result.output) == (1, True)
    assert len(world.records()) == 2
    assert ask(cli, ALICE, input="y\n").output.endswith(f"1 record erased\n{left}")
    assert run(*ALICE, "--yes").output == f"0 records erased\n{left}"
    nobody = ask(cli, ["forget", "--scope", "nobody"])
    assert (nobody.exit_code, nobody.output) == (1, "no record of this scope\n"), "nothing to ask"
    assert pay().json["attempt"] == 1, "runs anew"


@pytest.mark.parametrize("which", [[], ["--key", "7", "--operation", "job"]])
def test_two_scopes_that_are_written_alike_are_told_apart(world, run, which):
    job = partial(world.idempotency.run, 7, dict, name="job")
    with world.app.app_context():
        job(scope=1)
        job(scope="1")
    refused = world.app.test_cli_runner().invoke(cli, ["forget", "--scope", "1", "--yes", *which])
    assert (refused.exit_code, len(world.records())) == (1, 2)
    assert "give --scope str:1 or --scope int:1" in refused.output
    for left in 1, 0:
        run("forget", "--scope", f"{'int' if left else 'str'}:1", "--yes", *which)
        assert len(world.records()) == left


def test_the_markers_in_redis_go_too(run, pay, redis_server):
    pay()
    client, name = redis.Redis.from_url(redis_server.url), f"*{scope_tail('alice').hex()}"
    assert client.keys(name)
    run(*ALICE, "--yes")
    assert not client.keys(name)


def test_a_dead_redis_keeps_nothing_from_being_erased(make_world, caplog):
    world = make_world(IDEMPOTENCY_REDIS_URL="redis://127.0.0.1:1/0")
    world.app.post("/payments")(idempotent(dict))
    world.post()
    result = world.app.test_cli_runner().invoke(cli, [*ALICE, "--yes"])
    assert result.output == "1 record erased\n"
    assert "Redis failed" in caplog.text


def test_requests_and_erasures_of_one_scope_do_not_disturb_each_other(world, pay, background):
    """Every request succeeds, and each run has a record of its own: what runs is never erased."""
    stop = threading.Event()

    def erase() -> int:
        erased, state = 0, world.app.extensions["idempotency"]
        with world.app.app_context():
            while not stop.is_set():
                found = Sought(scope="alice").lines(state, None, 99)
                erased += erasure.erase(state, found, Operator("ann", "test"))
        return erased

    erasing = background(erase)
    try:
        statuses = {pay(key=f"key-{n % 7}").status_code for n in range(80)}
    finally:
        stop.set()
    assert statuses == {201}
    # A claim that was erased before its row was locked is made again: two records, and one run.
    assert 0 < world.count() <= erasing.result() + len(world.records())


def test_many_records_are_erased_in_batches_and_more_than_go_at_once_are_said(
    run, pay, monkeypatch, caplog
):
    monkeypatch.setattr(decisions, "MOST", 5)
    monkeypatch.setattr(erasure, "BATCH", 2)
    for number in range(6):
        pay(key=f"key-{number}")
    more = "these are the newest 5: run this again for the others\n"
    assert run(*ALICE, "--yes").output == f"5 records erased\n{more}"
    assert run(*ALICE, "--yes").output == "1 record erased\n"
    erased = [line.records for line in caplog.records if getattr(line, "did", "") == "erased"]
    assert erased == [2, 2, 1, 1], "a line for each batch"
