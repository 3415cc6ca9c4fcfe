"""The same views in Flask, three frameworks on it, and below blueprints that handle every error.

Each is there twice: protected, and with ``plain/`` before its name unprotected.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import connexion
import flask_restful
import flask_restx
import sqlalchemy as sa
from a2wsgi import ASGIMiddleware
from connexion.resolver import Resolver
from flask import Blueprint, Flask, abort, request
from flask_sqlalchemy import SQLAlchemy
from werkzeug.exceptions import HTTPException, UnprocessableEntity

from flask_idempotency import Idempotency, idempotent
from tests.docs.pages import ROOT, blocks

PAGE = ROOT / "docs/http.md"
"""It has the error handlers that Connexion needs."""

db = SQLAlchemy()
idempotency = Idempotency()

FRAMEWORKS = ("flask", "restful", "restx", "blueprint", "nested", "connexion")


def report() -> Any:
    """Its response is longer than the shop keeps."""
    return {"amount": request.get_json()["amount"], "note": "x" * 2000}, 201


def conflict() -> Any:
    """The database gives the transaction up."""
    db.session.execute(
        sa.text("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = 'serialization_failure'; END $$")
    )


def cut_off() -> Any:
    """The connection is lost in the view."""
    db.session.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))


PROTECTED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "payments": (lambda: ({}, 201), {}),
    "reports": (report, {}),
    "withdrawals": (lambda: ({}, 201), {"authorize_replay": lambda _operation: False}),
    "charges": (lambda: ({}, 201), {"atomic": False}),
    "conflicts": (conflict, {}),
    "outages": (cut_off, {}),
}


def abort_with_data(status: int) -> Callable[[str], Any]:
    """``abort`` as the framework has it, with members of the response for those that take them."""

    def view(framework: str) -> Any:
        if framework == "restful":
            flask_restful.abort(status, message="no", code=7)
        elif framework == "restx":
            flask_restx.abort(status, "no", code=7)
        else:
            abort(status, "no")

    return view


def invalid(_framework: str) -> Any:
    """As webargs and flask-smorest raise what marshmallow has found."""
    error = UnprocessableEntity()
    error.data = {"messages": {"json": {"amount": ["Not a number."]}}}  # type: ignore[attr-defined]
    raise error


def crash(_framework: str) -> Any:
    raise ValueError("a mistake in the view")


ERRORS: dict[str, Callable[[str], Any]] = {
    **{f"abort-{status}": abort_with_data(status) for status in (400, 401, 409, 422, 500, 503)},
    "invalid": invalid,
    "crash": crash,
    "form": lambda _framework: request.form["missing"],
}


RESULTS: dict[str, Callable[[], Any]] = {
    "mapping": lambda: ({"amount": 5}, 201, {"X-Own": "yes"}),
    "nothing": lambda: (None, 204),
    "text": lambda: "text",
}
"""What a resource may return: each framework makes a response of its own of it."""


def create_app() -> Flask:
    app = Flask(__name__)
    app.config["PROPAGATE_EXCEPTIONS"] = False
    set_up(app)
    app.add_url_rule("/", view_func=lambda: "ready", endpoint="ready")
    catching, outer, inner = (Blueprint(name, __name__) for name in ("catching", "outer", "inner"))
    for blueprint in (catching, outer):
        blueprint.register_error_handler(Exception, answer_everything)
    operations: dict[str, Any] = {}
    add = {**adders(app, catching, inner), "connexion": operations.__setitem__}
    for framework, api, kind in (
        ("restful", flask_restful.Api, flask_restful.Resource),
        ("restx", flask_restx.Api, flask_restx.Resource),
    ):
        outside = Blueprint(f"{framework}-outside", __name__, url_prefix=f"/{framework}/outside")
        protected = api(outside, decorators=[idempotent])
        for name, function in RESULTS.items():
            add[framework](f"plain/{name}", view_of(function))
            protected.add_resource(type(name, (kind,), {"post": view_of(function)}), f"/{name}")
        app.register_blueprint(outside)
    for framework in FRAMEWORKS:
        for name, (function, options) in PROTECTED.items():
            add[framework](name, idempotent(**options)(view_of(function)))
        for name, error in ERRORS.items():
            function = error_of(error, framework)
            add[framework](name, idempotent(view_of(function)))
            add[framework](f"plain/{name}", view_of(function))
    outer.register_blueprint(inner)
    app.register_blueprint(catching)
    app.register_blueprint(outer)
    app.wsgi_app = in_front_of(app.wsgi_app, connexion_shop(operations))  # type: ignore[method-assign]
    with app.app_context():
        db.create_all()
    return app


def set_up(app: Flask) -> None:
    app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["DATABASE_URL"]
    app.config["IDEMPOTENCY_MAX_RESPONSE_BYTES"] = 1000
    db.init_app(app)
    idempotency.init_app(app, db, scope=lambda: request.headers.get("X-User"))


def connexion_shop(operations: dict[str, Any]) -> connexion.FlaskApp:
    """The page's application of Connexion with these views, each for POST at its name."""
    names: dict[str, Any] = {"__name__": __name__}
    [recipe] = [each for each in blocks(PAGE, "python") if "connexion" in each.text]
    exec(compile(recipe.source, str(PAGE), "exec"), names)  # noqa: S102
    shop: connexion.FlaskApp = names["connexion_app"]
    set_up(shop.app)
    responses = {"default": {"description": "any", "content": {"application/json": {}}}}
    paths = {
        f"/connexion/{name}": {"post": {"operationId": f"connexion-{name}", "responses": responses}}
        for name in operations
    }
    document = {"openapi": "3.0.3", "info": {"title": "shop", "version": "1"}, "paths": paths}
    views = {f"connexion-{name}": view for name, view in operations.items()}
    shop.add_api(document, resolver=Resolver(views.__getitem__))
    return shop


def in_front_of(app: Any, shop: connexion.FlaskApp) -> Any:
    """Connexion is an ASGI application around that of Flask; here both are on one server."""
    outside = cache(lambda: ASGIMiddleware(shop))  # it has a thread, which no fork would inherit

    def choose(environ: dict[str, Any], start: Any) -> Any:
        chosen = outside() if environ["PATH_INFO"].startswith("/connexion/") else app
        return chosen(environ, start)

    return choose


def answer_everything(error: Exception) -> Any:
    if isinstance(error, HTTPException):
        return {"caught": error.name}, error.code
    return {"caught": type(error).__name__}, 500


def error_of(function: Callable[[str], Any], framework: str) -> Callable[[], Any]:
    return lambda: function(framework)


def view_of(function: Callable[[], Any]) -> Callable[..., Any]:
    """A view or a method of a resource, as it is called with or without ``self``."""
    return lambda *_resource: function()


def adders(app: Flask, catching: Blueprint, inner: Blueprint) -> dict[str, Callable[[str, Any], None]]:
    """How each framework is given a view for POST at a name."""
    restful, restx = flask_restful.Api(app), flask_restx.Api(app, doc=False, add_specs=False)

    def add(target: Any, prefix: str) -> Callable[[str, Any], None]:
        def adder(name: str, view: Any) -> None:
            endpoint = f"{prefix}-{name}".replace("/", "-")
            target.add_url_rule(f"/{prefix}/{name}", endpoint, view, methods=["POST"])

        return adder

    def add_resource(api: Any, kind: Any, prefix: str) -> Callable[[str, Any], None]:
        def adder(name: str, view: Any) -> None:
            endpoint = f"{prefix}-{name}".replace("/", "-")
            api.add_resource(
                type(endpoint, (kind,), {"post": view}), f"/{prefix}/{name}", endpoint=endpoint
            )

        return adder

    return {
        "flask": add(app, "flask"),
        "restful": add_resource(restful, flask_restful.Resource, "restful"),
        "restx": add_resource(restx, flask_restx.Resource, "restx"),
        "blueprint": add(catching, "blueprint"),
        "nested": add(inner, "nested"),
    }
