"""A shop whose views fork, in a process of its own: what became of each case is a line of JSON."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from flask import Flask, current_app, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import Mapped, mapped_column

from flask_idempotency import Idempotency, Retryable, current_operation, idempotent

MAIN = os.getpid()
ROWS = 200
FORK = multiprocessing.get_context("fork")

GOES_ON = """
    select count(*) = 1 from idempotency_record
    where state = 'in_progress' and lease_expires_at > clock_timestamp()
    and steps is null
"""

db = SQLAlchemy()
idempotency = Idempotency()


@dataclass
class Case:
    """``before`` is what the view has done when it forks, ``route`` what it is."""

    before: str = "flushed"
    how: str = "process"
    does: str = "own"
    ends: str = "exit"
    route: str = "atomic"
    keys: int = 2

    @property
    def name(self) -> str:
        fields = self.route, self.before, self.how, self.does, self.ends
        return "/".join(fields).replace(" ", "-")


class Row:
    """Deliberately not unique."""

    id: Mapped[int] = mapped_column(primary_key=True)
    case: Mapped[str]
    key: Mapped[str]


class Payment(Row, db.Model):  # type: ignore[name-defined, misc]
    """Written by the view."""


class Note(Row, db.Model):  # type: ignore[name-defined, misc]
    """Written by the child."""


def create_app() -> Flask:
    app = Flask(__name__)
    app.config.update(
        SQLALCHEMY_DATABASE_URI=os.environ["DATABASE_URL"],
        IDEMPOTENCY_STORE=os.environ.get("STORE", "postgres"),
        IDEMPOTENCY_REDIS_URL=os.environ.get("REDIS_URL") or None,
        PROPAGATE_EXCEPTIONS=False,
    )
    db.init_app(app)
    idempotency.init_app(app, db, scope=None)
    app.add_url_rule("/look/<int:number>", view_func=look)
    for name, options in ROUTES.items():
        app.add_url_rule(f"/{name}", name, idempotent(name=name, **options)(pay), methods=["POST"])
    with app.app_context():
        db.create_all()
    return app


ROUTES: dict[str, dict[str, Any]] = {
    "atomic": {},
    "leased": {"atomic": False},
    "atomic-step": {"atomic": False},
}


def look(number: int) -> str:
    """Whether the pool gives each request its own replies."""
    return str(db.session.scalar(sa.text("select cast(:number as int)"), {"number": number}))


def pay() -> Any:
    """Do something, fork, and go on."""
    case = Case(**json.loads(request.headers["X-Case"]))
    key = request.headers["Idempotency-Key"]
    if case.route == "atomic-step":
        return current_operation.step("pay", _pay, case, key, atomic=True), 201
    return _pay(case, key), 201


def _pay(case: Case, key: str) -> dict[str, Any]:
    payment = Payment(case=case.name, key=key)
    stream = None
    if case.before != "clean":
        db.session.add(payment)
    if case.before in ("flushed", "cursor"):
        db.session.flush()
    if case.before == "committed":
        db.session.commit()
    if case.before == "cursor":
        series = sa.select(sa.func.generate_series(1, ROWS)).execution_options(yield_per=10)
        stream = db.session.execute(series)
        next(stream)
    child = Child(case, key, stream)
    told = child.run()
    if os.getpid() != MAIN:
        return {"told": "by a child"}
    if case.route == "leased":
        with db.engine.connect() as connection:
            assert connection.scalar(sa.text(GOES_ON)), "the child has ended it"
    file = db.engine.url.database or ""
    journal = db.engine.name == "sqlite" and Path(f"{file}-journal").exists()
    seen = db.session.scalar(sa.select(sa.literal(key)))
    left = None if stream is None else sum(1 for _ in stream)
    db.session.add(payment)
    db.session.commit()
    return {"told": told, "seen": seen, "left": left, "journal": journal}


class Child:
    """What the view starts."""

    def __init__(self, case: Case, key: str, stream: Any) -> None:
        self.case, self.key, self.stream = case, key, stream
        self.operation: Any = current_operation._get_current_object()  # type: ignore[attr-defined]
        self.connection: Any = self.operation.connection if case.does == "connection" else None

    def run(self) -> str:
        """Start it, wait for it, and return what it told."""
        reader, writer = os.pipe()
        if self.case.how == "process":
            process = FORK.Process(target=self._tell, args=(writer,))
            process.start()
            os.close(writer)
            process.join()
        else:
            if (pid := os.fork()) == 0:
                self._tell(writer)
                self._end()
                return ""
            os.close(writer)
            os.waitpid(pid, 0)
        with os.fdopen(reader) as told:
            return told.read()

    def _tell(self, writer: int) -> None:
        """Do what the case says, and say what came of it."""
        try:
            told = str(DOES[self.case.does](self, self.key))
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writer, told.encode())

    def _end(self) -> None:
        """End a child of ``os.fork``, or let it fall out of the view."""
        match self.case.ends:
            case "exit":
                os._exit(0)
            case "collect":
                self.operation = self.connection = self.stream = None
                db.session.remove()
                db.engine.dispose()
                gc.collect()
                os._exit(0)
            case "sys.exit":
                sys.exit(0)
            case "error":
                raise RuntimeError("in the child")
            case "retryable":
                raise Retryable
            case "return":
                pass


def own(child: Child, key: str) -> str:
    """Work in an application context of its own, with a new pool, as SQLAlchemy's page on forks says.

    The extension has given the child one; another does no harm.
    """
    app = current_app._get_current_object()  # type: ignore[attr-defined]
    if child.case.how != "process":
        db.engine.dispose(close=False)
    for _ in range(3):
        with app.app_context():
            write(child, key)
            if db.session.scalar(sa.select(sa.literal(key))) != key:
                return "another's reply"
    return "done"


def write(child: Child, key: str) -> str:
    db.session.add(Note(case=child.case.name, key=key))
    db.session.commit()
    return "done"


def after(ends: Callable[[], object]) -> Callable[[Child, str], str]:
    def write_after(child: Child, key: str) -> str:
        ends()
        return write(child, key)

    return write_after


def commit(_child: Child, _key: str) -> str:
    db.session.commit()
    return "done"


def query(_child: Child, key: str) -> str:
    return str(db.session.scalar(sa.select(sa.literal(key))))


def read_on(child: Child, _key: str) -> str:
    return str(sum(1 for _ in child.stream))


def on_connection(child: Child, key: str) -> str:
    child.connection.execute(sa.insert(Note).values(case=child.case.name, key=key))
    return "done"


def driver(_child: Child, _key: str) -> str:
    db.session.connection().connection.driver_connection.close()  # type: ignore[union-attr]
    return "done"


def run(child: Child, key: str) -> str:
    """Twice: the second call finds the first one's result."""
    does: Callable[[], Any] = lambda: write(child, key)  # noqa: E731
    kind = {"atomic": child.case.route == "atomic"}
    db.session.remove()
    told = [idempotency.run(f"child/{key}", does, name="note", scope=None, **kind) for _ in range(2)]
    return ", ".join(told)


def step(child: Child, key: str, *, atomic: bool = False) -> str:
    """Take a step, and say if its function ran although the step was refused."""
    ran: list[None] = []
    try:
        child.operation.step(f"of the child {key}", lambda: ran.append(None), atomic=atomic)
    except Exception:
        if ran:
            return "the function ran"
        raise
    return "done"


def extend(child: Child, _key: str) -> str:
    child.operation.extend(100)
    return "done"


DOES: dict[str, Callable[[Child, str], Any]] = {
    "own": own,
    "inherited": write,
    "after remove": after(db.session.remove),
    "after rollback": after(db.session.rollback),
    "commit": commit,
    "query": query,
    "read on": read_on,
    "connection": on_connection,
    "driver": driver,
    "run": run,
    "present": lambda _child, _key: current_operation.name,
    "step": step,
    "atomic step": partial(step, atomic=True),
    "extend": extend,
    "nothing": lambda _child, _key: "done",
}


def post(app: Flask, case: Case, key: str) -> dict[str, Any]:
    headers = {"Idempotency-Key": key, "X-Case": json.dumps(vars(case))}
    response = app.test_client().post(f"/{case.route}", headers=headers)
    if os.getpid() != MAIN:  # a child that fell out of the view
        os._exit(0)
    return {"status": response.status_code, **(response.get_json(silent=True) or {})}


def is_sane(app: Flask) -> bool:
    """Requests at once, as many as the pool keeps connections, each with its own reply."""

    def right(number: int) -> bool:
        return app.test_client().get(f"/look/{number}").text == str(number)

    with ThreadPoolExecutor(5) as clients:
        return all(clients.map(right, range(10)))


def main(cases: Sequence[Case]) -> None:
    global MAIN  # noqa: PLW0603 -- this process itself may have been forked with the module
    MAIN = os.getpid()
    app = create_app()
    assert is_sane(app)  # and the pool is full
    for case in cases:
        answers = [post(app, case, f"{case.name}/{number}") for number in range(case.keys)]
        again = [post(app, case, f"{case.name}/{number}") for number in range(case.keys)]
        result = {"name": case.name, "answers": answers, "again": again, "is_sane": is_sane(app)}
        print(json.dumps(result), flush=True)
