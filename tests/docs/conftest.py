"""What a page's code may use without making it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Flask, Response, g, request
from flask_sqlalchemy import SQLAlchemy
from prometheus_client import CollectorRegistry

from flask_idempotency import Idempotency, idempotent
from tests.docs.how_to import Page
from tests.served import served


@pytest.fixture
def names(
    postgres: Any, redis_server: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """An application, as the pages' examples have it."""
    # The process's own would keep the application, whose receivers would go on listening.
    monkeypatch.setattr("prometheus_client.REGISTRY", CollectorRegistry())
    app, db, idempotency = Flask("docs"), SQLAlchemy(), Idempotency()
    app.config["SQLALCHEMY_DATABASE_URI"] = postgres.database("docs_names")
    app.config["IDEMPOTENCY_REDIS_URL"] = redis_server.url
    db.init_app(app)
    idempotency.init_app(app, db, scope=lambda: g.account_id)
    made = {"app": app, "db": db, "idempotency": idempotency, "idempotent": idempotent}
    names = {"__name__": "docs", **made}
    yield names
    app.extensions["idempotency"].tracing = None  # it listens, too
    with app.app_context():
        db.engine.dispose()
    names.clear()  # the receivers of signals among them would go on listening, and be counted elsewhere


@pytest.fixture
def page(names: dict[str, Any], probing_at_once: None) -> Callable[..., Page]:
    """Puts a how-to page into the application."""
    return lambda name, of="": Page(name, names, of)


class Provider:
    """A payment provider over HTTP. Its ledger has each charge that it made."""

    def __init__(self) -> None:
        self.deduplicates, self.refuses, self.loses, self.garbles = True, 0, 0, 0
        self.ledger: list[str] = []
        self.app = Flask("provider")
        self.app.post("/charges")(self.charge)
        self.app.get("/charges")(self.find)
        self.app.post("/bookings", endpoint="book")(lambda: ({"booked": True}, 201))

    def charge(self) -> Any:
        if self.refuses:
            return {"refused": True}, self.refuses
        request.get_data()  # or werkzeug waits for the rest of it before it hangs up
        key = request.headers["Idempotency-Key"]
        if not (self.deduplicates and key in self.ledger):
            self.ledger.append(key)
        if self.loses:
            self.loses -= 1
            return Response(headers={"Content-Length": "100"})  # it breaks off
        if self.garbles:
            self.garbles -= 1
            return "<html>"
        return {"id": f"ch_{self.ledger.index(key)}"}

    def find(self) -> Any:
        key = request.args["reference"]
        return [{"id": f"ch_{self.ledger.index(key)}"}] if key in self.ledger else []


@pytest.fixture
def provider(names: dict[str, Any]) -> Iterator[Provider]:
    """A payment provider, which the application knows."""
    provider = Provider()
    with served(provider.app) as names["app"].config["PROVIDER_URL"]:
        yield provider
