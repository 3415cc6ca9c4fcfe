"""An application with Sentry, which patches Flask and logging for good: so in a process of its own.

Prints, as one JSON object, the events that Sentry would have sent for each situation. Its arguments are
the URL of a database and Python code that calls ``sentry_sdk.init``. It reads a line: what every key,
scope, body and response contains. Sentry sends source code and arguments, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import sentry_sdk
import sqlalchemy as sa
from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy
from sentry_sdk.transport import Transport

from flask_idempotency import Idempotency, current_operation, idempotent
from tests.killed import Killed

EVENTS: list[Any] = []


class Kept(Transport):
    """Keeps what would be sent."""

    def capture_envelope(self, envelope: Any) -> None:
        EVENTS.extend(event for item in envelope.items if (event := item.get_event()) is not None)


sentry_sdk.init = partial(sentry_sdk.init, transport=Kept)  # type: ignore[assignment]
exec(sys.argv[2])  # noqa: S102
CANARY = input()

app = Flask("shop")
app.config["SQLALCHEMY_DATABASE_URI"] = sys.argv[1]
db = SQLAlchemy(app)
idempotency = Idempotency(app, db, scope=lambda: request.headers["Authorization"])


def fail(*args: Any) -> Any:
    raise LookupError("the application's own")


def die() -> Any:
    current_operation.step("charge", lambda: 5)
    raise Killed


def lose() -> Any:
    pid = db.session.scalar(sa.text("SELECT pg_backend_pid()"))
    with db.engine.begin() as connection:
        connection.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
    return "", 201


def commit_as_text() -> Any:
    db.session.connection().exec_driver_sql("COMMIT")
    return {"card": CANARY}, 201


def post(name: str, key: str | None = CANARY, **body: Any) -> None:
    headers = {"Authorization": CANARY, **({"Idempotency-Key": key} if key else {})}
    with suppress(Killed):
        app.test_client().post(f"/{name}", headers=headers, json={"card": CANARY, **body})


def run(function: Callable[[str], Any], payload: str = CANARY) -> None:
    """As a queue's worker does, whose integration reports what a job raises."""
    with app.app_context():
        try:
            idempotency.run(CANARY, function, CANARY, scope=CANARY, name="job", payload=payload)
        except Exception:
            sentry_sdk.capture_exception()


VIEWS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "pay": (lambda: ("", 201), {}),
    "fail": (fail, {}),
    "fail-leased": (fail, {"atomic": False}),
    "die": (die, {"atomic": False}),
    "lose": (lose, {}),
    "not-atomic": (commit_as_text, {}),
    "not-json": (lambda: ({"card": CANARY, "other": object()}, 201), {}),
}
SITUATIONS: dict[str, list[Callable[[], None]]] = {
    "a replay": [partial(post, "pay"), partial(post, "pay")],
    "no key": [partial(post, "pay", None)],
    "a reused key": [partial(post, "pay", amount=2)],
    "an error of a view": [partial(post, "fail")],
    "an error of a leased view": [partial(post, "fail-leased")],
    "an interruption": [partial(post, "die")],
    "a database that is lost": [partial(post, "lose")],
    "an operation that is not atomic": [partial(post, "not-atomic")],
    "a response that is not JSON": [partial(post, "not-json")],
    "an error of a job": [partial(run, fail)],
    "a job whose key is reused": [partial(run, str), partial(run, str, f"another {CANARY}")],
}

for name, (view, options) in VIEWS.items():
    app.add_url_rule(f"/{name}", name, idempotent(**options)(view), methods=["POST"])
with app.app_context():
    db.create_all()
told = {}
for situation, calls in SITUATIONS.items():
    for call in calls:
        call()
    told[situation], EVENTS[:] = [*EVENTS], []
print(json.dumps(told, default=str))
