"""A shop whose view forks, in a process of its own: what became of each case is a line of JSON.

A case is a key, such as ``atomic/flushed/own/exit``: the route; what the view has done when it forks;
what the child does then; and how it ends.
"""

import json
import os
import signal
import sys

import sqlalchemy as sa
from flask import Flask, current_app
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency, Retryable, current_operation, idempotent

MAIN = os.getpid()
GOES_ON = """
    select count(*) = 1 from idempotency_record
    where state = 'in_progress' and lease_expires_at > clock_timestamp() and steps is null
"""

db = SQLAlchemy()
idempotency = Idempotency()


class Payment(db.Model):
    """Written by the view. Deliberately not unique."""

    id = sa.Column(sa.Integer, primary_key=True)
    key = sa.Column(sa.String)


class Note(db.Model):
    """Written by the child."""

    id = sa.Column(sa.Integer, primary_key=True)
    key = sa.Column(sa.String)


def create_app():
    app = Flask(__name__)
    app.config.update(
        SQLALCHEMY_DATABASE_URI=os.environ["DATABASE_URL"],
        IDEMPOTENCY_STORE=os.environ["STORE"],
        IDEMPOTENCY_REDIS_URL=os.environ["REDIS_URL"] or None,
        PROPAGATE_EXCEPTIONS=False,
    )
    db.init_app(app)
    idempotency.init_app(app, db, scope=None)
    in_step = lambda: current_operation.step("pay", pay, atomic=True)  # noqa: E731
    for name, view, atomic in ("atomic", pay, True), ("leased", pay, False), ("step", in_step, False):
        protected = idempotent(name=name, atomic=atomic)(view)
        app.add_url_rule(f"/{name}", name, protected, methods=["POST"])
    with app.app_context():
        db.create_all()
    return app


def pay():
    """Do something, fork, and go on."""
    key = current_operation.key
    route, before, does, ends = key.split("/")
    payment, said = Payment(key=key), ""
    if before != "clean":
        db.session.add(payment)
    if before == "flushed":
        db.session.flush()
    if before == "committed":
        db.session.commit()
    if current_operation.attempt == 1:
        connection = current_operation.connection if does == "use_connection" else None
        operation = current_operation._get_current_object()
        said = told_by_a_child(what_a_child_can(operation, connection)[does], key)
        if os.getpid() != MAIN:
            return ENDS[ends]()
    if route == "leased" and said:
        with db.engine.connect() as other:
            assert other.scalar(sa.text(GOES_ON)), "the child has ended it"
    seen = db.session.scalar(sa.select(sa.literal(key)))
    db.session.add(payment)
    db.session.commit()
    return {"told": said, "seen": seen}


def write(key):
    db.session.add(Note(key=key))
    db.session.commit()
    return "done"


def query(key):
    return db.session.scalar(sa.select(sa.literal(key)))


def own(key):
    """Work in an application context of its own."""
    with current_app._get_current_object().app_context():
        write(key)
        return "done" if query(key) == key else "another's reply"


def run(key):
    """Twice: the second call finds the first one's result."""
    db.session.remove()
    kind = {"name": "note", "scope": None, "atomic": key.startswith("atomic")}
    return ", ".join(idempotency.run(f"of/{key}", write, key, **kind) for _ in range(2))


def pause(_key):
    """Until a signal comes, as the view that waits for it does."""
    print(os.getppid(), os.getpid(), flush=True)
    signal.pause()


def what_a_child_can(operation, connection):
    """What it is told to do, with what the view has of the operation."""
    return {
        "nothing": lambda _key: "done",
        "own": own,
        "write": write,
        "write_anew": lambda key: db.session.remove() or write(key),
        "query": query,
        "commit": lambda _key: db.session.commit(),
        "use_connection": lambda key: connection.execute(sa.insert(Note).values(key=key)),
        "run": run,
        "present": lambda _key: current_operation.name,
        "step": lambda key: operation.step("of the child", write, key),
        "extend": lambda _key: operation.extend(100),
        "pause": pause,
    }


def told_by_a_child(do, key):
    """Fork, and return what came of it when it has ended: at once in the child itself."""
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(writer)
        os.waitpid(child, 0)
        with os.fdopen(reader) as told:
            return told.read()
    try:
        said = str(do(key))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    os.write(writer, said.encode())
    return said


def fail(error):
    raise error


ENDS = {
    "exit": lambda: os._exit(0),
    "sys.exit": lambda: sys.exit(0),
    "error": lambda: fail(RuntimeError),
    "retryable": lambda: fail(Retryable),
    "return": lambda: {"told": "by a child"},
}


def post(app, key):
    route, *_ = key.split("/")
    response = app.test_client().post(f"/{route}", headers={"Idempotency-Key": key})
    if os.getpid() != MAIN:  # a child that fell out of the view
        os._exit(0)
    return [response.status_code, response.json]


if __name__ == "__main__":
    app = create_app()
    for case in sys.argv[1:]:
        print(json.dumps([case, post(app, case), post(app, case)]), flush=True)
