"""IDEMPOTENCY_PURGE_INTERVAL: expired records go without a person, and never in a request's time."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack

import psutil
import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

import servers
from flask_idempotency import Idempotency, idempotent
from flask_idempotency.core.errors import StoreUnavailable
from flask_idempotency.stores.admin import purge_of
from flask_idempotency.testing import age
from flask_idempotency.web.background.purging import BATCH, REST_SECONDS, BackgroundPurge
from tests.integration.commands.purging import FILL, outside
from tests.integration.test_workers import KINDS
from tests.waiting import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
"""A test ends a thread by an exit out of its sleep."""

LEFT = "select count(*) from idempotency_record where name = 'filled'"


class Sleeps:
    """In the place of ``time.sleep``: notes for how long, and ends the thread after so many."""

    def __init__(self, most):
        self.seconds, self._most, self.ended = [], most, threading.Event()

    def __call__(self, seconds):
        self.seconds.append(seconds)
        if len(self.seconds) > self._most:
            self.ended.set()
            raise SystemExit


def threads_that_end():
    """The threads that slept, and what they sleep with, which ends each in silence."""
    threads = []

    def sleep(_seconds):
        threads.append(threading.current_thread())
        raise SystemExit

    return threads, sleep


def start(purge, sleep):
    """A purge every 100 seconds, that sleeps as one says."""
    purging = BackgroundPurge(Flask("shop"), purge, 100.0)
    purging.rest = sleep
    purging.start()
    return purging


@pytest.fixture
def records(world):
    world.sql(FILL.format(1200))
    return world.app.extensions["idempotency"].records


def test_it_deletes_what_has_expired_in_batches_with_pauses(world, records):
    sleeps = Sleeps(5)
    start(purge_of(records), sleeps)
    assert sleeps.ended.wait(10)
    first, *rests, again = sleeps.seconds[:5]
    assert 0 <= first <= 100
    assert rests == [REST_SECONDS] * -(-1200 // BATCH)
    assert 80 <= again <= 120
    assert world.records() == []


@pytest.mark.parametrize("error", [StoreUnavailable(), RuntimeError("a bug")])
def test_it_goes_on_after_an_error(caplog, error):
    rounds = []

    def purge(_batch):
        rounds.append(1)
        raise error

    sleeps = Sleeps(3)
    start(purge, sleeps)
    assert sleeps.ended.wait(10)
    assert len(rounds) == 3
    assert caplog.text.count("goes on later") == 3


def test_a_process_has_one_however_often_it_is_started():
    threads, go_on = [], threading.Event()

    def sleep(_seconds):
        threads.append(threading.current_thread())
        assert go_on.wait(PATIENCE_SECONDS)
        raise SystemExit

    purge = start(lambda _batch: iter(()), sleep)
    only = purge._thread
    for _ in range(5):
        purge.start()
    go_on.set()
    wait_until(lambda: not only.is_alive(), "it ends")
    assert threads == [only]


def test_who_finds_another_at_it_leaves_it_alone(world, records):
    purge = purge_of(records)
    lock = "purge idempotency_record"
    with outside(world) as other:
        other.execute("select pg_advisory_xact_lock(hashtext(%s))", [lock])
        assert list(purge(BATCH)) == []
        assert world.sql(LEFT) == [(1200,)]
    assert sum(purge(BATCH)) == 1200


def test_what_has_not_expired_or_is_interrupted_stays(world, records):
    world.sql("update idempotency_record set lease_expires_at = expires_at where expires_at = "
              "(select min(expires_at) from idempotency_record)")  # fmt: skip
    world.sql("update idempotency_record set expires_at = now() + interval '1 h' where expires_at = "
              "(select max(expires_at) from idempotency_record)")  # fmt: skip
    assert sum(purge_of(records)(BATCH)) == 1198
    assert len(world.records()) == 2


def test_the_first_request_starts_it_and_no_request_does_its_work(make_world, add_view):
    world = make_world(IDEMPOTENCY_PURGE_INTERVAL=3600)
    state = world.app.extensions["idempotency"]
    threads, state.purge.rest = threads_that_end()
    add_view(world)
    assert state.purge._thread is None
    assert [world.post().status_code for _ in range(2)] == [201, 201]
    wait_until(lambda: threads, "it runs")
    assert threads[0] is not threading.current_thread()
    assert threads[0].daemon, "it would keep its worker from ending"


def test_without_the_setting_there_is_none(world):
    assert world.app.extensions["idempotency"].purge is None


@pytest.mark.parametrize(
    ("kind", "preload"),
    [("sync", "yes"), ("gthread", "no"), ("gevent", "yes"), ("gevent-cooperative", "no")],
)
def test_workers_purge_and_go_on_when_the_database_was_away(open_shop, kind, preload):
    """Some seconds: gunicorn starts and ends, and a pause between two purges is a second."""
    arguments, environment = KINDS[kind]
    environment = {**environment, "PRELOAD": preload}
    if preload == "yes":
        environment["USED_BEFORE_FORK"] = "first-key"  # whose view every worker has seen, then
    with ExitStack() as stack:
        proxies = []

        def through(url):
            proxies.append(stack.enter_context(servers.FaultProxy(url)))
            return proxies[0].url

        shop = open_shop(*arguments, PURGE_INTERVAL="1", through=through, **environment)
        (proxy,) = proxies
        if kind == "sync":  # whose workers have no thread of their own
            wait_until(lambda: all_have_a_thread(shop), "each worker has one")
        shop.pay_for_sure("key-1")
        shop.sql(FILL.format(2000) + " returning 1")
        wait_until(lambda: shop.sql(LEFT) == [(0,)], "everything that had expired is gone")
        tries = proxy.connections
        proxy.hang()
        proxy.cut()
        wait_until(lambda: proxy.connections > tries, "a purge wants to connect")
        shop.sql(FILL.format(10) + " returning 1")
        proxy.flow()
        proxy.cut()
        wait_until(lambda: shop.sql(LEFT) == [(0,)], "they go on")
        began = time.monotonic()
        psutil.Process(shop.pid).terminate()
        psutil.Process(shop.pid).wait(PATIENCE_SECONDS)
        assert time.monotonic() - began < 15, "the thread kept its worker from ending"


def all_have_a_thread(shop):
    shop.pay(os.urandom(8).hex())
    workers = psutil.Process(shop.pid).children()
    return len(workers) == 2 and all(worker.num_threads() > 1 for worker in workers)


@pytest.mark.parametrize("store", ["sql", "redis"])
def test_other_stores_have_theirs(tmp_path, store, redis_server):
    app = Flask("shop")
    app.config.update(
        SQLALCHEMY_DATABASE_URI=f"sqlite:///{tmp_path}/shop.db",
        IDEMPOTENCY_STORE=store,
        IDEMPOTENCY_REDIS_URL=redis_server.url,
        IDEMPOTENCY_TTL=1,
        IDEMPOTENCY_PURGE_INTERVAL=1,
    )
    db = SQLAlchemy(app)
    Idempotency(app, db, scope=None)
    app.add_url_rule("/", "pay", idempotent(atomic=store != "redis")(dict), methods=["POST"])
    with app.app_context():
        db.create_all()
    state = app.extensions["idempotency"]
    if store == "redis":
        assert state.purge is None, "Redis deletes expired records by itself"
        return
    purge, send = purge_of(state.records), app.test_client().post
    headers = {"Idempotency-Key": "key"}
    assert send("/", headers=headers).status_code == 200
    assert list(purge(BATCH)) == []
    age(app, 2)
    assert list(purge(BATCH)) == [1]
    assert "Idempotent-Replayed" not in send("/", headers=headers).headers
    with app.app_context():
        db.engine.dispose()
