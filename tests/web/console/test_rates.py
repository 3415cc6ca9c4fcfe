"""The counts behind the chart: how they are written, and what happens where that fails."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from flask import Flask

from flask_idempotency.console.chart import Hour
from flask_idempotency.console.rates import EVERY_SECONDS, HOUR_SECONDS, Rates
from flask_idempotency.stores.counts import Count, Counts, CountsUnavailable
from flask_idempotency.stores.table import define_counts, define_table
from flask_idempotency.web.signals import Event
from tests.waiting import wait_until


class Kept:
    """A table of counts that may be out of reach."""

    def __init__(self):
        self.added, self.is_away = [], False

    def add(self, counts):
        if self.is_away:
            raise CountsUnavailable("away")
        self.added += counts

    def last_hour(self):
        return list(self.added)


@pytest.fixture
def kept():
    return Kept()


@pytest.fixture
def now():
    return [1000.0]


@pytest.fixture
def rates(kept, now):
    """Written when the test says so."""
    rates = Rates(Flask("shop"), kept, lambda: now[0])
    rates.begin = lambda: None
    return rates


def note(rates, outcome="executed", operation="pay", times=1):
    for _ in range(times):
        rates.note(None, Event(operation, outcome=outcome))


def test_counts_are_written_together_after_ten_seconds(kept, now):
    rates, rests, go_on = Rates(Flask("shop"), kept, lambda: now[0]), [], threading.Event()

    def rest(seconds):
        rests.append(seconds)
        assert go_on.wait(10)
        now[0] += seconds

    rates.rest = rest
    note(rates, times=3)
    note(rates, "replayed")
    thread = rates._thread
    assert thread.daemon
    assert kept.added == []
    go_on.set()
    thread.join(10)
    assert sorted(kept.added) == [Count(10, "pay", "executed", 3), Count(10, "pay", "replayed", 1)]
    assert rests == [EVERY_SECONDS]
    assert rates._thread is None, "an idle process has none"
    note(rates)
    wait_until(lambda: len(kept.added) == 3 and rates._thread is None, "another one writes it")


def test_what_happens_on_the_way_is_no_outcome(rates):
    rates.note(None, Event("pay", attempt=2))
    assert not rates.has_work()


def test_counts_that_cannot_be_written_are_kept_for_an_hour(rates, kept, now, caplog):
    kept.is_away = True
    note(rates)
    rates.tick()
    assert "the console's counts cannot be written: away" in caplog.text
    note(rates, times=2)
    kept.is_away = False
    rates.tick()
    assert sum(each.count for each in kept.added) == 3
    kept.is_away = True
    note(rates)
    rates.tick()
    now[0] += HOUR_SECONDS + EVERY_SECONDS
    note(rates, times=5)
    rates.tick()
    kept.is_away = False
    rates.flush()
    assert sum(each.count for each in kept.added) == 8, "the one of an hour ago is gone"


def test_without_a_table_a_process_knows_its_own_hour(now):
    rates = Rates(Flask("shop"), None, lambda: now[0])
    rates.begin = lambda: None
    note(rates)
    now[0] += 120
    note(rates, times=2)
    rates.tick()
    assert sorted(rates.last_hour()) == [Count(0, "pay", "executed", 2), Count(2, "pay", "executed", 1)]
    now[0] += HOUR_SECONDS - 100
    assert [each.count for each in rates.last_hour()] == [2]
    assert not rates.is_shared


def test_no_request_is_lost_or_counted_twice_among_threads(rates, kept):
    barrier = threading.Barrier(5)

    def count():
        barrier.wait()
        note(rates, times=500)

    def write():
        barrier.wait()
        for _ in range(50):
            rates.tick()

    with ThreadPoolExecutor(5) as pool:
        done = [pool.submit(each) for each in (count, count, count, count, write)]
    assert [each.exception() for each in done] == [None] * 5
    rates.flush()
    assert sum(each.count for each in kept.added) == 2000


def test_whoever_reads_waits_for_a_write_that_has_begun(rates, kept):
    begun, may_end, add = threading.Event(), threading.Event(), kept.add

    def slowly(counts):
        begun.set()
        assert may_end.wait(10)
        add(counts)

    kept.add = slowly
    note(rates)
    with ThreadPoolExecutor(2) as pool:
        written = pool.submit(rates.tick)
        assert begun.wait(10)
        read = pool.submit(rates.last_hour)
        may_end.set()
        written.result()
    assert [each.count for each in read.result()] == [1]


def test_the_log_says_once_that_counts_cannot_be_written_until_it_works_again(rates, kept, caplog):
    for is_away in True, True, False, True:
        kept.is_away = is_away
        note(rates)
        rates.tick()
    assert caplog.text.count("cannot be written") == 2


def test_a_forked_process_counts_from_nothing(rates, kept):
    note(rates)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, str(sum(rates._seen.values())).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 10) == b"0"
    rates.flush()
    assert sum(each.count for each in kept.added) == 1
    os.close(reader)
    os.close(writer)


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request, tmp_path, databases):
    url = databases.take() if request.param == "postgresql" else f"sqlite:///{tmp_path}/shop.db"
    engine = sa.create_engine(url)
    yield engine
    engine.dispose()
    if request.param == "postgresql":
        databases.give_back(url)


@pytest.fixture
def table(engine):
    metadata = sa.MetaData()
    table = define_counts(define_table(metadata, "idempotency_record"))
    table.create(engine)
    return table


def test_several_processes_add_to_one_count(engine, table):
    first, second = Counts(engine, table), Counts(engine, table)
    first.add([Count(0, "pay", "executed", 2), Count(0, "pay", "replayed", 1)])
    second.add([Count(0, "pay", "executed", 3)])
    found = first.last_hour()
    assert {each.outcome for each in found} == {"executed", "replayed"}
    assert sum(each.count for each in found if each.outcome == "executed") == 5
    assert all(each.age in (0, 1) for each in found)


def test_counts_belong_to_the_minute_in_which_they_were_made(engine, table):
    counts = Counts(engine, table)
    counts.add([Count(0, "pay", "executed", 1), Count(60, "pay", "executed", 1)])
    ages = sorted(each.age for each in counts.last_hour())
    assert ages[1] - ages[0] == 1


def test_counts_older_than_an_hour_are_not_shown_and_than_a_day_deleted(engine, table):
    counts = Counts(engine, table)
    day = 24 * 3600
    counts.add([Count(3600, "pay", "executed", 1), Count(day + 60, "pay", "executed", 1)])
    assert counts.last_hour() == []
    counts.add([Count(0, "pay", "executed", 1)])
    with engine.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(table)) == 2


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_two_processes_that_write_the_same_rows_never_wait_for_each_other(engine, table):
    names, rounds, barrier = [f"op-{number}" for number in range(20)], 10, threading.Barrier(4)

    def write(order):
        counts = Counts(engine, table)
        barrier.wait()
        for _ in range(rounds):
            counts.add([Count(age, name, "executed", 1) for age in (0, 30) for name in order])

    with ThreadPoolExecutor(4) as pool:
        orders = (names, names[::-1], names, names[::-1])
        done = [pool.submit(write, order) for order in orders]
    assert [each.exception() for each in done] == [None] * 4
    assert sum(each.count for each in Counts(engine, table).last_hour()) == 4 * 2 * rounds * len(names)


def test_a_missing_table_is_told_in_the_drivers_words(engine):
    table = define_counts(define_table(sa.MetaData(), "idempotency_record"))
    for act in (
        Counts(engine, table).last_hour,
        lambda: Counts(engine, table).add([Count(0, "a", "b", 1)]),
    ):
        with pytest.raises(CountsUnavailable, match="idempotency_record_count"):
            act()


def test_the_bars_of_an_hour_add_up():
    hour = Hour(
        [
            Count(0, "pay", "executed", 6),
            Count(0, "pay", "replayed", 4),
            Count(59, "refund", "rejected", 5),
            Count(-1, "pay", "executed", 1),  # by a clock that went back
            Count(60, "pay", "new outcome", 1),
        ]
    )
    assert (hour.total, hour.most) == (17, 11)
    assert hour.shown == ["executed", "replayed", "rejected", "new outcome"]
    assert [row.name for row in hour.operations] == ["pay", "refund"]
    assert hour.share("executed") == "41.2 %"
    assert Hour([Count(0, "a", "x", 1), Count(0, "a", "y", 9999)]).share("x") == "< 0.1 %"
    last = [bar for bar in hour.bars if bar.minute == 59]
    assert [bar.outcome for bar in last] == ["executed", "replayed"]
    assert last[-1].top == 0
    assert sum(bar.height for bar in last) == pytest.approx(100, abs=0.02)


def test_an_hour_without_requests_has_no_bars():
    assert Hour([]).bars == []
    assert Hour([]).most == 0


def test_the_words_for_times():
    from datetime import datetime, timedelta, timezone

    from flask_idempotency.console.words import ago, moment, size
    from flask_idempotency.operate.words import duration

    assert [duration(each) for each in (0, 59, 60, 3661, 90_000, 86_400 * 3)] == [
        "0 s", "59 s", "1 min", "1 h 1 min", "1 d 1 h", "3 d"]  # fmt: skip
    assert (ago(0.4), ago(90), ago(-90)) == ("now", "1 min 30 s ago", "in 1 min 30 s")
    assert [size(each) for each in (None, 3, 2048, 3 * 1024**2)] == ["–", "3 B", "2.0 KiB", "3.0 MiB"]
    when = datetime(2026, 11, 22, 3, 0, tzinfo=timezone(timedelta(hours=1)))
    shown = moment(when, datetime(2026, 11, 22, 2, 2, tzinfo=timezone.utc))
    assert 'datetime="2026-11-22T02:00:00.000Z"' in shown
    assert "2 min ago" in shown
    assert moment("<infinity>") == "&lt;infinity&gt;"
