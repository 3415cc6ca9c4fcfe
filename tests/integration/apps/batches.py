"""A worker of ``test_many_items.py``: runs batches of items, and dies where it is told to.

``python -m tests.integration.apps.batches URL REDIS FIRST LAST DIE_AT``: the items have the numbers
from FIRST to LAST, shuffled; DIE_AT is the number of calls of the function after which the process
kills itself, "returned" or "committed"; with "none", some items fail. Prints the outcomes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from functools import partial

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


def main(url: str, redis_url: str, first: str, last: str, die_at: str) -> None:
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
            results = view()
            print(json.dumps({result.key: result.outcome for result in results}), flush=True)
            if die_at == "returned":
                die()

        idempotency.run(os.urandom(8).hex(), whole, name="whole")


if __name__ == "__main__":
    main(*sys.argv[1:])
