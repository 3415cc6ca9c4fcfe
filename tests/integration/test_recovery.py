"""A worker that dies inside a statement is noticed, and a changed request is told so although it died.

Other deaths: ``test_process_faults.py`` and ``postgres_faults``.
"""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest
import sqlalchemy as sa

from tests.stores import BOTH
from tests.waiting import wait_until

fork = multiprocessing.get_context("fork")


@BOTH
def test_a_worker_killed_inside_a_statement_blocks_nobody_for_long(world, add_view):
    def sleep_in_the_server():
        if multiprocessing.parent_process() is not None:
            world.db.session.add(world.Payment(amount=6))
            world.db.session.execute(sa.text("select pg_sleep(30)"))

    add_view(world, during=sleep_in_the_server)
    worker = fork.Process(target=world.post)
    worker.start()
    busy = "select count(*) from pg_stat_activity where query like '%pg_sleep(30)' and state = 'active'"
    wait_until(lambda: world.sql(busy) == [(1,)], "the view's statement runs")
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(20)
    retry = wait_until(lambda: (it := world.post()).status_code != 409 and it, "the row is free")
    assert retry.status_code == 201
    assert world.count() == 1
    assert world.sql("select state, attempt from idempotency_record") == [("completed", 2)]


@BOTH
def test_a_changed_request_is_told_so_even_when_the_first_one_died(world, add_view):
    def die():
        if multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)

    add_view(world, during=die)
    worker = fork.Process(target=world.post)
    worker.start()
    worker.join(20)
    assert world.post(json={"amount": 6}).status_code == 422


def test_an_exit_in_the_view_rolls_back_and_the_retry_runs_at_once(world, add_view):
    def leave():
        if runs == [1]:
            raise SystemExit

    runs = add_view(world, during=leave)
    with pytest.raises(SystemExit):
        world.post()
    world.assert_clean()
    assert world.count() == 0
    assert world.post().status_code == 201, "the lock in Redis was released too"
    assert runs == [1, 2]
