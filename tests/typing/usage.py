"""Typed usage of the public face: mypy checks it, nobody runs it."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID, uuid4

from flask import Blueprint, Flask, Response
from flask.views import MethodView
from flask_sqlalchemy import SQLAlchemy
from typing_extensions import assert_type

from flask_idempotency import (
    Event,
    Idempotency,
    KeyReused,
    Operation,
    Problem,
    current_operation,
    idempotent,
    operation_executed,
)

db = SQLAlchemy()
idempotency = Idempotency()
bp = Blueprint("payments", __name__)


def tenant() -> UUID:
    return uuid4()


def create_app() -> Flask:
    app = Flask(__name__)
    db.init_app(app)
    idempotency.init_app(app, db, scope=tenant)
    Idempotency(app, db, scope=None)
    idempotency.protect(bp, ttl=timedelta(days=2), required=False)
    return app


@bp.post("/payments/<int:number>")
@idempotent
def bare(number: int) -> tuple[dict[str, int], int]:
    return {"attempt": current_operation.attempt}, 201


assert_type(bare(1), tuple[dict[str, int], int])


def may_replay(operation: Operation) -> bool:
    return operation.scope is not None


@bp.post("/orders")
@idempotent(ttl=3600, wait=2.5, fingerprint=["/id"], key="json:/id", authorize_replay=may_replay)
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


@operation_executed.connect
def heard(sender: Flask, event: Event) -> None:
    assert_type(event.seconds, "float | None")


def own_format(error: Problem) -> tuple[dict[str, str], int]:
    assert isinstance(error, KeyReused)
    return {"error": error.detail}, error.status
