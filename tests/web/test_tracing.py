"""What ``instrument_app`` puts on the spans of an application."""

import asyncio
import threading

import pytest
import sqlalchemy as sa
from flask import Flask, g
from opentelemetry import context, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

import flask_idempotency
from flask_idempotency import (
    ConfigurationError,
    KeyReused,
    Retryable,
    current_operation,
    idempotent,
)
from flask_idempotency.core.keys import SHOWN
from flask_idempotency.integrations.opentelemetry import instrument_app
from flask_idempotency.web.routes import states
from tests.killed import Killed
from tests.web.leased.records import end_lease

OURS = "idempotency."


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter):
    return provider_to(exporter)


@pytest.fixture(autouse=True)
def nobody_listens_afterwards():
    """An application ends some time after its test, and other tests count calls."""
    yield
    for state in states():
        state.tracing = None


def provider_to(exporter, **options):
    provider = TracerProvider(**options)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


@pytest.fixture
def traced(world, provider):
    """The usual application, each of whose requests has a span, as by Flask's instrumentation."""
    span_for_each_request(world.app, provider)
    instrument_app(world.app, tracer_provider=provider)
    return world


def span_for_each_request(app, provider):
    tracer = provider.get_tracer("flask")

    @app.before_request
    def start():
        g.span = tracer.start_span("request")
        g.token = context.attach(trace.set_span_in_context(g.span))

    @app.teardown_request
    def end(_error):
        if "span" in g:
            context.detach(g.pop("token"))
            g.pop("span").end()


def add(world, function, **options):
    world.app.add_url_rule("/payments", "pay", idempotent(**options)(function), methods=["POST"])


def ours(span):
    return {name: value for name, value in span.attributes.items() if name.startswith(OURS)}


def requests(exporter):
    return [span for span in exporter.get_finished_spans() if span.name == "request"]


def events(span):
    return [event.name for event in span.events]


def test_the_span_of_a_request_says_what_became_of_it(traced, exporter):
    add(traced, lambda: ("", 201))
    traced.post()
    (span,) = requests(exporter)
    assert ours(span) == {
        "idempotency.operation": "pay",
        "idempotency.outcome": "executed",
        "idempotency.attempt": 1,
        "idempotency.decided_by": "records",
        "idempotency.id": traced.records()[0].key.hex()[:SHOWN],
    }
    assert span.status.status_code is StatusCode.UNSET


def test_a_rejection_is_no_error_of_the_span(traced, exporter):
    add(traced, lambda: ("", 201))
    traced.post(key=None)
    (span,) = requests(exporter)
    assert ours(span) == {
        "idempotency.operation": "pay",
        "idempotency.outcome": "rejected",
        "idempotency.problem": "key-required",
    }
    assert span.status.status_code is StatusCode.UNSET
    assert span.events == ()


def test_a_replay_links_to_the_trace_of_the_first_run(traced, exporter):
    add(traced, lambda: ("", 201))
    traced.post()
    traced.post()
    first, replay = requests(exporter)
    assert first.links == ()
    (link,) = replay.links
    assert link.context.trace_id == first.context.trace_id != replay.context.trace_id
    assert link.context.span_id == first.context.span_id
    assert replay.attributes["idempotency.outcome"] == "replayed"


def test_no_client_sees_the_trace(traced, assert_replayed):
    add(traced, lambda: ("", 201, {"X-Own": "1"}))
    first = traced.post()
    replay = traced.post()
    assert_replayed(first, replay)
    assert "trace" not in f"{first.headers}{replay.headers}".lower()


def test_a_view_cannot_name_the_trace(traced, exporter):
    forged = f"00-{1:032x}-{2:016x}-01"
    add(traced, lambda: ("", 201, {"flask-idempotency-traceparent": forged}))
    traced.post()
    traced.post()
    first, replay = requests(exporter)
    assert [link.context.trace_id for link in replay.links] == [first.context.trace_id]


@pytest.mark.parametrize("line", ["", "nonsense", f"00-{0:032x}-{0:016x}-01"])
def test_a_trace_that_cannot_be_read_is_no_link(traced, exporter, line):
    add(traced, lambda: ("", 201))
    traced.post()
    traced.sql(
        "update idempotency_record set headers = cast(:lines as json)",
        lines=f'[["flask-idempotency-traceparent", "{line}"]]',
    )
    assert traced.post().headers["Idempotent-Replayed"] == "true"
    assert requests(exporter)[1].links == ()


def test_a_response_stored_without_tracing_is_replayed_without_a_link(world, provider, exporter):
    add(world, lambda: ("", 201))
    world.post()
    instrument_app(world.app, tracer_provider=provider)
    with provider.get_tracer("test").start_as_current_span("request"):
        assert world.post().headers["Idempotent-Replayed"] == "true"
    (span,) = requests(exporter)
    assert span.links == ()
    assert span.attributes["idempotency.outcome"] == "replayed"


def test_a_response_stored_with_tracing_is_replayed_without_it(traced, make_world):
    add(traced, lambda: ("", 201))
    first = traced.post()
    bare = make_world(SQLALCHEMY_DATABASE_URI=traced.app.config["SQLALCHEMY_DATABASE_URI"])
    add(bare, lambda: ("", 500))
    replay = bare.post()
    assert replay.status_code == first.status_code
    assert "trace" not in str(replay.headers).lower()


def test_an_encrypted_record_links_too(make_world, provider, exporter):
    world = make_world(IDEMPOTENCY_ENCRYPTION_KEYS=[b"k" * 32])
    span_for_each_request(world.app, provider)
    instrument_app(world.app, tracer_provider=provider)
    add(world, lambda: ("", 201))
    world.post()
    world.post()
    first, replay = requests(exporter)
    assert [link.context.span_id for link in replay.links] == [first.context.span_id]


def test_an_async_view(traced, exporter):
    async def pay():
        await asyncio.sleep(0)
        return "", 201

    add(traced, pay)
    traced.post()
    traced.post()
    first, replay = requests(exporter)
    assert [span.attributes["idempotency.outcome"] for span in (first, replay)] == [
        "executed",
        "replayed",
    ]
    assert [link.context.span_id for link in replay.links] == [first.context.span_id]


def test_an_observed_request_says_what_would_have_become_of_it(make_world, provider, exporter):
    world = make_world(IDEMPOTENCY_ENFORCE=False)
    span_for_each_request(world.app, provider)
    instrument_app(world.app, tracer_provider=provider)
    add(world, lambda: ("", 201))
    world.post()
    world.post()
    spans = requests(exporter)
    assert [span.attributes["idempotency.outcome"] for span in spans] == ["observed", "observed"]
    assert [span.attributes["idempotency.would"] for span in spans] == ["executed", "replayed"]
    assert spans[1].attributes["idempotency.first_status"] == 201


def test_a_take_over_is_an_event(traced, exporter):
    failures = [RuntimeError("canary")]

    def pay():
        if failures:
            raise failures.pop()
        return "", 201

    add(traced, pay)
    traced.post()
    traced.post()
    first, second = requests(exporter)
    assert first.attributes["idempotency.outcome"] == "rolled_back"
    assert "canary" not in str(ours(first))
    assert events(second) == ["idempotency.taken_over"]
    assert second.events[0].attributes["idempotency.attempt"] == 2
    assert second.attributes["idempotency.outcome"] == "executed"


def test_a_failure_of_the_store_is_an_event(traced, exporter):
    def pay():
        pid = traced.db.session.scalar(sa.text("SELECT pg_backend_pid()"))
        traced.sql("SELECT pg_terminate_backend(:pid)", pid=pid)
        return "", 201

    add(traced, pay)
    assert traced.post().status_code == 503
    (span,) = requests(exporter)
    assert events(span) == ["idempotency.store_failed"]
    assert span.events[0].attributes["error.type"] == "StoreUnavailable"
    assert span.attributes["idempotency.problem"] == "store-unavailable"


def test_a_failure_of_the_lock_is_an_event(make_world, provider, exporter):
    world = make_world(IDEMPOTENCY_REDIS_URL="redis://127.0.0.1:1/0")
    span_for_each_request(world.app, provider)
    instrument_app(world.app, tracer_provider=provider)
    add(world, lambda: ("", 201))
    assert world.post().status_code == 201
    (span,) = requests(exporter)
    assert set(events(span)) == {"idempotency.store_failed"}


def test_an_operation_that_is_held_is_an_event_and_a_rejection(traced, exporter):
    def pay():
        raise Killed

    add(traced, pay, atomic=False)
    with pytest.raises(Killed):
        traced.post()
    end_lease(traced)
    assert traced.post().status_code == 409
    first, second = requests(exporter)
    assert first.attributes["idempotency.outcome"] == "interrupted"
    assert events(second) == ["idempotency.interrupted"]
    assert second.attributes["idempotency.problem"] == "operation-interrupted"


def test_a_step_has_a_span_around_what_it_calls(traced, provider, exporter):
    def charge():
        with provider.get_tracer("http").start_as_current_span("POST"):
            return 5

    add(traced, lambda: {"paid": current_operation.step("charge", charge)}, atomic=False)
    traced.post()
    call, step, request = exporter.get_finished_spans()
    assert step.name == "step charge"
    assert ours(step) == {
        "idempotency.operation": "pay",
        "idempotency.step.name": "charge",
        "idempotency.step.replayed": False,
    }
    assert call.parent.span_id == step.context.span_id
    assert step.parent.span_id == request.context.span_id
    assert step.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("atomic", [True, False])
def test_a_step_that_is_not_repeated_has_a_span_that_says_so(traced, exporter, atomic):
    calls = []

    def pay():
        current_operation.step("charge", lambda: calls.append(1), atomic=atomic)
        if current_operation.attempt == 1:
            raise Retryable
        return {}

    add(traced, pay, atomic=False)
    traced.post()
    traced.post()
    steps = [span for span in exporter.get_finished_spans() if span.name == "step charge"]
    assert [span.attributes["idempotency.step.replayed"] for span in steps] == [False, True]
    assert calls == [1]


def test_a_step_that_fails_has_a_span_without_the_errors_text(traced, exporter):
    def charge():
        raise LookupError("canary")

    add(traced, lambda: current_operation.step("charge", charge), atomic=False)
    assert traced.post().status_code == 500
    step, request = exporter.get_finished_spans()
    assert step.status.status_code is StatusCode.ERROR
    assert step.attributes["error.type"] == "LookupError"
    assert "canary" not in step.to_json()
    assert request.attributes["idempotency.outcome"] == "executed"


def test_run_outside_a_request_uses_the_span_that_is_there(world, provider, exporter):
    instrument_app(world.app, tracer_provider=provider)
    tracer = provider.get_tracer("worker")

    def work():
        return current_operation.step("mail", lambda: "sent")

    def run(payload=None):
        with world.app.app_context(), tracer.start_as_current_span("request"):
            return world.idempotency.run(
                "key-1", work, scope=None, name="work", atomic=False, payload=payload
            )

    assert [run(), run()] == ["sent", "sent"]
    with pytest.raises(KeyReused):
        run({"changed": True})
    first, replay, changed = requests(exporter)
    assert [link.context.span_id for link in replay.links] == [first.context.span_id]
    outcomes = [span.attributes["idempotency.outcome"] for span in (first, replay, changed)]
    assert outcomes == ["executed", "replayed", "rejected"]


def test_without_a_span_there_is_nothing(world, provider, exporter):
    instrument_app(world.app, tracer_provider=provider)
    add(world, lambda: {"paid": current_operation.step("charge", lambda: 5)}, atomic=False)
    assert world.post().json == {"paid": 5}
    assert world.post().json == {"paid": 5}
    assert exporter.get_finished_spans() == ()
    assert "traceparent" not in str(world.records()[0])


def test_a_trace_that_is_not_sampled_is_not_stored(world, exporter):
    provider = provider_to(exporter, sampler=ALWAYS_OFF)
    span_for_each_request(world.app, provider)
    instrument_app(world.app, tracer_provider=provider)
    add(world, lambda: {"paid": current_operation.step("charge", lambda: 5)}, atomic=False)
    assert world.post().json == {"paid": 5}
    assert world.post().headers["Idempotent-Replayed"] == "true"
    assert exporter.get_finished_spans() == ()
    assert "traceparent" not in str(world.records()[0])


def test_neither_key_nor_scope_nor_body_is_on_a_span(traced, exporter):
    def pay():
        current_operation.step("charge", lambda value: {"canary": value}, "canary")
        return {"canary": 1}, 201, {"X-Canary": "canary"}

    add(traced, pay, atomic=False)
    for sent in ({"canary": 1}, {"canary": 1}, {"canary": 2}):
        traced.post(key="canary-key", user="canary-user", json=sent)
    exported = "".join(span.to_json() for span in exporter.get_finished_spans())
    assert "executed" in exported
    assert "replayed" in exported
    assert "rejected" in exported
    assert "canary" not in exported


def test_another_application_is_left_alone(traced, make_world, provider, exporter):
    other = make_world()
    span_for_each_request(other.app, provider)
    add(other, lambda: ("", 201))
    other.post()
    (span,) = requests(exporter)
    assert ours(span) == {}


def test_requests_at_once_have_their_own_links(traced, exporter, background):
    add(traced, lambda: ("", 201))
    barrier = threading.Barrier(4)

    def post(key):
        barrier.wait()
        return traced.post(key=key).status_code

    keys = ["a", "b", "c", "d"]
    for _ in range(2):
        assert [done.result() for done in [background(post, key) for key in keys]] == [201] * 4
    spans = requests(exporter)
    firsts = {span.attributes["idempotency.id"]: span.context.span_id for span in spans[:4]}
    for replay in spans[4:]:
        (link,) = replay.links
        assert link.context.span_id == firsts[replay.attributes["idempotency.id"]]


def test_every_signal_of_an_operation_is_heard(traced):
    """One that is added later should not be forgotten here."""
    names = flask_idempotency.__all__
    signals = [name for name in names if name.startswith(("operation_", "store_", "lock_"))]
    assert len(signals) == 8
    for name in signals:
        assert getattr(flask_idempotency, name).has_receivers_for(traced.app), name


def test_it_comes_after_init_app():
    with pytest.raises(ConfigurationError, match="init_app"):
        instrument_app(Flask("bare"))
