"""An application that needs no server, for tests of what is protected."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import ConfigurationError, Idempotency, idempotent
from tests.stores import on_sqlite

OWN = idempotent(authorize_replay=lambda _operation: False)
"""By this option the tests know whose options count."""


def wrapping(view: Any) -> Any:
    """A decorator as most are."""
    return functools.wraps(view)(nameless(view))


def nameless(view: Any) -> Any:
    """A decorator that forgets whom it wraps."""
    return lambda *args, **kwargs: view(*args, **kwargs)  # noqa: PLW0108


class Shop:
    """Its view ``pay`` counts its runs."""

    def __init__(self, kind: type[Flask] = Flask, idempotency: Idempotency | None = None) -> None:
        self.app = kind("shop")
        self.app.config.update(
            **on_sqlite(self), API_TITLE="shop", API_VERSION="1", OPENAPI_VERSION="3.0.3"
        )
        self.app.testing = True
        db = SQLAlchemy(self.app)
        self.idempotency = idempotency or Idempotency()
        self.idempotency.init_app(self.app, db, scope=None)
        with self.app.app_context():
            db.create_all()
        self.runs = 0

        def pay(**values: Any) -> Any:
            self.runs += 1
            return {"run": self.runs}, 201

        self.pay = pay

    def add(self, path: str, target: Any = None, view: Any = None) -> None:
        """Register a view, ``pay`` unless given, of the endpoint that the path names."""
        options = {"endpoint": path.strip("/"), "methods": ["GET", "POST", "PUT", "PATCH", "DELETE"]}
        (target or self.app).add_url_rule(path, view_func=view or self.pay, **options)

    def post(self, path: str = "/payments", key: str | None = "key-1", method: str = "POST") -> Any:
        headers = {} if key is None else {"Idempotency-Key": key}
        return self.app.test_client().open(path, method=method, json={}, headers=headers)

    def found(self, path: str = "/payments", method: str = "POST") -> str:
        """A view has its "own" options, is "covered" without them, or "plain"; or it is "refused"."""
        before, said = self.runs, None
        try:
            first, again = (self.post(path, f"for-{method}", method) for _ in range(2))
        except ConfigurationError as error:
            said = str(error)
        if said is not None:
            assert "Put @idempotent below" in said
            assert self.runs == before
            return "refused"
        assert first.status_code == 201
        if again.status_code == 403:
            return "own"
        assert again.status_code == 201
        return "covered" if "Idempotent-Replayed" in again.headers else "plain"

    def covered_methods(self, path: str) -> str:
        methods = ("POST", "PUT", "PATCH", "DELETE")
        return " ".join(method for method in methods if self.found(path, method) == "covered")


@pytest.fixture
def shop() -> Shop:
    return Shop()
