"""A shop whose bookings take as long as the test says: in this process and under gunicorn.

Nothing in its table is unique: a second run must show. Its provider writes a line for each charge into
the file ``CHARGES``.
"""

import os
from contextlib import closing, nullcontext
from pathlib import Path

import psycopg2
import sqlalchemy as sa
from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency, RequestInProgress, current_operation, idempotent
from servers import plain_dsn

db = SQLAlchemy()
idempotency = Idempotency()
LEASED = {"atomic": False, "on_interrupted": "retry"}

SLEEPING = (
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
)
OPEN = (
    "SELECT query FROM pg_stat_activity WHERE datname = current_database()"
    " AND backend_type = 'client backend' AND xact_start IS NOT NULL AND pid <> pg_backend_pid()"
)


class Payment(db.Model):  # type: ignore[name-defined, misc]
    id = sa.Column(sa.Integer, primary_key=True)


def create_app():
    """With one connection in its pool: one that is lost is missed by the next request."""
    app = Flask(__name__)
    app.config.update(
        SQLALCHEMY_DATABASE_URI=os.environ["DATABASE_URL"],
        SQLALCHEMY_ENGINE_OPTIONS={"pool_size": 1, "max_overflow": 0, "pool_timeout": 5},
        IDEMPOTENCY_STORE="postgres",
        IDEMPOTENCY_LEASE=float(os.environ.get("LEASE", "60")),
    )
    db.init_app(app)
    idempotency.init_app(app, db, scope=None)
    app.add_url_rule("/", view_func=lambda: "ready", endpoint="ready")
    views = {
        "plain": view(book),
        "atomic": idempotent(view(book)),
        "leased": idempotent(**LEASED)(view(job)),
    }
    for name, function in views.items():
        app.add_url_rule(f"/{name}", name, function, methods=["POST"])
    return app


def charge():
    with Path(os.environ["CHARGES"]).open("a") as file:
        file.write("charged\n")


def book(seconds, times=1):
    db.session.add(Payment())
    db.session.commit()
    for _ in range(times):
        db.session.execute(sa.select(sa.func.pg_sleep(seconds)))
    db.session.commit()
    return current_operation.attempt if current_operation else 1


def job(seconds, times=1):
    current_operation.step("charge", charge)
    return current_operation.step("book", book, seconds, times, atomic=True)


def view(function):
    """What it takes comes by headers, which no fingerprint has: a retry may ask for something else."""

    def book_it():
        seconds, times = request.headers.get("X-Seconds", "0"), request.headers.get("X-Times", "1")
        with time_limit(request.headers.get("X-Limit")):
            return {"attempt": function(float(seconds), int(times))}, 201

    return book_it


def time_limit(seconds):
    """That of gevent, in a worker that it has patched."""
    if seconds is None:
        return nullcontext()
    import gevent

    return gevent.Timeout(float(seconds))


JOBS = {"job": (job, LEASED), "atomic_job": (book, {})}


def call(app, name, seconds=0, key="order-1"):
    """Do one booking in a job or a view; its attempt."""
    if name in JOBS:
        function, options = JOBS[name]
        with app.app_context():
            return idempotency.run(key, function, seconds, scope=None, name=name, **options)
    headers = {"Idempotency-Key": key, "X-Seconds": str(seconds)}
    response = app.test_client().post(f"/{name}", headers=headers)
    if response.status_code == 409:
        raise RequestInProgress
    assert response.status_code == 201, response.text
    return response.json["attempt"]


def select(statement):
    """Ask the shop's database, beside the shop."""
    with closing(psycopg2.connect(plain_dsn(os.environ["DATABASE_URL"]))) as connection:
        cursor = connection.cursor()
        cursor.execute(statement)
        return [value for (value,) in cursor]


def done():
    """What the shop and its provider have done."""
    charges = Path(os.environ["CHARGES"])
    lines = charges.read_text().splitlines() if charges.exists() else []
    return {"payments": select("SELECT count(*) FROM payment")[0], "charges": len(lines)}
