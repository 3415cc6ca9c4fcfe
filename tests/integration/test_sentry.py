"""What Sentry is told: errors and what needs a person, not refusals; and no secret.

Sentry patches Flask and logging for good, so it is started in processes of its own.
"""

import json
import multiprocessing
import secrets
from contextlib import suppress
from functools import partial

import pytest
import sentry_sdk
import sqlalchemy as sa
from flask import request
from sentry_sdk.transport import Transport

from flask_idempotency import current_operation, idempotent
from tests.docs.pages import ROOT, blocks
from tests.killed import Killed

CANARY = secrets.token_hex()
"""What every key, scope, body and response contains. Made here, as Sentry sends source code, too."""

DEFAULT = "sentry_sdk.init('http://public@localhost/1')"
[PAGE] = [
    block.text for block in blocks(ROOT / "docs/monitoring.md", "python") if "sentry" in block.text
]


def succeed(_world):
    return "", 201


def fail(*args):  # a name that the page hides
    raise LookupError("the application's own")


def die(_world):
    current_operation.step("charge", lambda: 5)
    raise Killed


def lose(world):
    pid = world.db.session.scalar(sa.text("SELECT pg_backend_pid()"))
    world.sql("SELECT pg_terminate_backend(:pid)", pid=pid)
    return "", 201


def commit_as_text(world):
    world.db.session.connection().exec_driver_sql("COMMIT")
    return {"card": CANARY}, 201


VIEWS = {  # by situation: the view, its options, what each request sends; and what is reported
    "a replay": (succeed, {}, [{}, {}], []),
    "a reused key": (succeed, {}, [{}, {"amount": 2}], []),
    "an error": (fail, {}, [{}], ["LookupError"]),
    "an error with a lease": (
        fail,
        {"atomic": False},
        [{}],
        ["LookupError", "operation %s failed: %s"],
    ),
    "an interruption": (die, {"atomic": False}, [{}], ["operation %s interrupted: %s", "Killed"]),
    "a database that is lost": (lose, {}, [{}], ["operation %s: the store is unavailable: %r"]),
    "not atomic": (commit_as_text, {}, [{}], ["operation %s: %s", "NotAtomic"]),
    "no JSON": (lambda _world: ({"card": CANARY, "other": object()}, 201), {}, [{}], ["TypeError"]),
}
JOBS = {  # by situation: what a queue's worker does, for each time; and what is reported
    "an error of a job": ([(fail, CANARY)], ["LookupError"]),
    "a job's reused key": ([(str, CANARY), (str, f"another {CANARY}")], ["KeyReused"]),
}


def run(world, function, payload):
    with world.app.app_context():
        try:
            world.idempotency.run(CANARY, function, CANARY, scope=CANARY, name="job", payload=payload)
        except Exception:
            sentry_sdk.capture_exception()


def report(world, code, pipe):
    """Do all of it with Sentry, and send what it would have sent."""
    events, told = [], {}

    class Kept(Transport):
        def capture_envelope(self, envelope):
            events.extend(event for item in envelope.items if (event := item.get_event()) is not None)

    sentry_sdk.init = partial(sentry_sdk.init, transport=Kept)
    exec(code)  # noqa: S102
    for name, (*_, requests, _) in VIEWS.items():
        for body in requests:
            sent = {"json": {"card": CANARY, **body}, "headers": {"Authorization": CANARY}}
            with suppress(Killed):
                world.post(f"/{name}", CANARY, **sent)
        told[name], events[:] = events[:], []
    for name, (times, _) in JOBS.items():
        for function, payload in times:
            run(world, function, payload)
        told[name], events[:] = events[:], []
    pipe.send(json.dumps(told, default=str))


def title(event):
    """What makes an issue of its own: the template of a line of the log, or the class of an error."""
    if "logentry" in event:
        return event["logentry"]["message"]
    return event["exception"]["values"][-1]["type"]


@pytest.mark.parametrize("code", [DEFAULT, PAGE], ids=["default", "page"])
def test_errors_and_what_needs_a_person_are_reported_and_as_on_the_page_no_secret(make_world, code):
    world = make_world(init={"scope": lambda: request.headers["Authorization"]})
    for name, (view, options, *_) in VIEWS.items():
        protected = idempotent(name=name, **options)(partial(view, world))
        world.app.add_url_rule(f"/{name}", name, protected, methods=["POST"])
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=report, args=(world, code, sender))
    process.start()
    sender.close()
    text = receiver.recv()
    process.join()
    reported = {name: titles for name, (*_, titles) in {**VIEWS, **JOBS}.items()}
    if code == PAGE:
        reported["a job's reused key"] = []
    assert {name: [*map(title, events)] for name, events in json.loads(text).items()} == reported
    assert (CANARY in text) is (code == DEFAULT)
