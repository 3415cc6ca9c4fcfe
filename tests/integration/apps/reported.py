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
from flask import Flask, abort, request
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


def sql(statement: str, **values: Any) -> None:
    with app.app_context(), db.engine.begin() as connection:
        connection.execute(sa.text(statement), values)


def add(name: str, view: Callable[[], Any], **options: Any) -> None:
    app.add_url_rule(f"/{name}", name, idempotent(**options)(view), methods=["POST"])


def fail(*args: Any) -> Any:
    raise LookupError("the application's own")


def die() -> Any:
    current_operation.step("charge", lambda: 5)
    raise Killed


def lose() -> Any:
    pid = db.session.scalar(sa.text("SELECT pg_backend_pid()"))
    sql("SELECT pg_terminate_backend(:pid)", pid=pid)
    return "", 201


def commit_as_text() -> Any:
    db.session.connection().exec_driver_sql("COMMIT")
    return {"card": CANARY}, 201


add("pay", lambda: ("", 201))
add("forbid", lambda: ("", 201), authorize_replay=lambda _operation: False)
add("refuse", lambda: abort(409))
add("fail", fail)
add("fail-leased", fail, atomic=False)
add("die", die, atomic=False)
add("lose", lose)
add("not-atomic", commit_as_text)
add("ask", lambda: ({"card": CANARY}, 201), authorize_replay=fail)
add("fingerprint", lambda: ("", 201), fingerprint=lambda: CANARY)
add("header", lambda: ({"card": CANARY}, 201, {"X-Card": "two\nlines"}), atomic=False)
add("not-json", lambda: ({"card": CANARY, "other": object()}, 201))


def post(path: str, key: str | None = CANARY, **body: Any) -> None:
    headers = {"Authorization": CANARY, **({"Idempotency-Key": key} if key else {})}
    with suppress(Killed):
        app.test_client().post(path, headers=headers, json={"card": CANARY, **body})


def run(function: Callable[[str], Any], payload: str = CANARY) -> None:
    """As a queue's worker does, whose integration reports what a job raises."""
    with app.app_context():
        try:
            idempotency.run(CANARY, function, CANARY, scope=CANARY, name="job", payload=payload)
        except Exception:
            sentry_sdk.capture_exception()


def retry_what_was_interrupted() -> None:
    sql("UPDATE idempotency_record SET lease_expires_at = now() WHERE lease_expires_at IS NOT NULL")
    post("/die")


def reuse() -> None:
    run(lambda _argument: None)
    run(lambda _argument: None, payload=f"another {CANARY}")


def twice(path: str) -> Callable[[], None]:
    return lambda: (post(path), post(path))[0]


SITUATIONS: dict[str, Callable[[], None]] = {
    "a replay": twice("/pay"),
    "no key": lambda: post("/pay", None),
    "a malformed key": lambda: post("/pay", f"{CANARY},"),
    "a reused key": lambda: post("/pay", amount=2),
    "a replay that is forbidden": twice("/forbid"),
    "a 409 of the view's": lambda: post("/refuse"),
    "an error of a view": lambda: post("/fail"),
    "an error of a leased view": lambda: post("/fail-leased"),
    "an interruption": lambda: post("/die"),
    "a retry of what was interrupted": retry_what_was_interrupted,
    "a database that is lost": lambda: post("/lose"),
    "an operation that is not atomic": lambda: post("/not-atomic"),
    "an error before a replay": twice("/ask"),
    "a fingerprint that is not bytes": lambda: post("/fingerprint"),
    "a response of a leased view with a wrong header": lambda: post("/header"),
    "a response that is not JSON": lambda: post("/not-json"),
    "an error of a job": lambda: run(fail),
    "a result of a job that is not JSON": lambda: run(
        lambda _argument: {"card": CANARY, "other": object()}
    ),
    "a job whose key is reused": reuse,
}

with app.app_context():
    db.create_all()
told = {}
for situation, happens in SITUATIONS.items():
    happens()
    told[situation], EVENTS[:] = [*EVENTS], []
print(json.dumps(told, default=str))
