"""A worker of ``test_many_items.py``: runs batches of items, and dies where it is told to."""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from multiprocessing.connection import Connection

import sqlalchemy as sa
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency, after_commit

db = SQLAlchemy()
idempotency = Idempotency(scope=None)


class Payment(db.Model):  # type: ignore[name-defined, misc]
    id = sa.Column(sa.Integer, primary_key=True)
    key = sa.Column(sa.Integer, nullable=False)  # deliberately not unique: a second run must show


def make_app(url: str, redis_url: str) -> Flask:
    app = Flask("batches")
    app.config["SQLALCHEMY_DATABASE_URI"] = url
    if redis_url:
        app.config["IDEMPOTENCY_REDIS_URL"] = redis_url
    db.init_app(app)
    idempotency.init_app(app, db)
    return app


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(results: Connection, url: str, redis_url: str, first: str, last: str, die_at: str) -> None:
    """The items have the numbers from ``first`` to ``last``, shuffled; their outcomes are sent.

    ``die_at`` is the number of calls of the function after which the process kills itself, "returned"
    or "committed"; with "none", some items fail.
    """
    numbers = list(range(int(first), int(last) + 1))
    random.shuffle(numbers)
    called = 0

    def pay(number: int) -> int:
        nonlocal called
        db.session.add(Payment(key=number))
        db.session.commit()
        called += 1
        if str(called) == die_at:
            die()
        if number % 7 == 6 and die_at == "none":
            db.session.execute(sa.text("select 1 / 0"))
        return number

    with make_app(url, redis_url).app_context():
        view = partial(idempotency.run_many, [(str(n), n) for n in numbers], pay, name="pay")

        def whole() -> None:
            if die_at == "committed":
                after_commit(die)
            results.send({result.key: result.outcome for result in view()})
            if die_at == "returned":
                die()

        idempotency.run(os.urandom(8).hex(), whole, name="whole")
