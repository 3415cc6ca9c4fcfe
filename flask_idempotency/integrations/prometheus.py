"""Metrics for Prometheus: ``pip install 'flask-idempotency[prometheus]'``.

:func:`export_metrics` counts and times what the processes of an application do.
:class:`RecordsCollector` tells at each scrape what the records are like, once for all processes.

No label holds a key, a scope or the digits of a record. ``operation`` is a route's name.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from flask import Flask

from flask_idempotency.core.errors import StoreUnavailable
from flask_idempotency.core.logs import log
from flask_idempotency.web import signals
from flask_idempotency.web.routes import app_state
from flask_idempotency.web.signals import Event

from . import required

with required("prometheus-client", extra="prometheus"):
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
    from prometheus_client.core import GaugeMetricFamily, Metric

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30, 60)
"""Buckets for views: from one that inserts a row to one that waits for another service until its lease
of 60 s is over. The alert's threshold of 15 s is a bound, so that its quantile is no guess."""

FRESH_SECONDS = 10.0
"""How long the same numbers of the records are told again. The usual interval of scrapes is 15 s: each
gets new ones, and several scrapers at once cost no more than one."""

PATIENCE_SECONDS = 3.0
"""How long a scrape waits for the records. Prometheus gives a scrape up after 10 s, and with it the
numbers of the requests, which are needed most while the database hangs."""

_RAN = ("executed", "rolled_back", "released", "interrupted")
_RESPONDED = ("replayed", "rejected")


def export_metrics(app: Flask, *, registry: CollectorRegistry = REGISTRY) -> None:
    """Count and time what the operations of ``app`` do, in ``registry``. Call it after ``init_app``.

    Applications of one process that have the same registry share its series. Raises
    ``ConfigurationError`` before ``init_app``.
    """
    app_state(app)
    receiver = _Receiver(registry)
    for signal in signals.OUTCOMES:
        signal.connect(receiver.count, app)
    signals.operation_taken_over.connect(receiver.count_takeover, app)
    signals.store_failed.connect(receiver.count_failure, app)


@cache  # one for each registry; and a signal does not keep its receivers alive
class _Receiver:
    """Hears the signals of the applications that share a registry, and has its series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # prometheus_client looks a child up in ten calls, this in none.
        def counter(name: str, what: str, *labels: str) -> Callable[..., Counter]:
            return cache(Counter(name, what, labels, "idempotency", registry=registry).labels)

        def histogram(name: str, what: str) -> Callable[..., Histogram]:
            of = Histogram(name, what, ["operation"], "idempotency", registry=registry, buckets=SECONDS)
            return cache(of.labels)

        what = "Requests to protected views, by what became of them"
        self._requests = counter("requests", what, "operation", "outcome", "problem")
        what = "Observed requests, by their would-be outcome, and whether a replay has the same status"
        self._observed = counter("observed", what, "operation", "would", "problem", "status")
        self._takeovers = counter("takeovers", "Operations that were run again", "operation")
        self._failures = counter("store_failures", "Failures of the lock or the records", "part")
        ran = histogram("execution_seconds", "How long the attempts at an operation took")
        responded = histogram("response_seconds", "How long replays and rejections took")
        self._seconds = dict.fromkeys(_RAN, ran) | dict.fromkeys(_RESPONDED, responded)
        for part in "lock", "records":
            self._failures(part)
        self._begin = cache(self._begin_at_0)

    def _begin_at_0(self, operation: str) -> None:
        """Begin an operation's series, so that an event after a scrape is an increase."""
        for outcome in (*_RAN, "replayed", "unprotected"):
            self._requests(operation, outcome, "")
        self._requests(operation, "unprotected", StoreUnavailable.type)
        for child in (self._takeovers, *self._seconds.values()):
            child(operation)

    def count(self, _app: Flask, event: Event) -> None:
        """A request to a protected view has its outcome."""
        problem = event.problem or ""
        if event.outcome is not None:  # otherwise it found an interrupted operation
            self._begin(event.operation)
            rejection = "" if event.would else problem  # alerts are about these
            self._requests(event.operation, event.outcome, rejection).inc()
            if seconds := self._seconds.get(str(event.outcome)):
                seconds(event.operation).observe(event.seconds or 0)
        if event.would is not None:
            status = "same" if event.status == event.first_status else "other"
            status = "" if event.first_status is None else status
            self._observed(event.operation, event.would, problem, status).inc()

    def count_takeover(self, _app: Flask, event: Event) -> None:
        """An operation is run again."""
        self._begin(event.operation)
        self._takeovers(event.operation).inc()

    def count_failure(self, _app: Flask, event: Event) -> None:
        """The lock, whose events name no operation, or the records failed."""
        self._failures("records" if event.operation else "lock").inc()


class RecordsCollector:
    """What the records of an application are like: how many, how old. A prometheus_client collector.

    Register it in the registry that answers the scrape. It asks the store at most every ten seconds,
    and waits for it three seconds at most. A scrape does not fail with the database: then there is only
    ``idempotency_records_up``, which is 0. Raises ``ConfigurationError`` before ``init_app``.
    """

    def __init__(self, app: Flask, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._clock = app, clock
        self._overview = app_state(app).records.admin().overview
        self._turn, self._until = threading.Lock(), -math.inf
        self._asking: threading.Thread | None = None
        self._known, self._is_up = [_up(False)], True

    def describe(self) -> list[Metric]:
        """One family stands for all: to be registered asks no database."""
        return [_up()]

    def collect(self) -> list[Metric]:
        """Collect what the records are like, now or within the last ten seconds.

        One scrape at a time asks, and the others tell what is known. It waits three seconds at most,
        for a silent host, a full pool or whatever else may hang. What hangs is not asked again before
        it has ended.
        """
        with self._turn:
            is_asking = self._asking is not None and self._asking.is_alive()
            if is_asking or self._clock() < self._until:
                return self._known
            # A thread of its own, which a scrape may leave behind. In the scrape's own, the teardown
            # functions of the application would end what its request still uses.
            asking = self._asking = threading.Thread(target=self._ask, daemon=True)
            asking.start()
            self._until = self._clock() + FRESH_SECONDS
        asking.join(PATIENCE_SECONDS)
        if asking.is_alive():
            self._fail("no reply")
        return self._known

    def _ask(self) -> None:
        try:
            with self._app.app_context():
                self._known, self._is_up = [_up(True), *_families(self._overview())], True
        except BaseException as error:  # whatever it is, a scrape goes on
            self._fail(type(error).__name__)

    def _fail(self, why: str) -> None:
        if self._is_up:
            log.warning("metrics: the records cannot be counted: %s", why)
        self._known, self._is_up = [_up(False)], False


def _up(is_up: bool | None = None) -> Metric:
    return GaugeMetricFamily("idempotency_records_up", "Whether the store could be asked", value=is_up)


def _families(found: Any) -> Iterator[Metric]:
    """Yield the series about the records, from an ``Overview`` of the store."""
    what = "Records; in a large table, estimated"
    records = GaugeMetricFamily("idempotency_records", what, labels=("operation", "state"))
    for operation, counts in found.counts.items():
        for state, count in counts.items():
            records.add_metric((operation, state), count)
    yield records
    interrupted = _age(found.interrupted, found.interrupted_seconds)
    expired = _age(found.expired, found.expired_seconds)
    for name, value, what in (
        ("records_interrupted", found.interrupted, "Operations that wait; counted up to 10,000"),
        ("oldest_interrupted_seconds", interrupted, "How long ago the oldest of these began, or 0"),
        ("records_expired", found.expired, "Records that wait for a purge; counted up to 10,000"),
        ("oldest_expired_seconds", expired, "How long ago the oldest of these expired, or 0"),
    ):
        yield GaugeMetricFamily(f"idempotency_{name}", what, value=value)


def _age(count: int, seconds: float | None) -> float:
    """The age of the oldest of ``count``: 0 if there is none, infinite if nobody knows since when."""
    return seconds if seconds is not None else math.inf if count else 0
