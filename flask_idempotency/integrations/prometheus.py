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
from concurrent.futures import Future
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

from flask import Flask

from flask_idempotency.core.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.core.logs import log
from flask_idempotency.web import signals
from flask_idempotency.web.routes import app_state
from flask_idempotency.web.signals import Event

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
    from prometheus_client.core import GaugeMetricFamily, Metric
except ImportError as error:
    raise ImportError(
        f"flask_idempotency.integrations.prometheus needs prometheus-client ({error}):"
        " pip install 'flask-idempotency[prometheus]'"
    ) from error

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30, 60)
"""Buckets for views: from one that inserts a row to one that waits for another service until its lease
of 60 s is over. The alert's threshold of 15 s is a bound, so that its quantile is no guess."""

FRESH_SECONDS = 10.0
"""How long the same numbers of the records are told again. The usual interval of scrapes is 15 s: each
gets new ones, and several scrapers at once cost no more than one."""

PATIENCE_SECONDS = 3.0
"""How long a scrape waits for the records. Prometheus gives a scrape up after 10 s, and with it the
numbers of the requests, which are needed most while the database hangs."""

_series: WeakKeyDictionary[CollectorRegistry, _Series] = WeakKeyDictionary()

_RAN = ("executed", "rolled_back", "released", "interrupted")
_RESPONDED = ("replayed", "rejected")
_COUNTED = (*_RAN, "replayed", "unprotected")
_EXTENSION = "idempotency_metrics"


def export_metrics(app: Flask, *, registry: CollectorRegistry = REGISTRY) -> None:
    """Count and time what the operations of ``app`` do, in ``registry``. Call it after ``init_app``.

    Applications of one process that have the same registry share its series. Under
    prometheus_client's multiprocess mode the numbers of all processes are added up.

    Raises ``ConfigurationError`` before ``init_app``, and for the second call with an application.
    """
    app_state(app)
    if _EXTENSION in app.extensions:
        raise ConfigurationError("export_metrics() was called for this application before")
    series = _series.get(registry)
    if series is None:
        series = _series[registry] = _Series(registry)
    app.extensions[_EXTENSION] = _Receiver(series, app)


class _Series:
    """The series of one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        of: dict[str, Any] = {"namespace": "idempotency", "registry": registry}
        counter: Callable[..., Counter] = partial(Counter, **of)
        histogram: Callable[..., Histogram] = partial(Histogram, **of)
        operation = ("operation",)
        what = "Requests to protected views, by what became of them"
        self.requests = counter("requests", what, (*operation, "outcome", "problem"))
        what = (
            "Observed requests, by the outcome that they would have had, and for what would have been a"
            " replay whether the view's new response has the same status"
        )
        self.observed = counter("observed", what, (*operation, "would", "problem", "status"))
        what = "How long the attempts at an operation took, from the claim to the end"
        self.execution_seconds = histogram("execution_seconds", what, operation, buckets=SECONDS)
        what = "How long replays and rejections took"
        self.response_seconds = histogram("response_seconds", what, operation, buckets=SECONDS)
        what = "Operations that were run again because they were begun and not finished"
        self.takeovers = counter("takeovers", what, operation)
        what = "How often the lock or the records failed"
        self.store_failures = counter("store_failures", what, ("part",))
        for part in ("lock", "records"):
            self.store_failures.labels(part)
        # prometheus_client looks a child up in ten calls.
        self.of = cache(lambda operation: _Operation(self, operation))


class _Receiver:
    """Hears the signals of one application, for as long as that lives."""

    def __init__(self, series: _Series, app: Flask) -> None:
        self._series = series
        for signal in signals.OUTCOMES:
            signal.connect(self.count, app)
        signals.operation_taken_over.connect(self.count_takeover, app)
        signals.store_failed.connect(self.count_failure, app)

    def count(self, _app: Flask, event: Event) -> None:
        """A request to a protected view has its outcome."""
        if event.outcome is not None:  # otherwise it found an interrupted operation
            self._series.of(event.operation).count(event)
        if event.would is not None:
            self._count_observed(event)

    def _count_observed(self, event: Event) -> None:
        status = ""
        if event.first_status is not None:
            status = "same" if event.status == event.first_status else "other"
        labels = event.operation, event.would, event.problem or "", status
        self._series.observed.labels(*labels).inc()

    def count_takeover(self, _app: Flask, event: Event) -> None:
        """An operation is run again."""
        self._series.of(event.operation).takeovers.inc()

    def count_failure(self, _app: Flask, event: Event) -> None:
        """The lock, whose events name no operation, or the records failed."""
        self._series.store_failures.labels("records" if event.operation else "lock").inc()


class _Operation:
    """The series of one operation. They begin at 0, so that an event after a scrape is an increase."""

    def __init__(self, series: _Series, name: str) -> None:
        self._requests = cache(lambda outcome, problem: series.requests.labels(name, outcome, problem))
        for outcome in _COUNTED:
            self._requests(outcome, "")
        self._requests("unprotected", StoreUnavailable.type)
        self.takeovers = series.takeovers.labels(name)
        ran = series.execution_seconds.labels(name).observe
        responded = series.response_seconds.labels(name).observe
        self._observe = dict.fromkeys(_RAN, ran) | dict.fromkeys(_RESPONDED, responded)

    def count(self, event: Event) -> None:
        """A request for the operation has its outcome."""
        problem = "" if event.would else event.problem or ""  # alerts are about rejections
        self._requests(event.outcome, problem).inc()
        if observe := self._observe.get(str(event.outcome)):
            observe(event.seconds or 0)


class RecordsCollector:
    """What the records of an application are like: how many, how old. A prometheus_client collector.

    Register it in the registry that answers the scrape; each application needs one of its own. It asks
    the store at most every ten seconds, and waits for it three seconds at most. A scrape does not fail
    with the database: then it has no series of records but ``idempotency_records_up``, which is 0.

    Raises ``ConfigurationError`` before ``init_app``.
    """

    def __init__(self, app: Flask, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._clock = app, clock
        self._overview = app_state(app).own_records.admin().overview
        self._turn, self._until = threading.Lock(), -math.inf
        self._asked: Future[list[Metric]] | None = None
        self._known, self._is_up = [_up(False)], True

    def describe(self) -> list[Metric]:
        """Every family, without samples: to be registered asks no database."""
        return [_up(), *_families()]

    def collect(self) -> list[Metric]:
        """Collect what the records are like, now or within the last ten seconds.

        One scrape at a time asks, and the others tell what is known. It waits three seconds at most,
        for a silent host, a full pool or whatever else may hang. What hangs is not asked again before
        it has ended.
        """
        if found := self._begin():
            try:
                self._known, self._is_up = [_up(True), *found.result(PATIENCE_SECONDS)], True
            except Exception as error:  # whatever it is, a scrape goes on
                if self._is_up:
                    log.warning("metrics: the records cannot be counted: %s", type(error).__name__)
                self._known, self._is_up = [_up(False)], False
        return self._known

    def _begin(self) -> Future[list[Metric]] | None:
        """Ask the store, if it is time to; return what will be its reply."""
        with self._turn:
            if self._clock() < self._until or (self._asked and not self._asked.done()):
                return None
            self._asked = Future()
            target, args = _answer, (self._asked, self._app, self._overview)
            threading.Thread(target=target, args=args, name="idempotency-metrics", daemon=True).start()
            self._until = self._clock() + FRESH_SECONDS
        return self._asked


def _answer(asked: Future[list[Metric]], app: Flask, overview: Callable[[], Any]) -> None:
    """Ask the store in a thread of its own, which a scrape may leave behind.

    The application's teardown functions would end what a request in the scrape's thread still uses.
    """
    try:
        with app.app_context():
            found = list(_families(overview()))
    except BaseException as error:  # for whoever waits
        asked.set_exception(error)
    else:
        asked.set_result(found)


def _up(is_up: bool | None = None) -> Metric:
    what = "Whether the store could be asked about its records"
    return GaugeMetricFamily("idempotency_records_up", what, value=is_up)


def _families(found: Any = None) -> Iterator[Metric]:
    """Yield the series about the records: what an ``Overview`` says, or (None) without samples."""
    records = GaugeMetricFamily(
        "idempotency_records", "Records; in a large table, estimated", labels=("operation", "state")
    )
    for tally in found.tallies if found else ():
        records.add_metric((tally.operation, tally.state), tally.count)
    yield records
    for name, (what, value) in _GAUGES.items():
        yield GaugeMetricFamily(f"idempotency_{name}", what, value=value(found) if found else None)


def _age(count: int, seconds: float | None) -> float:
    """The age of the oldest of ``count``: 0 if there is none, infinite if nobody knows since when."""
    return seconds if seconds is not None else math.inf if count else 0


_GAUGES: dict[str, tuple[str, Callable[[Any], float]]] = {
    "records_interrupted": (
        "Operations that were interrupted, or failed after a step, and wait; counted up to 10,000",
        lambda found: found.interrupted,
    ),
    "oldest_interrupted_seconds": (
        "How long ago the oldest of these began, or of what runs a third time; 0 if there is none",
        lambda found: _age(found.interrupted, found.interrupted_seconds),
    ),
    "records_expired": (
        "Expired records, which wait for a purge; counted up to 10,000",
        lambda found: found.expired,
    ),
    "oldest_expired_seconds": (
        "How long ago the oldest of the expired records expired; 0 if there is none",
        lambda found: _age(found.expired, found.expired_seconds),
    ),
}
