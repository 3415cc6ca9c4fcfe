"""Traces by OpenTelemetry: ``pip install 'flask-idempotency[opentelemetry]'``.

Only its API is needed here. What is exported, and where to, the application decides with the SDK.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flask import Flask

from flask_idempotency.core.records import TRACEPARENT, StoredResponse
from flask_idempotency.web import signals
from flask_idempotency.web.routes import app_state
from flask_idempotency.web.signals import Event

from . import required

with required("opentelemetry-api", extra="opentelemetry"):
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

NOT_ATTRIBUTES = frozenset({"error", "seconds", "status"})
"""The fields of an event that are no attributes: an error's text may hold anything, and the span has a
duration and, by Flask's instrumentation, the response's status."""


def instrument_app(app: Flask, *, tracer_provider: trace.TracerProvider | None = None) -> None:
    """Tell on the current span what the protection of ``app`` did. Call it after ``init_app``.

    The request's span comes from elsewhere, such as ``FlaskInstrumentor``; where no span records,
    nothing is done. ``tracer_provider`` makes the spans of steps; the default is the global one. Raises
    ``ConfigurationError`` before ``init_app``.
    """
    tracer = trace.get_tracer(__package__, tracer_provider=tracer_provider)
    app_state(app).tracing = _Tracing(app, tracer)


_W3C = TraceContextTextMapPropagator()


class _Tracing:
    """What ``AppState.tracing`` is: called for each response stored or replayed, and each step."""

    def __init__(self, app: Flask, tracer: trace.Tracer) -> None:
        self._tracer = tracer
        self._receivers = []  # kept here: a signal does not keep its receivers alive
        for signal in signals.EVERY_SIGNAL:
            receiver = partial(_tell, signal.name.removeprefix("operation-").replace("-", "_"))
            self._receivers.append(signal.connect(receiver, app))

    def sign(self, stored: StoredResponse) -> StoredResponse:
        context = trace.get_current_span().get_span_context()
        if not (context.is_valid and context.trace_flags.sampled):
            return stored
        text = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        headers = *(stored.headers or ()), (TRACEPARENT, text)
        return StoredResponse(stored.status, headers, stored.body)

    def link(self, stored: StoredResponse) -> None:
        span = trace.get_current_span()
        for name, value in stored.headers or ():
            if name == TRACEPARENT and span.is_recording():
                found = _W3C.extract({"traceparent": value})
                context = trace.get_current_span(found).get_span_context()
                if context.is_valid:
                    span.add_link(context)

    def step(
        self, operation: str, name: str, recorded: bytes | None, run: Callable[[], bytes]
    ) -> bytes:
        if not trace.get_current_span().is_recording():
            return run() if recorded is None else recorded
        facts: dict[str, str | bool] = {
            "idempotency.operation": operation,
            "idempotency.step.name": name,
            "idempotency.step.replayed": recorded is not None,
        }
        with self._tracer.start_as_current_span(
            f"step {name}", attributes=facts, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                return run() if recorded is None else recorded
            except BaseException as error:  # without its text, which may hold anything
                span.set_attribute("error.type", type(error).__qualname__)
                span.set_status(trace.StatusCode.ERROR)
                raise


def _tell(name: str, _app: Flask, event: Event) -> None:
    span = trace.get_current_span()
    if not span.is_recording():
        return
    facts = {
        f"idempotency.{field}": value
        for field, value in vars(event).items()
        if value not in (None, "") and field not in NOT_ATTRIBUTES
    }
    if event.outcome is not None:
        span.set_attributes(facts)
        return
    if event.error is not None:
        facts["error.type"] = type(event.error).__qualname__
    span.add_event(f"idempotency.{name}", facts)
