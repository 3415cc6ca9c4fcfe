"""What a page's code may use without making it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Flask, g
from flask_sqlalchemy import SQLAlchemy
from prometheus_client import CollectorRegistry

from flask_idempotency import Idempotency, idempotent
from tests.docs.how_to import Page
from tests.docs.provider import Provider


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


@pytest.fixture
def provider(names: dict[str, Any]) -> Iterator[Provider]:
    """A payment provider, which the application knows."""
    provider = Provider()
    thread = threading.Thread(target=provider.server.serve_forever, args=[0.01])
    thread.start()
    names["app"].config["PROVIDER_URL"] = provider.url
    yield provider
    provider.server.shutdown()
    thread.join()
    provider.server.server_close()
