"""For who operates the shop: the console at ``/operations/`` and ``/metrics``, behind one sign-in."""

import hmac
import os

from flask import Blueprint, Flask, Response, current_app, request
from flask.typing import ResponseReturnValue
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from werkzeug.datastructures import WWWAuthenticate

from example.extensions import csrf, idempotency
from flask_idempotency.integrations.prometheus import RecordsCollector, export_metrics

blueprint = Blueprint("metrics", __name__)


def operator() -> str | Response:
    """Who operates the shop, by HTTP Basic. Without an ``OPERATOR_PASSWORD`` nobody gets in."""
    expected = current_app.config["OPERATOR_PASSWORD"]
    given = request.authorization
    password = given.password if given is not None and given.type == "basic" else None
    if expected and password and hmac.compare_digest(password.encode(), expected.encode()):
        return given.username or "operator"
    challenge = WWWAuthenticate("basic", {"realm": "operations", "charset": "UTF-8"})
    return Response(
        "Sign in with your name and the password of operators.\n",
        401,
        {"WWW-Authenticate": challenge.to_header()},
    )


def init_app(app: Flask) -> None:
    """Comes after ``idempotency.init_app``."""
    console = idempotency.console_blueprint(authorize=operator)
    csrf.exempt(console)  # its forms have a token of their own
    app.register_blueprint(console, url_prefix="/operations")
    app.register_blueprint(blueprint)
    export_metrics(app)
    registry = app.extensions["metrics"] = CollectorRegistry()
    registry.register(RecordsCollector(app))
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # gunicorn.conf.py sets it: all workers together
        MultiProcessCollector(registry)
    else:
        registry.register(REGISTRY)


@blueprint.get("/metrics")
def show() -> ResponseReturnValue:
    """Prometheus sends the operator's password, too (``basic_auth`` of its configuration)."""
    if isinstance(refused := operator(), Response):
        return refused
    latest = generate_latest(current_app.extensions["metrics"])
    return Response(latest, content_type=CONTENT_TYPE_LATEST)
