"""An application that needs no server, for tests of what is protected."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import ConfigurationError, Idempotency
from tests.stores import on_sqlite

MUTATING = ("POST", "PUT", "PATCH", "DELETE")


def wrapping(view: Any) -> Any:
    """A decorator as most are."""
    return functools.wraps(view)(nameless(view))


def nameless(view: Any) -> Any:
    """A decorator that forgets whom it wraps."""
    return lambda *args, **kwargs: view(*args, **kwargs)  # noqa: PLW0108


class Shop:
    """An application without servers; its view ``pay`` counts its runs."""

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

    def add(self, path: str, target: Any = None, view: Any = None, **options: Any) -> None:
        """Register a view, ``pay`` unless given, of the endpoint that the path names."""
        options = {"endpoint": path.strip("/"), "methods": ["GET", *MUTATING], **options}
        (target or self.app).add_url_rule(path, view_func=view or self.pay, **options)

    def post(self, path: str = "/payments", key: str | None = "key-1", method: str = "POST") -> Any:
        headers = {} if key is None else {"Idempotency-Key": key}
        return self.app.test_client().open(path, method=method, json={}, headers=headers)

    def is_protected(self, path: str = "/payments", method: str = "POST") -> bool:
        first, again = (self.post(path, f"for-{method}", method) for _ in range(2))
        assert (first.status_code, again.status_code) == (201, 201)
        return "Idempotent-Replayed" in again.headers

    def protected_methods(self, path: str) -> set[str]:
        return {method for method in MUTATING if self.is_protected(path, method)}

    def assert_refused(
        self, endpoint: str = "pay", path: str = "/payments", method: str = "POST"
    ) -> None:
        before, said = self.runs, f"the endpoint {endpoint!r}, .*Put @idempotent below"
        for _ in range(2):
            with pytest.raises(ConfigurationError, match=said):
                self.post(path, method=method)
        assert self.runs == before


@pytest.fixture
def shop() -> Shop:
    return Shop()
