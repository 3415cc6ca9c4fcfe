"""An application with Sentry, which patches Flask and logging for good: so in a process of its own.

Prints, as one JSON object, the events that Sentry would have sent for each situation. Its arguments are
the URL of a database and Python code that calls ``sentry_sdk.init``. It reads a line: what every key,
scope, body and response contains. Sentry sends source code and arguments, too.
"""

import json
import sys
from contextlib import suppress
from functools import partial

import sentry_sdk
import sqlalchemy as sa
from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy
from sentry_sdk.transport import Transport

from flask_idempotency import Idempotency, current_operation, idempotent
from tests.killed import Killed

EVENTS = []


class Kept(Transport):
    """Keeps what would be sent."""

    def capture_envelope(self, envelope):
        EVENTS.extend(event for item in envelope.items if (event := item.get_event()) is not None)


sentry_sdk.init = partial(sentry_sdk.init, transport=Kept)
exec(sys.argv[2])  # noqa: S102
CANARY = input()

app = Flask("shop")
app.config["SQLALCHEMY_DATABASE_URI"] = sys.argv[1]
db = SQLAlchemy(app)
idempotency = Idempotency(app, db, scope=lambda: request.headers["Authorization"])


def fail(*args):
    raise LookupError("the application's own")


def die():
    current_operation.step("charge", lambda: 5)
    raise Killed


def lose():
    pid = db.session.scalar(sa.text("SELECT pg_backend_pid()"))
    with db.engine.begin() as connection:
        connection.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
    return "", 201


def commit_as_text():
    db.session.connection().exec_driver_sql("COMMIT")
    return {"card": CANARY}, 201


def run(function, payload=CANARY):
    """As a queue's worker does, whose integration reports what a job raises."""
    with app.app_context():
        try:
            idempotency.run(CANARY, function, CANARY, scope=CANARY, name="job", payload=payload)
        except Exception:
            sentry_sdk.capture_exception()


VIEWS = {  # by situation: the view, its options, and what is sent beside the key, for each request
    "a replay": (lambda: ("", 201), {}, [{}, {}]),
    "no key": (dict, {}, [{"key": None}]),
    "a reused key": (dict, {}, [{}, {"amount": 2}]),
    "an error of a view": (fail, {}, [{}]),
    "an error of a leased view": (fail, {"atomic": False}, [{}]),
    "an interruption": (die, {"atomic": False}, [{}]),
    "a database that is lost": (lose, {}, [{}]),
    "an operation that is not atomic": (commit_as_text, {}, [{}]),
    "a response that is not JSON": (lambda: ({"card": CANARY, "other": object()}, 201), {}, [{}]),
}
JOBS = {
    "an error of a job": [partial(run, fail)],
    "a job whose key is reused": [partial(run, str), partial(run, str, f"another {CANARY}")],
}

for number, (view, options, _) in enumerate(VIEWS.values()):
    protected = idempotent(name=f"view {number}", **options)(view)
    app.add_url_rule(f"/{number}", f"view {number}", protected, methods=["POST"])
with app.app_context():
    db.create_all()
told = {}
for number, (situation, (*_, requests)) in enumerate(VIEWS.items()):
    for sent in requests:
        key = sent.pop("key", CANARY)
        headers = {"Authorization": CANARY, **({"Idempotency-Key": key} if key else {})}
        with suppress(Killed):
            app.test_client().post(f"/{number}", headers=headers, json={"card": CANARY, **sent})
    told[situation], EVENTS[:] = [*EVENTS], []
for situation, calls in JOBS.items():
    for call in calls:
        call()
    told[situation], EVENTS[:] = [*EVENTS], []
print(json.dumps(told, default=str))
