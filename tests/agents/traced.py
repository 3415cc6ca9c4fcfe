"""A shop under an agent for tracing: ``python -m tests.agents.traced NAME URL``.

Agents change whole modules, so each has a process of its own. It fails if a client, the database or the
agent saw anything else than they should.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from flask import Flask

TOLD: list[str] = []
"""Every text that the agent has heard of."""


def ddtrace() -> None:
    """Datadog."""
    os.environ["DD_INSTRUMENTATION_TELEMETRY_ENABLED"] = "false"
    os.environ["DD_REMOTE_CONFIGURATION_ENABLED"] = "false"
    os.environ["DD_DBM_PROPAGATION_MODE"] = "full"  # comments in front of statements
    import ddtrace
    from ddtrace.trace import TraceFilter, tracer

    class Hear(TraceFilter):
        def process_trace(self, trace: Any) -> None:
            for span in trace:
                TOLD.extend([span.name, span.resource, str(span.get_tags())])

    tracer.configure(trace_processors=[Hear()])
    ddtrace.patch(psycopg=True, flask=True, sqlalchemy=True)


def elastic() -> Callable[[Flask], None]:
    """Elastic APM."""
    import elasticapm
    from elasticapm.contrib.flask import ElasticAPM
    from elasticapm.transport.base import Transport

    class Hear(Transport):
        def queue(self, _kind: str, data: Any, flush: bool = False) -> None:
            TOLD.append(repr(data))

    globals()["Hear"] = Hear
    elasticapm.instrument()

    def start(app: Flask) -> None:
        here = f"{__name__}.Hear"
        ElasticAPM(
            app, service_name="shop", transport_class=here, central_config=False, cloud_provider="none"
        )

    return start


def newrelic() -> Callable[[Flask], None]:
    """New Relic."""
    os.environ["NEW_RELIC_DEVELOPER_MODE"] = "true"
    os.environ["NEW_RELIC_LICENSE_KEY"] = "0" * 40
    os.environ["NEW_RELIC_APP_NAME"] = "shop"
    os.environ["NEW_RELIC_LOG"] = "stderr"
    from newrelic import agent
    from newrelic.api import database_trace

    agent.initialize()
    begin = database_trace.DatabaseTrace.__init__

    def hear(self: Any, sql: Any, *args: Any, **kwargs: Any) -> None:
        TOLD.append(str(sql))
        begin(self, sql, *args, **kwargs)

    database_trace.DatabaseTrace.__init__ = hear

    def start(app: Flask) -> None:
        agent.register_application(timeout=10)
        app.wsgi_app = agent.WSGIApplicationWrapper(app.wsgi_app)  # type: ignore[method-assign]

    return start


def opentelemetry_psycopg2() -> None:
    """OpenTelemetry below SQLAlchemy."""
    from opentelemetry.instrumentation.psycopg2 import Psycopg2Instrumentor

    Psycopg2Instrumentor().instrument(tracer_provider=_provider(), enable_commenter=True)


def opentelemetry_sqlalchemy() -> Callable[[Flask], None]:
    """OpenTelemetry on SQLAlchemy. Of Flask-SQLAlchemy's engines it has to be told."""
    from opentelemetry.instrumentation.sqlalchemy import SQLAlchemyInstrumentor

    def start(app: Flask) -> None:
        with app.app_context():
            engine = app.extensions["sqlalchemy"].engine
        SQLAlchemyInstrumentor().instrument(
            engine=engine,
            tracer_provider=_provider(),
            enable_commenter=True,
            skip_dep_check=True,  # it does not claim to know the newest SQLAlchemy
        )

    return start


def _provider() -> Any:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

    class Hear(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            TOLD.extend(span.to_json() for span in spans)
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(Hear()))
    return provider


def sentry() -> None:
    """Sentry."""
    import sentry_sdk

    def hear(event: Any, _hint: Any) -> None:
        TOLD.append(json.dumps(event, default=str))

    sentry_sdk.init(
        "http://public@localhost/1",
        traces_sample_rate=1.0,
        before_send_transaction=hear,
        before_send=hear,
    )


AGENTS = (ddtrace, elastic, newrelic, opentelemetry_psycopg2, opentelemetry_sqlalchemy, sentry)


STAYED = [471101, 471103, 471104, 471105]
SECRET = re.compile("4711|alice")
OURS = re.compile(r"txid|idempotency_|'idempotency\.")  # not the names of our modules


def check(url: str, start: Callable[[Flask], object] | None) -> None:  # noqa: PLR0915
    """Send two requests and their retries, and look at what came of them."""
    import sqlalchemy as sa
    from flask_sqlalchemy import SQLAlchemy

    from flask_idempotency import Idempotency, current_operation, idempotent

    db = SQLAlchemy()

    class Payment(db.Model):  # type: ignore[name-defined, misc]
        id = sa.Column(sa.Integer, primary_key=True)
        amount = sa.Column(sa.Integer, nullable=False)

    app = Flask("shop")
    app.config.update(SQLALCHEMY_DATABASE_URI=url, IDEMPOTENCY_STORE="postgres")
    db.init_app(app)
    if start is not None:
        start(app)
    Idempotency(app, db, scope=None)
    runs: list[int] = []
    amounts_there = sa.select(Payment.amount).order_by("amount")

    def save(amount: int) -> None:
        db.session.add(Payment(amount=amount))
        db.session.flush()

    @app.before_request
    def sign_in() -> None:
        cursor = db.session.connection().connection.cursor()
        cursor.execute("select set_config('app.tenant', %s, true)", ("alice",))

    @app.post("/payments")
    @idempotent
    def pay() -> Any:
        runs.append(current_operation.attempt)
        tenant = db.session.scalar(sa.text("select current_setting('app.tenant')"))
        save(471101)
        db.session.commit()
        save(471102)
        db.session.rollback()
        with db.session.begin_nested():
            save(471103)
        pooled = db.session.connection().connection
        with pooled.cursor() as cursor:
            cursor.execute("insert into payment (amount) values (%s) returning amount", (471104,))
            returned = [row[0] for row in cursor]
        with pooled.driver_connection.cursor() as cursor:
            cursor.execute("select count(*) from payment")
            returned.append(cursor.fetchone()[0])
        db.session.commit()
        amounts = list(db.session.scalars(amounts_there.execution_options(yield_per=2)))
        return {"tenant": tenant, "returned": returned, "amounts": amounts}, 201

    @app.post("/leased")
    @idempotent(atomic=False, on_interrupted="retry")
    def leased() -> Any:
        runs.append(current_operation.attempt)
        tenant = db.session.scalar(sa.text("select current_setting('app.tenant')"))
        current_operation.step("save", save, 471105, atomic=True)
        return {"tenant": tenant}, 201

    with app.app_context():
        db.create_all()
    TOLD.clear()
    paid = {"tenant": "alice", "returned": [471104, 3], "amounts": STAYED[:3]}
    for path, body in ("payments", paid), ("leased", {"tenant": "alice"}):
        for replayed in None, "true":
            response = app.test_client().post(f"/{path}", headers={"Idempotency-Key": path})
            told = response.status_code, response.headers.get("Idempotent-Replayed"), response.json
            assert told == (201, replayed, body), told
    told = TOLD[:]
    assert runs == [1, 1], "each view ran once"
    with app.app_context():
        assert list(db.session.scalars(amounts_there)) == STAYED
        states = db.session.scalars(sa.text("select state from idempotency_record"))
        assert list(states) == ["completed"] * 2
        db.session.remove()
        db.engine.dispose()
    assert any("INSERT INTO payment" in text for text in told), "the agent hears what the view sent"
    assert [text for text in told if SECRET.search(text)] == [], "no value reaches a trace"
    assert [text for text in told if OURS.search(text)] == [], "nothing of ours is among it"


if __name__ == "__main__":
    from tests.agents import traced  # as which an agent finds the class that it is told of

    agents = {agent.__name__: agent for agent in traced.AGENTS}
    traced.check(sys.argv[2], agents[sys.argv[1]]())
