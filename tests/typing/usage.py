"""Typed usage of the public face: mypy checks it, nobody runs it."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import uuid4

import httpx
import requests
from flask import Blueprint, Flask, Response
from flask.views import MethodView
from flask_sqlalchemy import SQLAlchemy
from typing_extensions import assert_type

from flask_idempotency import (
    Idempotency,
    IdempotencyError,
    KeyReused,
    OperationFailed,
    OperationInterrupted,
    RequestInProgress,
    Retryable,
    after_commit,
    current_operation,
    idempotent,
    operation_executed,
    operation_interrupted,
)
from flask_idempotency.client import IdempotentSession, IdempotentTransport, derive_key, new_key
from flask_idempotency.integrations.openapi import add_idempotency
from flask_idempotency.session.operation import Operation
from flask_idempotency.testing import (
    CRASH_POINTS,
    age,
    assert_idempotent,
    assert_idempotent_call,
    crash_at,
    every_crash,
)
from flask_idempotency.web.signals import Event

db = SQLAlchemy()
idempotency = Idempotency()
bp = Blueprint("payments", __name__)


def create_app() -> Flask:
    app = Flask(__name__)
    db.init_app(app)
    idempotency.init_app(app, db, scope=uuid4)
    Idempotency(app, db, scope=None)
    add_idempotency({"openapi": "3.1.0"}, app, prefix="/api")
    idempotency.protect(bp, ttl=timedelta(days=2), required=False)
    idempotency.protect(app, methods=["POST"], skip=lambda request: request.path == "/admin")
    assert_type(idempotency.exempt(bp), Blueprint)
    assert_type(idempotency.exempt("shop.search"), str)
    return app


@idempotent
def bare(number: int) -> tuple[dict[str, int], int]:
    return {"attempt": current_operation.attempt}, 201


assert_type(bare(1), tuple[dict[str, int], int])


def may_replay(operation: Operation) -> bool:
    return operation.scope is not None


@idempotent(ttl=3600, wait=2.5, fingerprint=["/id"], key=lambda: 7, authorize_replay=may_replay)
def with_options() -> str:
    return current_operation.key


assert_type(with_options(), str)


@idempotent(store=lambda response: response.status_code < 400, scope=None, name="orders")
async def asynchronous() -> Response:
    return Response()


class Orders(MethodView):
    decorators = [idempotent]  # noqa: RUF012

    @idempotency.exempt
    def post(self) -> str:
        return ""


@operation_interrupted.connect
@operation_executed.connect
def heard(sender: Flask, event: Event) -> None:
    assert_type(event.seconds, "float | None")
    assert_type(event.attempt, "int | None")


def own_format(error: IdempotencyError) -> tuple[dict[str, str], int]:
    assert isinstance(error, KeyReused)
    return {"error": error.detail}, error.status


def find_out(operation: Operation) -> tuple[dict[str, str], int] | None:
    return ({"found": operation.derive_key("charge")}, 201) if operation.attempt > 2 else None


def charge_card(amount: int, *, key: str = "") -> dict[str, Any]:
    return {"amount": amount, "key": key}


@bp.post("/charges")
@idempotent(atomic=False, lease=timedelta(seconds=30), on_interrupted=find_out)
def steps() -> tuple[dict[str, Any], int]:
    key = current_operation.derive_key("charge")
    assert_type(key, str)
    charge = current_operation.step("charge", charge_card, 5, key=key)
    assert_type(charge, "dict[str, Any]")
    assert_type(current_operation.step("length", len, "abc", atomic=True), int)
    current_operation.extend(2.5)
    after_commit(lambda: charge_card(5))
    if not charge:
        raise Retryable("The provider is busy.", retry_after=5)
    return charge, 201


def outside_of_a_request(event: dict[str, Any]) -> None:
    number = idempotency.run(event["id"], len, "abc", scope="provider", payload=event, ttl=3600)
    assert_type(number, int)
    try:
        idempotency.run("1", steps, atomic=False, lease=5, on_interrupted="retry", name="steps")
    except RequestInProgress as busy:
        assert_type(busy.retry_after, "int | None")
    except (OperationFailed, OperationInterrupted, IdempotencyError) as error:
        assert_type(error.detail, str)


def tests_of_its_own(app: Flask) -> None:
    client = app.test_client()
    for point in CRASH_POINTS:
        with crash_at(point, app) as crash:
            assert_idempotent(client, "POST", "/payments", json={}, effects=lambda: {"payments": 1})
            assert_idempotent(client, "POST", "/payments", effects=lambda: 1, changed={"json": [1]})
            assert_idempotent(client, "POST", "/payments", effects=lambda: Decimal(5), other=client)
            assert_idempotent(client, "POST", "/payments", other={"headers": {}}, timeout=60)
            age(app, timedelta(days=1))
        assert_type(crash.happened, bool)
    assert_idempotent_call(app, lambda: idempotency.run("key", dict), raises=OSError)
    for block in every_crash(app):
        with block as crash:
            assert_type(crash.place, "int | None")


assert_type(new_key(), str)
assert_type(derive_key("create-payment", {"order": 7, "lines": [1, None]}), str)

session = IdempotentSession()
session.deadline, session.timeout, session.header = 20, (3, 30), "X-Key"
session.post("https://api.example.com/", headers={"Idempotency-Key": new_key()})
session.mount("https://", requests.adapters.HTTPAdapter(pool_maxsize=50))
plain: requests.Session = session

transport = IdempotentTransport(httpx.HTTPTransport(proxy="http://proxy.example.com"))
transport.deadline = 20
assert_type(httpx.Client(transport=transport).post("https://api.example.com/"), httpx.Response)
httpx.AsyncClient(transport=IdempotentTransport(httpx.AsyncHTTPTransport()))
