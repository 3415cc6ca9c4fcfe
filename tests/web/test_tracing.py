"""What ``instrument_app`` puts on the spans of an application."""

import asyncio

import pytest
from flask import g
from opentelemetry import context, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

from flask_idempotency import KeyReused, Retryable, StoreUnavailable, current_operation
from flask_idempotency.core.keys import SHOWN
from flask_idempotency.integrations.opentelemetry import instrument_app
from flask_idempotency.web.routes import states
from tests.killed import Killed
from tests.web.conftest import add
from tests.web.leased.records import kill

SEALED = {"IDEMPOTENCY_ENCRYPTION_KEYS": [b"k" * 32]}
NO_REDIS = {"IDEMPOTENCY_REDIS_URL": "redis://127.0.0.1:1/0"}
NOT_SAMPLED = {"sampler": ALWAYS_OFF}


@pytest.fixture
def provider(request):
    provider = TracerProvider(**getattr(request, "param", {}))
    provider.exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(provider.exporter))
    return provider


@pytest.fixture(autouse=True)
def nobody_listens_afterwards():
    """An application ends some time after its test, and other tests count calls."""
    yield
    for state in list(states):
        state.tracing = None


@pytest.fixture
def make_traced(make_world, provider):
    """Makes an application, each of whose requests has a span, as by Flask's instrumentation."""
    tracer = provider.get_tracer("flask")

    def make(**config):
        world = make_world(PROPAGATE_EXCEPTIONS=False, **config)

        @world.app.before_request
        def start():
            g.span = tracer.start_span("request")
            g.token = context.attach(trace.set_span_in_context(g.span))

        @world.app.teardown_request
        def end(_error):
            if "span" in g:
                context.detach(g.pop("token"))
                g.pop("span").end()

        instrument_app(world.app, tracer_provider=provider)
        return world

    return make


@pytest.fixture
def spans(provider):
    """The finished spans of a name."""
    finished = provider.exporter.get_finished_spans
    return lambda name="request": [span for span in finished() if span.name == name]


def ours(span):
    return {
        name.removeprefix("idempotency."): value
        for name, value in span.attributes.items()
        if name.startswith("idempotency.")
    }


def is_linked(span, to):
    return [link.context.span_id for link in span.links] == [to.context.span_id]


async def later():
    await asyncio.sleep(0)
    return "", 201


FORGED = f"00-{1:032x}-{2:016x}-01"


VIEWS = {
    "async": (later, {}),
    "sealed": (lambda: ("", 201), SEALED),
    "forged": (lambda: ("", 201, {"flask-idempotency-traceparent": FORGED}), {}),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_the_span_of_a_request_says_what_became_of_it(make_traced, spans, kind):
    """A replay links to the trace of the first run, which no client sees. A rejection is no error."""
    view, config = VIEWS[kind]
    world = make_traced(**config)
    add(world, view)
    sent = {"user": "canary", "json": {"canary": "canary"}}
    answers = [world.post(key=key, **sent) for key in ("canary", "canary", None)]
    first, replay, rejected = spans()
    facts = {"operation": "pay", "attempt": 1, "decided_by": "records"}
    facts["id"] = world.records()[0].key.hex()[:SHOWN]
    assert ours(first) == {**facts, "outcome": "executed"}
    assert ours(replay) == {**facts, "outcome": "replayed"}
    assert ours(rejected) == {"operation": "pay", "outcome": "rejected", "problem": "key-required"}
    assert {span.status.status_code for span in spans()} == {StatusCode.UNSET}
    assert "canary" not in "".join(span.to_json() for span in spans())
    assert is_linked(replay, first)
    assert first.links == rejected.links == rejected.events == ()
    assert answers[1].headers["Idempotent-Replayed"] == "true"
    if config:
        assert "trace" not in str([answer.headers for answer in answers]).lower()


ON_THE_WAY = {
    "a take-over": ({}, RuntimeError("canary"), {"attempt": 2}, "taken_over", "executed"),
    "the store": ({}, StoreUnavailable(), {}, "store_failed", "rejected"),
    "the lock": (NO_REDIS, None, {}, "store_failed", "executed"),
    "a hold": ({}, Killed(), {}, "interrupted", "rejected"),
}


@pytest.mark.parametrize("what", ON_THE_WAY)
def test_what_happens_on_the_way_is_an_event_without_an_errors_text(make_traced, spans, what):
    config, error, facts, name, outcome = ON_THE_WAY[what]
    world, errors = make_traced(**config), [error] if error else []

    def pay():
        if errors:
            raise errors.pop()
        return "", 201

    add(world, pay, atomic=what != "a hold")
    if what == "a hold":
        kill(world)
    elif what == "a take-over":
        world.post()
        assert ours(spans()[0])["outcome"] == "rolled_back"
    world.post()
    span = spans()[-1]
    (event,) = span.events
    assert event.name == f"idempotency.{name}"
    assert event.attributes.items() >= {f"idempotency.{k}": v for k, v in facts.items()}.items()
    assert ("error.type" in event.attributes) == (name == "store_failed")
    assert ours(span)["outcome"] == outcome
    assert "canary" not in "".join(span.to_json() for span in spans())


@pytest.mark.parametrize("atomic", [True, False])
def test_a_step_has_a_span_around_what_it_calls_or_not_again(make_traced, provider, spans, atomic):
    traced = make_traced()

    def charge():
        with provider.get_tracer("http").start_as_current_span("POST"):
            return 5

    def pay():
        current_operation.step("charge", charge, atomic=atomic)
        if current_operation.attempt == 1:
            raise Retryable
        current_operation.step("save", lambda: {}["canary"], atomic=atomic)

    add(traced, pay, atomic=False)
    traced.post(), traced.post()
    (call,), [step, again], [failed] = spans("POST"), spans("step charge"), spans("step save")
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.attributes["error.type"] == "KeyError"
    assert "canary" not in failed.to_json()
    assert [ours(span)["outcome"] for span in spans()] == ["released", "executed"]
    assert ours(step) == {"operation": "pay", "step.name": "charge", "step.replayed": False}
    assert ours(again)["step.replayed"] is True
    assert call.parent.span_id == step.context.span_id
    assert step.parent.span_id == spans()[0].context.span_id
    assert step.status.status_code is StatusCode.UNSET


def test_run_outside_a_request_uses_the_span_that_is_there(world, provider, spans):
    instrument_app(world.app, tracer_provider=provider)

    def run(payload=None):
        options = {"scope": None, "name": "work", "atomic": False, "payload": payload}
        tracer = provider.get_tracer("worker")
        with world.app.app_context(), tracer.start_as_current_span("request"):
            return world.idempotency.run("key-1", lambda: "sent", **options)

    assert [run(), run()] == ["sent", "sent"]
    with pytest.raises(KeyReused):
        run({"changed": True})
    assert is_linked(spans()[1], spans()[0])
    assert [ours(span)["outcome"] for span in spans()] == ["executed", "replayed", "rejected"]


@pytest.mark.parametrize("provider", [NOT_SAMPLED], indirect=True)
@pytest.mark.parametrize("has_span", [True, False])
def test_without_a_sampled_span_nothing_is_told_or_stored(make_world, make_traced, provider, has_span):
    world = make_traced() if has_span else make_world()
    if not has_span:
        instrument_app(world.app, tracer_provider=provider)
    add(world, lambda: {"paid": current_operation.step("charge", lambda: 5)}, atomic=False)
    assert [world.post().json for _ in range(2)] == [{"paid": 5}] * 2
    assert provider.exporter.get_finished_spans() == ()
    assert "traceparent" not in str(world.records()[0])
