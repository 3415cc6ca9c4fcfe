"""A shop whose view forks, in a process of its own: what became of each case is a line of JSON.

A case is a key, such as ``atomic/flushed/own/exit``: the route; what the view has done when it forks;
what the child does then; and how it ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import sqlalchemy as sa
from flask import Flask, current_app
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import Mapped, mapped_column

from flask_idempotency import Idempotency, Retryable, current_operation, idempotent

MAIN = os.getpid()
GOES_ON = """
    select count(*) = 1 from idempotency_record
    where state = 'in_progress' and lease_expires_at > clock_timestamp() and steps is null
"""

db = SQLAlchemy()
idempotency = Idempotency()


class Payment(db.Model):  # type: ignore[name-defined, misc]
    """Written by the view. Deliberately not unique."""

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str]


class Note(db.Model):  # type: ignore[name-defined, misc]
    """Written by the child."""

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str]


def create_app() -> Flask:
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
    views = {"atomic": (pay, True), "leased": (pay, False), "step": (in_step, False)}
    for name, (view, atomic) in views.items():
        protected = idempotent(name=name, atomic=atomic)(view)
        app.add_url_rule(f"/{name}", name, protected, methods=["POST"])
    with app.app_context():
        db.create_all()
    return app


def pay() -> Any:
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
        operation = current_operation._get_current_object()  # type: ignore[attr-defined]
        said = Child(key, operation, connection).told(does)
        if os.getpid() != MAIN:
            return ENDS[ends]()
    if route == "leased" and said:
        with db.engine.connect() as other:
            assert other.scalar(sa.text(GOES_ON)), "the child has ended it"
    seen = db.session.scalar(sa.select(sa.literal(key)))
    db.session.add(payment)
    db.session.commit()
    return {"told": said, "seen": seen}


class Child:
    """What the view starts, and what it has of the operation."""

    def __init__(self, key: str, operation: Any, connection: Any) -> None:
        self.key, self.operation, self.connection = key, operation, connection

    def told(self, does: str) -> str:
        """Fork, and return what came of it when it has ended: at once in the child itself."""
        reader, writer = os.pipe()
        if child := os.fork():
            os.close(writer)
            os.waitpid(child, 0)
            with os.fdopen(reader) as told:
                return told.read()
        try:
            said = str(getattr(self, does)())
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        return said

    def nothing(self) -> str:
        return "done"

    def own(self) -> str:
        """Work in an application context of its own."""
        with current_app._get_current_object().app_context():  # type: ignore[attr-defined]
            self.write()
            return "done" if self.query() == self.key else "another's reply"

    def write(self) -> str:
        db.session.add(Note(key=self.key))
        db.session.commit()
        return "done"

    def write_anew(self) -> str:
        db.session.remove()
        return self.write()

    def query(self) -> str:
        return str(db.session.scalar(sa.select(sa.literal(self.key))))

    def commit(self) -> None:
        db.session.commit()

    def use_connection(self) -> None:
        self.connection.execute(sa.insert(Note).values(key=self.key))

    def run(self) -> str:
        """Twice: the second call finds the first one's result."""
        db.session.remove()
        kind = {"name": "note", "scope": None, "atomic": self.key.startswith("atomic")}
        return ", ".join(idempotency.run(f"of/{self.key}", self.write, **kind) for _ in range(2))

    def present(self) -> str:
        return current_operation.name

    def step(self) -> None:
        self.operation.step("of the child", self.write)

    def extend(self) -> None:
        self.operation.extend(100)

    def pause(self) -> NoReturn:
        """Until a signal comes, as the view that waits for it does."""
        print(os.getppid(), os.getpid(), flush=True)
        signal.pause()
        os._exit(0)


def fail(error: type[Exception]) -> NoReturn:
    raise error


ENDS: dict[str, Callable[[], Any]] = {
    "exit": lambda: os._exit(0),
    "sys.exit": lambda: sys.exit(0),
    "error": lambda: fail(RuntimeError),
    "retryable": lambda: fail(Retryable),
    "return": lambda: {"told": "by a child"},
}


def post(app: Flask, key: str) -> Any:
    headers = {"Idempotency-Key": key}
    response = app.test_client().post("/" + key.partition("/")[0], headers=headers)
    if os.getpid() != MAIN:  # a child that fell out of the view
        os._exit(0)
    return [response.status_code, response.json]


if __name__ == "__main__":
    app = create_app()
    for case in sys.argv[1:]:
        print(json.dumps([case, post(app, case), post(app, case)]), flush=True)
