"""A request that goes on in a child as well: it was forked while the request asked for something.

So it is under gevent, where a fork copies the greenlets of all requests. A case is as
``atomic/lock``: a route, and what was asked for. Each copy writes a line of JSON, the child first: the
case, the status of the answer, and whether the view ran.
"""

from __future__ import annotations

import json
import os
from typing import Any

import sqlalchemy as sa
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import Mapped, mapped_column

from flask_idempotency import Idempotency, idempotent
from flask_idempotency.web.routes import app_state

db = SQLAlchemy()
ran: list[str] = []


class Payment(db.Model):  # type: ignore[name-defined, misc]
    """Deliberately without a key that is unique."""

    id: Mapped[int] = mapped_column(primary_key=True)


def pay() -> Any:
    ran.append("here")
    db.session.add(Payment())
    db.session.commit()
    return {}, 201


def create_app() -> Flask:
    app = Flask(__name__)
    app.config.update(
        SQLALCHEMY_DATABASE_URI=os.environ["DATABASE_URL"],
        IDEMPOTENCY_STORE=os.environ["STORE"],
        IDEMPOTENCY_REDIS_URL=os.environ["REDIS_URL"] or None,
        PROPAGATE_EXCEPTIONS=False,
    )
    db.init_app(app)
    Idempotency(app, db, scope=None)
    options: dict[str, Any] = {"atomic": {}, "leased": {"atomic": False}}
    for name, chosen in options.items():
        app.add_url_rule(f"/{name}", name, idempotent(name=name, **chosen)(pay), methods=["POST"])
    with app.app_context():
        db.create_all()
    return app


def fork() -> None:
    if child := os.fork():
        os.waitpid(child, 0)


def fork_after(owner: Any, name: str) -> None:
    """Fork once, when a method has done its work."""
    method = getattr(owner, name)

    def once(*arguments: Any) -> Any:
        setattr(owner, name, method)
        result = method(*arguments)
        fork()
        return result

    setattr(owner, name, once)


def fork_at(app: Flask, place: str) -> None:
    engine: Any = app_state(app).engine
    match place:
        case "lock":
            fork_after(type(engine.lock), "acquire")
        case "claim":
            fork_after(engine._records, "claim")
        case "checkout":
            with app.app_context():
                sa.event.listen(db.engine, "checkout", lambda *_what: fork(), once=True)


def main(cases: list[str]) -> None:
    app, parent = create_app(), os.getpid()
    for case in cases:
        route, _, place = case.partition("/")
        ran.clear()
        fork_at(app, place)
        answer = app.test_client().post(f"/{route}", headers={"Idempotency-Key": case})
        print(json.dumps([case, answer.status_code, bool(ran)]), flush=True)
        if os.getpid() != parent:
            os._exit(0)
