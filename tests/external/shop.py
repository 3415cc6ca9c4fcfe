"""A shop that charges at somebody else's: what gunicorn loads.

An order is three steps: a charge at the provider, a row in the database, a mail. There is one route
for each ``on_interrupted``; the request may ask its worker to be killed (``X-Kill``) or stopped
(``X-Stop``) at a point. What begins with ``X-Provider-`` goes along to the provider.
"""

from __future__ import annotations

import json
import os
import signal
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import Mapped, mapped_column

from flask_idempotency import Idempotency, Retryable, current_operation, idempotent, operation_executed

JSON = {"Content-Type": "application/json"}

db = SQLAlchemy()


class Order(db.Model):  # type: ignore[name-defined, misc]
    """Nothing is unique: a second run must show."""

    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[str]
    charge: Mapped[str]


def point(name):
    """Be killed or stopped here, if the request asks for it."""
    for header, number in (("X-Kill", signal.SIGKILL), ("X-Stop", signal.SIGSTOP)):
        if request.headers.get(header) == name:
            os.kill(os.getpid(), number)


def call(method, path, *, key="", **headers):
    """Call the provider. Without a result nobody knows: whoever tries again, has the same key."""
    connection = HTTPConnection(urlsplit(os.environ["PROVIDER_URL"]).netloc, timeout=30)
    body = json.dumps({"order": current_operation.key})
    try:
        connection.request(method, path, body, {**JSON, "Idempotency-Key": key, **headers})
        point(f"{path[1:]} sent")
        response = connection.getresponse()
        return json.loads(response.read())
    except (OSError, HTTPException) as error:
        raise Retryable("The provider gave no answer.") from error
    finally:
        connection.close()


def charge(key):
    point("charge begun")
    prefix = "X-Provider-"
    asked = {f"X-{name[len(prefix) :]}": v for name, v in request.headers if name.startswith(prefix)}
    result = call("POST", "/charges", key=key, **asked)
    point("charge made")
    return result


def write_order(charge):
    order = Order(number=current_operation.key, charge=charge)
    db.session.add(order)
    db.session.commit()
    point("order written")
    return order.id


def mail(key):
    dedupe = request.headers.get("X-Provider-Dedupe", "on")
    result = call("POST", "/mails", key=key, **{"X-Dedupe": dedupe})
    point("mail made")
    return result


def buy():
    point("begun")
    key = current_operation.derive_key("charge")
    paid = current_operation.step("charge", charge, key)
    point("charge recorded")
    return finish(paid)


def finish(paid):
    """All that comes after the charge."""
    order = current_operation.step("order", write_order, paid["id"], atomic=True)
    point("order committed")
    current_operation.step("mail", mail, current_operation.derive_key("mail"))
    point("mail recorded")
    return {"order": order, "charge": paid["id"], "attempt": current_operation.attempt}, 201


def ask(operation):
    """Find out at the provider: go on from a charge that was made, or (None) begin again."""
    paid = call("GET", "/find/" + operation.derive_key("charge"))
    return None if paid is None else finish(paid)


POLICIES: dict[str, Any] = {"hold": "hold", "retry": "retry", "ask": ask}


def create_app():
    app = Flask(__name__)
    app.config.update(
        SQLALCHEMY_DATABASE_URI=os.environ["DATABASE_URL"],
        IDEMPOTENCY_REDIS_URL=os.environ.get("REDIS_URL") or None,
        IDEMPOTENCY_LEASE=1,
    )
    db.init_app(app)
    Idempotency(app, db, scope=lambda: request.authorization and request.authorization.token)
    app.add_url_rule("/", view_func=lambda: "ready", endpoint="ready")
    for name, policy in POLICIES.items():
        view = idempotent(atomic=False, on_interrupted=policy)(buy)
        app.add_url_rule(f"/{name}", name, view, methods=["POST"])
    operation_executed.connect(lambda *_, **__: point("answer stored"), app, weak=False)
    return app
