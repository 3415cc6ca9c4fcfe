"""Other designs, as articles and answers show them, on the same wire: what they lose must show here.

Negative controls, written for these tests alone. Each is a decorator for the same view, and each is
kept as short as its examples. Do not copy one: the docstring says what it gets wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from typing import Any

import sqlalchemy as sa
from flask import Response, current_app, request
from flask_sqlalchemy import SQLAlchemy
from redis import Redis, RedisError

from tests.faults.points import point

View = Callable[[], Any]
Protect = Callable[[SQLAlchemy, str], Callable[[View], View]]
StoredResponse = tuple[int, str]

AGE_SECONDS = 1.0
"""After this, a design that goes by age takes a request for dead."""

LOCK_MS = 5000

BEGIN = sa.text(
    "INSERT INTO mark (scope, key, body) VALUES (:scope, :key, :body) ON CONFLICT DO NOTHING"
)
LOOK = sa.text("SELECT status, answer, body FROM mark WHERE scope = :scope AND key = :key")
FINISH = sa.text(
    "UPDATE mark SET status = :status, answer = :answer WHERE scope = :scope AND key = :key"
)
OLD = "locked_at < clock_timestamp() - interval '1 second'"
CLEAN_UP = sa.text(f"DELETE FROM mark WHERE scope = :scope AND key = :key AND status IS NULL AND {OLD}")
TAKE_OVER = sa.text(
    "UPDATE mark SET locked_at = clock_timestamp()"
    f" WHERE scope = :scope AND key = :key AND status IS NULL AND {OLD}"
)


def define_table(metadata: sa.MetaData) -> None:
    """The records of the designs that keep them in Postgres."""
    sa.Table(
        "mark",
        metadata,
        sa.Column("scope", sa.String, primary_key=True),
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("body", sa.String, nullable=False),
        sa.Column("status", sa.Integer),
        sa.Column("answer", sa.String),
        sa.Column("locked_at", sa.DateTime(timezone=True), server_default=sa.func.clock_timestamp()),
    )


def name() -> dict[str, str]:
    """What tells the present operation from others, and its body."""
    return {
        "scope": request.headers["X-User"],
        "key": request.headers["Idempotency-Key"],
        "body": request.get_data(as_text=True),
    }


def refuse(status: int) -> Response:
    return Response("{}", status, content_type="application/problem+json")


def replay(status: int, answer: str) -> Response:
    return Response(answer, status, {"Idempotent-Replayed": "true"})


def run(view: View) -> tuple[Response, StoredResponse]:
    response = current_app.make_response(view())
    return response, (response.status_code, response.get_data(as_text=True))


def known(found: Any, body: str) -> Response | None:
    """The answer for a record that is there."""
    if found.body != body:
        return refuse(422)
    return refuse(409) if found.status is None else replay(found.status, found.response)


def mark_afterwards(db: SQLAlchemy, redis_url: str) -> Callable[[View], View]:
    """Redis lock, then a record; the business commits, *then* the record is marked as completed.

    Wrong: a crash between the two commits leaves a payment whose record says "running". The clean-up
    by age then lets the retry pay again. The lock is deleted without asking whose it is.
    """
    redis = Redis.from_url(redis_url, socket_timeout=1)

    def decorate(view: View) -> View:
        @wraps(view)
        def protected() -> Any:
            this = name()
            lock = f"lock:{this['scope']}:{this['key']}"
            if not redis.set(lock, "1", nx=True, px=LOCK_MS):
                return refuse(409)
            point("lock")
            try:
                with db.engine.begin() as connection:
                    connection.execute(CLEAN_UP, this)
                    if not connection.execute(BEGIN, this).rowcount:
                        return known(connection.execute(LOOK, this).one(), this["body"])
                point("claim")
                response, (status, answer) = run(view)
                point("commit")
                with db.engine.begin() as connection:
                    connection.execute(FINISH, {**this, "status": status, "answer": answer})
                return response
            finally:
                redis.delete(lock)
                point("release")

        return protected

    return decorate


def redis_only(db: SQLAlchemy, redis_url: str) -> Callable[[View], View]:
    """Lock and answer in Redis; if Redis is down, the request goes through.

    Wrong: whatever Redis forgets is paid again, and so is everything while it is down.
    """
    redis = Redis.from_url(redis_url, socket_timeout=0.2)

    def decorate(view: View) -> View:
        @wraps(view)
        def protected() -> Any:
            this = name()
            place = f"answer:{this['scope']}:{this['key']}"
            try:
                if not redis.set(place, "running", nx=True, px=LOCK_MS):
                    value: Any = redis.get(place)
                    return refuse(409) if value in (None, b"running") else replay(*json.loads(value))
            except RedisError:
                return run(view)[0]
            point("lock")
            try:
                response, answer = run(view)
            except Exception:
                redis.delete(place)
                raise
            point("commit")
            redis.set(place, json.dumps(answer))
            point("release")
            return response

        return protected

    return decorate


def take_over_by_age(db: SQLAlchemy, redis_url: str) -> Callable[[View], View]:
    """A record with the time it was locked at; older than the limit, the next request takes it over.

    Wrong: a request that takes longer than the limit is not dead. Both pay, and the later answer
    replaces the one that was given.
    """

    def decorate(view: View) -> View:
        @wraps(view)
        def protected() -> Any:
            this = name()
            with db.engine.begin() as connection:
                if not connection.execute(BEGIN, this).rowcount:
                    found = connection.execute(LOOK, this).one()
                    if found.body != this["body"] or not connection.execute(TAKE_OVER, this).rowcount:
                        return known(found, this["body"])
            point("claim")
            response, (status, answer) = run(view)
            point("commit")
            with db.engine.begin() as connection:
                connection.execute(FINISH, {**this, "status": status, "answer": answer})
            return response

        return protected

    return decorate


DESIGNS: dict[str, Protect] = {
    "mark_afterwards": mark_afterwards,
    "redis_only": redis_only,
    "take_over_by_age": take_over_by_age,
}
