"""An application with Sentry, which patches Flask and logging for good: so in a process of its own.

Prints, as one JSON object, the events that Sentry would have sent for each situation. Its arguments are
the URL of a database and Python code that calls ``sentry_sdk.init``. It reads a line: what every key,
scope, body and response contains. Sentry sends source code and arguments, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
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
add("fingerprint", lambda: ("", 201), fingerprint=fail)
add("fingerprint-text", lambda: ("", 201), fingerprint=lambda: CANARY)
add("store", lambda: ({"card": CANARY}, 201), store=fail)
add("header", lambda: ({"card": CANARY}, 201, {"X-Card": "two\nlines"}))
add("leased-header", lambda: ({"card": CANARY}, 201, {"X-Card": "two\nlines"}), atomic=False)
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


def situations() -> Iterator[str]:
    """Each after it has happened."""
    post("/pay")
    post("/pay")
    yield "a replay"
    post("/pay", None)
    yield "no key"
    post("/pay", f"{CANARY},")
    yield "a malformed key"
    post("/pay", amount=2)
    yield "a reused key"
    post("/forbid")
    post("/forbid")
    yield "a replay that is forbidden"
    post("/refuse")
    yield "a 409 of the view's"
    post("/fail")
    yield "an error of a view"
    post("/fail-leased")
    yield "an error of a leased view"
    post("/die")
    yield "an interruption"
    sql("UPDATE idempotency_record SET lease_expires_at = now() WHERE lease_expires_at IS NOT NULL")
    post("/die")
    yield "a retry of what was interrupted"
    post("/lose")
    yield "a database that is lost"
    post("/not-atomic")
    yield "an operation that is not atomic"
    post("/ask")
    post("/ask")
    yield "an error before a replay"
    post("/fingerprint")
    yield "an error in the option fingerprint"
    post("/fingerprint-text")
    yield "a fingerprint that is not bytes"
    post("/store")
    yield "an error in the option store"
    post("/header")
    yield "a response with a wrong header"
    post("/leased-header")
    yield "a response of a leased view with a wrong header"
    post("/not-json")
    yield "a response that is not JSON"
    run(fail)
    yield "an error of a job"
    run(lambda _argument: {"card": CANARY, "other": object()})
    yield "a result of a job that is not JSON"
    run(lambda _argument: None)
    run(lambda _argument: None, payload=f"another {CANARY}")
    yield "a job whose key is reused"


with app.app_context():
    db.create_all()
told = {}
for situation in situations():
    told[situation], EVENTS[:] = [*EVENTS], []
print(json.dumps(told, default=str))
