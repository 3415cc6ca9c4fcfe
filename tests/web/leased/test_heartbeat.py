"""``heartbeat=True``: a lease lives as long as its view and its process, and not a renewal longer."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from flask import Flask

import servers
from flask_idempotency import (
    ConfigurationError,
    LeaseLost,
    RequestInProgress,
    Retryable,
    StoreUnavailable,
    current_operation,
    idempotent,
)
from flask_idempotency.testing import Clock
from flask_idempotency.web.background.heartbeat import HEART, Heart, Heartbeat
from flask_idempotency.web.signals import store_failed
from tests.killed import Killed
from tests.waiting import PATIENCE_SECONDS, wait_until

PROGRAM = Path(__file__).with_name("beating.py")
ROOT = Path(__file__).parents[3]
SECONDS = 60.0


@pytest.fixture
def config(redis_server):
    return {"IDEMPOTENCY_REDIS_URL": redis_server.url}


def never():
    return False


APP = Flask("shop")


def passing(clock):
    """A heart whose rest lets the time pass."""
    beating = Heart(clock)
    beating.rest = clock.advance
    return beating


class Renewals:
    """A lease that notes when it is renewed; ``answers`` says how, from the first time on."""

    def __init__(self, clock, answers):
        self.times, self._clock, self._answers = [], clock, list(answers)

    def extend(self, seconds):
        assert seconds == SECONDS
        self.times.append(self._clock())
        answer = self._answers.pop(0) if self._answers else LeaseLost()
        if answer is not None:
            raise answer


def beats(*answers, is_held=lambda: False):
    """When a lease was renewed that is answered so, until it is lost; and what was told of it."""
    clock, told = Clock(), []
    lease = Renewals(clock, answers)
    beating = passing(clock)
    note = lambda error, left: isinstance(error, LeaseLost) or told.append((clock(), error, left))  # noqa: E731
    beating.add(Heartbeat(APP, lease, SECONDS, note, is_held, clock))
    thread = beating._thread
    if thread is not None:
        wait_until(lambda: not thread.is_alive(), "the thread ends")
    assert beating._thread is None
    return lease.times, told


def test_it_is_renewed_each_third_until_it_is_lost():
    assert beats(None, None, None) == ([20, 40, 60, 80], [])


def test_a_renewal_that_fails_is_tried_again_soon():
    away = StoreUnavailable()
    assert beats(None, away, away, None) == ([20, 40, 45, 50, 70], [(40, away, 40)])


def test_a_lease_that_has_run_out_is_told_once_and_still_tried():
    away = StoreUnavailable()
    times, told = beats(*[away] * 12, None, *[away] * 12)
    assert told == [(20, away, 40), (60, away, 0), (100, away, 40), (140, away, 0)]
    assert times == [*range(20, 85, 5), *range(100, 165, 5)]


def test_what_a_step_holds_is_neither_renewed_nor_lost():
    held = [True] * 15
    times, told = beats(None, is_held=lambda: bool(held) and held.pop())
    assert times == [20 + 15 * 5, 115]
    assert told == []


def test_an_error_of_a_store_of_ones_own_ends_no_thread():
    bug = ZeroDivisionError()
    assert beats(bug, None) == ([20, 25, 45], [(20, bug, 40)])


def test_a_report_that_fails_keeps_nobody_waiting(caplog):
    clock, told = Clock(), []

    def fail(error, left):
        told.append(left)
        raise ZeroDivisionError

    beat = Heartbeat(APP, Renewals(clock, [StoreUnavailable()] * 2), SECONDS, fail, never, clock)
    for _ in range(2):
        beat.renew()
    assert told == [60], "it is told once"
    assert beat._tried.is_set()
    assert "ZeroDivisionError" in caplog.text


def test_one_thread_renews_all():
    clock, all_there = Clock(), threading.Event()
    beating, leases, lost = passing(clock), [], []
    beating.rest = lambda seconds: all_there.wait(PATIENCE_SECONDS) and clock.advance(seconds)
    note = lambda error, _: lost.append(error)  # noqa: E731
    for _ in range(20):
        leases.append(Renewals(clock, [None]))
        beating.add(Heartbeat(APP, leases[-1], SECONDS, note, never, clock))
    thread = beating._thread
    all_there.set()
    wait_until(lambda: not thread.is_alive(), "the thread ends")
    assert [lease.times for lease in leases] == [[20, 40]] * 20
    assert [type(error) for error in lost] == [LeaseLost] * 20


def test_the_next_one_begins_a_thread_anew():
    clock = Clock()
    beating, lost = passing(clock), []
    for _ in range(3):
        lease = Renewals(clock, [])
        beating.add(Heartbeat(APP, lease, SECONDS, lambda error, _: lost.append(error), never, clock))
        wait_until(lambda: beating._thread is None, "it has ended")
        assert len(lease.times) == 1


def test_once_it_is_stopped_nothing_is_renewed_any_more():
    renewing, go_on, clock = threading.Event(), threading.Event(), Clock()

    class Slow(Renewals):
        def extend(self, seconds):
            renewing.set()
            assert go_on.wait(PATIENCE_SECONDS)
            super().extend(seconds)

    lease = Slow(clock, [None] * 100)
    beat = Heartbeat(APP, lease, SECONDS, pytest.fail, never, clock)
    thread = threading.Thread(target=beat.renew)
    stopper = threading.Thread(target=beat.stop)
    thread.start()
    assert renewing.wait(PATIENCE_SECONDS)
    stopper.start()
    stopper.join(0.05)
    assert stopper.is_alive(), "it did not wait for the renewal on its way"
    go_on.set()
    thread.join(PATIENCE_SECONDS)
    stopper.join(PATIENCE_SECONDS)
    beat.renew()
    assert len(lease.times) == 1


def test_what_is_removed_is_not_kept_until_it_is_due():
    beating, lease = Heart(), Renewals(Clock(), [])
    beat = Heartbeat(APP, lease, 0.6, pytest.fail, never)
    beating.add(beat)
    thread = beating._thread
    beating.remove(beat)
    assert not beating._beats
    thread.join(PATIENCE_SECONDS)
    assert (thread.is_alive(), lease.times) == (False, [])


def test_a_forked_child_has_none_of_its_parents():
    beating, clock = Heart(), Clock()
    beat = Heartbeat(APP, Renewals(clock, [None]), SECONDS, pytest.fail, never, clock)
    beating.add(beat)
    if (child := os.fork()) == 0:
        os._exit(1 if beating._beats or beating._thread else 0)
    assert os.waitpid(child, 0)[1] == 0
    assert beating._beats
    beating.remove(beat)


@pytest.mark.parametrize("store", ["hybrid", "postgres", "redis"], indirect=True)
def test_a_view_may_take_longer_than_its_lease(world, add, gate, background):
    """A second is the shortest lease there is."""
    runs = add(lambda: gate() or ({}, 201), lease=1, heartbeat=True, on_interrupted="retry")
    renewed = watch_renewals(world)
    first = background(world.post)
    gate.wait_until_reached()
    wait_until(lambda: len(renewed) >= 4, "it was renewed")
    assert world.post().status_code == 409
    gate.open()
    assert first.result().status_code == 201
    assert world.post().headers["Idempotent-Replayed"] == "true"
    assert runs == [1]
    wait_until(lambda: HEART._thread is None, "the thread ends")


def watch_renewals(world):
    """Notes each renewal of the leases of a store by the heartbeat."""
    renewed = []

    def watched(verb):
        def call(claim):
            lease = verb(claim)
            if hasattr(lease, "extend"):
                beaten = lease.apart() if hasattr(lease, "apart") else lease
                lease.apart, extend = lambda: beaten, beaten.extend
                beaten.extend = lambda seconds: (extend(seconds), renewed.append(seconds))
            return lease

        return call

    records = world.app.extensions["idempotency"].records
    engine = world.app.extensions["idempotency"].engine
    records.claim = watched(records.claim)
    if engine._look_or_claim is not None:
        engine._look_or_claim = watched(engine._look_or_claim)
    return renewed


@pytest.mark.parametrize("end", [Killed, SystemExit, ValueError, Retryable, None])
def test_however_a_view_ends_its_lease_is_renewed_no_more(world, add, end):
    begun, beating = [], HEART
    usual = beating.add
    beating.add = lambda beat: (begun.append(beat), usual(beat))

    def view():
        if end is not None:
            raise end
        return {}, 201

    add(view, heartbeat=True)
    with suppress(Killed, SystemExit):
        world.post()
    del beating.add
    (beat,) = begun
    assert beat.is_over
    assert beat not in beating._beats, "it would be kept until it is due, with its request"
    assert world.sql("select count(*) from idempotency_record where lease_expires_at > now()") == [(0,)]


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_who_lost_the_operation_in_the_middle_of_the_view_is_warned_of(world, add, caplog):
    def view():
        world.sql("update idempotency_record set owner = 'somebody else'")
        wait_until(lambda: "took it over" in caplog.text, "the thread notices")
        return {}, 201

    add(view, lease=1, heartbeat=True)
    assert world.post().status_code == 409
    (line,) = [each for each in caplog.records if "took it over" in each.getMessage()]
    assert (line.levelname, line.operation, line.attempt) == ("WARNING", "charge", 1)


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_a_long_step_that_is_atomic_is_no_alarm(world, add, gate, background, caplog):
    """It takes longer than the shortest lease, a second, as nobody knows of it otherwise."""
    runs = add(
        lambda: current_operation.step("save", gate, atomic=True) or ({}, 201),
        lease=1,
        heartbeat=True,
        on_interrupted="retry",
    )
    first = background(world.post)
    gate.wait_until_reached()
    over = "select lease_expires_at < clock_timestamp() - interval '0.3 s' from idempotency_record"
    wait_until(lambda: world.sql(over)[0][0], "its lease is over")
    assert world.post().status_code == 409
    gate.open()
    assert first.result().status_code == 201
    assert runs == [1]
    assert [line for line in caplog.records if line.levelname == "ERROR"] == []


@contextmanager
def beating_process(world, folder, *how):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    uri = world.app.config["SQLALCHEMY_DATABASE_URI"]
    command = [sys.executable, PROGRAM, str(uri), str(folder), *how]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        wait_until((folder / "arrived").exists, "the view runs")
        begun = lease_end(world)
        wait_until(lambda: lease_end(world) - begun > timedelta(seconds=1), "it is renewed")
        yield process
    finally:
        process.kill()
        process.communicate()


def lease_end(world):
    return world.records()[0].lease_expires_at


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_a_process_that_is_killed_loses_its_lease(world, add, tmp_path):
    add(lease=1, on_interrupted="retry")
    with beating_process(world, tmp_path) as process:
        assert world.post().status_code == 409
        process.kill()
        wait_until(lambda: world.post().status_code == 201, "the lease ends")
    assert world.records()[0].attempt == 2


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
@pytest.mark.parametrize("how", [(), ("gevent",)])
def test_a_process_that_is_paused_loses_its_lease_and_cannot_finish(world, add, tmp_path, how):
    add(lease=1, on_interrupted="retry")
    with beating_process(world, tmp_path, *how) as process:
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: world.post().status_code == 201, "the lease ends")
        process.send_signal(signal.SIGCONT)
        (tmp_path / "go_on").touch()
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert output == "409\n"
    (record,) = world.records()
    assert (record.attempt, record.state, record.status) == (2, "completed", 201)


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_a_store_that_is_away_is_told_and_the_lease_goes_on(
    make_world, databases, gate, background, caplog
):
    uri = databases.take(tables=True)
    failures = []
    with servers.FaultProxy(uri) as proxy:
        world = make_world(SQLALCHEMY_DATABASE_URI=proxy.url)

        @world.app.post("/payments")
        @idempotent(atomic=False, lease=1, heartbeat=True)
        def charge():
            gate()
            return {}, 201

        with store_failed.connected_to(lambda _app, event: failures.append(event), world.app):
            first = background(world.post)
            gate.wait_until_reached()
            proxy.refuse()
            proxy.cut()
            wait_until(lambda: failures, "the lease has run out")
            proxy.accept()
            with world.app.app_context():
                world.db.engine.dispose()  # nobody has noticed yet that its connections are dead
            running = "select count(*) from idempotency_record where lease_expires_at > now()"
            wait_until(lambda: world.sql(running) == [(1,)], "it is renewed again")
            gate.open()
            assert first.result().status_code == 201
    assert [(event.operation, event.attempt) for event in failures] == [("charge", 1)]
    (line,) = [each for each in caplog.records if "its lease has run out" in each.getMessage()]
    assert (line.operation, line.attempt) == ("charge", 1)
    assert line.id == failures[0].id is not None
    databases.give_back(uri)


def test_outside_of_a_request_too(world, gate, background):
    def work():
        gate()
        return "done"

    def run():
        with world.app.app_context():
            options = {"name": "work", "atomic": False, "lease": 1, "heartbeat": True}
            return world.idempotency.run("key-1", work, scope=None, **options)

    renewed = watch_renewals(world)
    first = background(run)
    gate.wait_until_reached()
    wait_until(lambda: len(renewed) >= 4, "it was renewed")
    with pytest.raises(RequestInProgress):
        run()
    gate.open()
    assert first.result() == run() == "done"


def test_an_atomic_route_has_no_lease_to_renew():
    with pytest.raises(ConfigurationError, match="heartbeat is an option for atomic=False"):
        idempotent(heartbeat=True)
    with pytest.raises(ConfigurationError, match="heartbeat is 1; allowed: True or False"):
        idempotent(atomic=False, heartbeat=1)


@pytest.mark.parametrize("heartbeat", [True, False])
def test_only_a_lease_that_does_not_renew_itself_can_be_too_short(
    make_world, monkeypatch, caplog, heartbeat
):
    monkeypatch.setattr("flask_idempotency.extension.worker_timeout", lambda: 30.0)
    world = make_world()
    view = idempotent(atomic=False, lease=15, heartbeat=heartbeat)(lambda: ({}, 201))
    world.app.add_url_rule("/payments", "charge", view, methods=["POST"])
    assert world.post().status_code == 201
    warned = (
        "the option lease of charge is 15 s, shorter than gunicorn's timeout of 30 s" in caplog.text
    )
    assert warned is not heartbeat
