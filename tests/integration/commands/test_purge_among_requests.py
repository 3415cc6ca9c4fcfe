"""The purge among requests and other purges: whom it never stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.commands.purging import EXPIRE, FILL, outside, purged, send_purge
from tests.stores import BOTH


def test_two_purges_do_not_wait_for_each_other_and_share_the_work(world):
    world.sql(FILL.format(3000))
    with outside(world) as other:
        assert send_purge(other) == 1000
        began = time.monotonic()
        assert sum(purged(world, 300)) == 2000
        assert time.monotonic() - began < 10
        other.connection.commit()
    assert world.records() == []

    world.sql(FILL.format(4000))
    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(lambda _: sum(purged(world, 50)), range(4)))
    assert sum(counts) == 4000, counts
    assert world.records() == []


@BOTH
def test_first_requests_and_replays_do_not_fail_while_it_runs(world, pay):
    done = threading.Event()
    failures: list[Any] = []

    def again_and_again(work: Callable[[], Any]) -> Callable[[], int]:
        def run() -> int:
            rounds = 0
            while not done.is_set():
                work()
                rounds += 1
            return rounds

        return run

    def send(path: str, key: str) -> Any:
        answer = pay(path, key)
        while path == "/brief" and answer.status_code == 409 and answer.headers["Retry-After"]:
            answer = pay(path, key)  # it expired just now, and the purge is deleting it
        return answer

    def requests(thread: int) -> int:
        for number in range(20):
            for path in ("/payments", "/brief"):
                answers = [send(path, f"{thread}-{number}") for _ in range(3)]
                failures.extend(a for a in answers if a.status_code != 201)
                if path == "/payments" and len({answer.data for answer in answers}) != 1:
                    failures.append(answers)
        return 20

    expire = f"{EXPIRE} where name = 'brief' and state = 'completed' and expires_at > now()"
    with ThreadPoolExecutor(8) as pool:
        background = [
            pool.submit(again_and_again(work))
            for work in (lambda: world.sql(expire), lambda: purged(world), lambda: purged(world, 3))
        ]
        try:
            assert list(pool.map(requests, range(4))) == [20] * 4
        finally:
            done.set()
        assert all(rounds.result() > 5 for rounds in background)
    assert failures == []
    kept = world.sql("select count(*) from idempotency_record where name = 'pay'")
    assert kept == [(80,)]
    assert world.count() > 160, "records of /brief have expired while they were used"


def test_a_replay_is_served_while_its_record_is_being_deleted(world, pay):
    first = pay()
    with outside(world) as purging:
        purging.execute("delete from idempotency_record")
        began = time.monotonic()
        replay = pay()
        assert time.monotonic() - began < 5
        assert (replay.status_code, replay.data) == (201, first.data)
        assert replay.headers["Idempotent-Replayed"] == "true"
        purging.connection.commit()
    assert pay().status_code == 201
    assert world.count() == 2, "the record is gone, so the key is new"


def test_a_key_whose_expired_record_is_being_deleted_is_told_to_come_again(world, pay):
    pay()
    world.sql(EXPIRE)
    with outside(world) as purging:
        assert send_purge(purging) == 1
        refused = pay()
        assert refused.status_code == 409
        assert refused.headers["Retry-After"]
        purging.connection.commit()
    assert pay().json["attempt"] == 1
    assert world.count() == 2


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_it_does_not_mind_the_applications_isolation_level(make_world, level):
    world = make_world(
        SQLALCHEMY_ENGINE_OPTIONS={
            "connect_args": {
                "options": f"-c default_transaction_isolation={level.replace(' ', chr(92) + ' ')}"
            }
        }
    )
    world.sql(FILL.format(2000))
    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(lambda _: sum(purged(world, 20)), range(4)))
    assert sum(counts) == 2000, counts
