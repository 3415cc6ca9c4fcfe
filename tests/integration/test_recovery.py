"""Dead workers and lost connections: who runs next, and what comes back to the pool."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest
import sqlalchemy as sa

from flask_idempotency import current_operation, idempotent
from flask_idempotency.core.machine import Phase
from flask_idempotency.web.attempt import Attempt
from tests.stores import BOTH

fork = multiprocessing.get_context("fork")


def pay_view(world, before_commit=lambda: None, after_commit=lambda: None):
    """Register the protected view of POST /payments."""

    @world.app.post("/payments")
    @idempotent
    def pay():
        world.db.session.add(world.Payment(amount=1))
        before_commit()
        world.db.session.commit()
        after_commit()
        return {"attempt": current_operation.attempt}, 201


def die_in_the_view(world, place="after_commit"):
    """Send one request from a process that is killed with SIGKILL inside its view."""
    inside = fork.Event()

    def stop_here():
        if multiprocessing.parent_process() is not None:
            inside.set()
            signal.pause()

    pay_view(world, **{place: stop_here})
    worker = fork.Process(target=world.post)
    worker.start()
    assert inside.wait(20)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(20)


@BOTH
@pytest.mark.parametrize("place", ["before_commit", "after_commit"])
def test_a_worker_killed_in_its_view_blocks_nobody_for_long(world, place):
    die_in_the_view(world, place)
    assert [r.state for r in world.records()] == ["in_progress"]
    started, answers = time.monotonic(), []
    while not answers or answers[-1].status_code == 409:
        assert time.monotonic() - started < 5
        answers.append(world.post())
    assert answers[-1].status_code == 201
    assert answers[-1].json == {"attempt": 2}
    assert world.count() == 1
    assert time.monotonic() - started < 2.5, "probe age, and what a busy machine adds"
    assert world.post().json == {"attempt": 2}


@BOTH
def test_a_changed_request_is_told_so_even_when_the_first_one_died(world):
    die_in_the_view(world)
    assert world.post(json={"amount": 6}).status_code == 422


@BOTH
def test_a_worker_killed_inside_a_statement_is_noticed(world):
    inside = fork.Event()

    def sleep_in_the_server():
        if multiprocessing.parent_process() is not None:
            inside.set()
            world.db.session.execute(sa.text("select pg_sleep(30)"))

    pay_view(world, before_commit=sleep_in_the_server)
    worker = fork.Process(target=world.post)
    worker.start()
    assert inside.wait(20)
    busy = "select count(*) from pg_stat_activity where query like '%pg_sleep(30)' and state = 'active'"
    while world.sql(busy)[0][0] == 0:
        pass
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(20)
    started = time.monotonic()
    while (answer := world.post()).status_code == 409:
        assert time.monotonic() - started < 10
    assert answer.status_code == 201
    assert world.count() == 1


@pytest.mark.parametrize("swallow", [True, False])
def test_a_view_that_lost_its_connection_cannot_commit_on_a_fresh_one(world, swallow):
    def lose_the_connection():
        if current_operation.attempt > 1:
            return
        session = world.db.session
        session.flush()
        backend = session.scalar(sa.text("select pg_backend_pid()"))
        world.sql("select pg_terminate_backend(:pid, 5000)", pid=backend)
        try:
            session.execute(sa.text("select 1"))
        except sa.exc.DBAPIError:
            if not swallow:
                raise
            session.rollback()
            session.add(world.Payment(amount=2))
            try:
                session.commit()
            except sa.exc.PendingRollbackError:
                session.rollback()

    pay_view(world, before_commit=lose_the_connection)
    first = world.post()
    assert first.status_code == 503
    assert first.headers["Retry-After"]
    assert world.count() == 0
    assert world.post().json == {"attempt": 2}
    assert world.count() == 1


@BOTH
def test_a_zombie_that_was_taken_over_can_neither_commit_nor_overwrite(world):
    paused, resume = threading.Event(), threading.Event()

    def pause_the_first():
        if current_operation.attempt == 1:
            backend = world.db.session.scalar(sa.text("select pg_backend_pid()"))
            world.sql("select pg_terminate_backend(:pid, 5000)", pid=backend)
            paused.set()
            assert resume.wait(20)

    pay_view(world, after_commit=pause_the_first)
    answers = []
    zombie = threading.Thread(target=lambda: answers.append(world.post()))
    zombie.start()
    assert paused.wait(20)
    while (second := world.post()).status_code == 409:
        pass
    resume.set()
    zombie.join(20)
    assert second.json == {"attempt": 2}
    assert answers[0].status_code == 503
    assert world.count() == 1
    assert world.post().json == {"attempt": 2}


def test_an_exit_in_the_view_rolls_back_releases_and_gives_the_connection_back(world):
    def leave():
        if current_operation.attempt == 1:
            raise SystemExit(1)

    pay_view(world, after_commit=leave)
    with pytest.raises(SystemExit):
        world.post()
    with world.app.app_context():
        assert world.db.engine.pool.checkedout() == 0
    assert world.count() == 0
    assert world.post().json == {"attempt": 2}, "at once: the lock in Redis was released too"


def test_the_teardown_is_a_net_under_the_wrapper(world, monkeypatch):
    def leave():
        if current_operation.attempt == 1:
            raise SystemExit(1)

    def struck_by_a_signal(attempt, *_error):
        attempt.phase = Phase.OPEN

    monkeypatch.setattr(Attempt, "__exit__", struck_by_a_signal)
    pay_view(world, after_commit=leave)
    with pytest.raises(SystemExit):
        world.post()
    assert world.count() == 0
    assert world.post().json == {"attempt": 2}
