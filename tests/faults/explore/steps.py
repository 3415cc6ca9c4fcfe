"""Real servers: every message of the package is a step, and the schedule moves the clock."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any
from unittest.mock import patch

import psycopg2
import redis
import sqlalchemy as sa
from sqlalchemy import event

from flask_idempotency.drivers.raw_connection import IDLE, RawConnection, class_of
from flask_idempotency.session.transaction import hook
from flask_idempotency.stores import holds, lock
from flask_idempotency.stores.postgres.store import PostgresRecords
from flask_idempotency.stores.table import define_table
from servers import plain_dsn
from tests.faults.explore.schedules import PATIENCE_SECONDS, Actor, Kind, Stop, Violation

SENDER = lock.sender

ANSWER_LOST, TIMES_OUT = "answer lost", "times out"

_SCHEMA = "CREATE TABLE payment (key bytea NOT NULL, body int NOT NULL, execution text NOT NULL)"
_WAITS = (
    "SELECT 1 FROM pg_locks WHERE pid = %s AND NOT granted AND locktype IN ('transactionid', 'tuple')"
)
_OPEN = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND state ~ 'idle in'"

_TIMEOUT = re.compile(r"250(?=ms')")
_CUT = re.compile(r"(?<=;)\s*(?=COMMIT\b)|(?<=COMMIT;)")
_NAMES = (
    ("'idempotency.held'", "lock", Kind.CHANGE),
    ("WITH done", "finish", Kind.CHANGE),
    ("ON CONFLICT", "insert", Kind.CHANGE),
    ("DELETE", "delete", Kind.CHANGE),
    ("UPDATE", "update", Kind.CHANGE),
    ("FOR KEY SHARE", "wait", Kind.CHANGE),
    ("ROLLBACK", "rollback", Kind.CHANGE),
    ("COMMIT", "commit", Kind.COMMIT),
    ("", "look", Kind.LOOK),
)


class Clock:
    """Stands in for the module ``time`` in the package."""

    ahead = 0.0

    sleep = staticmethod(time.sleep)

    @classmethod
    def monotonic(cls) -> float:
        return time.monotonic() + cls.ahead


PROBE_AFTER_SECONDS = 100
"""No schedule lasts that long, so a lock grows old when the schedule says so and never else."""


class Servers:
    """One database and one Redis, with the package's own way to them cut into steps."""

    def __init__(self, url: str, redis_url: str) -> None:
        self.redis = redis.Redis.from_url(redis_url, socket_timeout=PATIENCE_SECONDS)
        self._admin = psycopg2.connect(plain_dsn(url))
        self._admin.autocommit = True
        self.ask(_SCHEMA)
        self.engine = sa.create_engine(url)
        self._class = class_of(self.engine.dialect.name, self.engine.dialect.driver)
        event.listen(self.engine, "checkout", self._taken)
        event.listen(self.engine, "checkin", self._taken)
        table = define_table(sa.MetaData(), "idempotency_record")
        self.records = PostgresRecords(self.engine, table)
        table.metadata.create_all(self.engine)
        hook(self.engine, lambda *_what: None)
        self.records.messages.facts()  # the questions of an engine's first use

    def ask(self, sql: str, *values: Any) -> list[Any]:
        """Ask on a connection of the test's own."""
        with self._admin.cursor() as cursor:
            cursor.execute(sql, values or None)
            return cursor.fetchall() if cursor.description else []

    def is_waiting(self, backend: int) -> bool:
        """Whether a backend waits for another's transaction."""
        return bool(self.ask(_WAITS, backend))

    def terminate(self, backend: int) -> None:
        """End a backend, and see it gone."""
        self.ask("SELECT pg_terminate_backend(%s)", backend)
        end = time.monotonic() + PATIENCE_SECONDS
        while self.ask("SELECT 1 FROM pg_stat_activity WHERE pid = %s", backend):
            if time.monotonic() > end:
                raise Violation("a terminated backend stays")

    def _taken(self, driver: Any, _record: Any, fairy: Any = None) -> None:
        """Or given back, then without a fairy."""
        if actor := Actor.current():
            actor.backend = fairy and driver.info.backend_pid

    def check_connections(self) -> None:
        """Every connection must be back, and no transaction open."""
        engines = self.engine, self.records.messages.engine
        if any(each.pool.checkedout() for each in engines) or self.ask(_OPEN):  # type: ignore[attr-defined]
            raise Violation("a connection was not given back, or a transaction is left open")

    @contextmanager
    def in_steps(self) -> Iterator[Servers]:
        """Cut the package's messages into steps, and give it the clock of the test. Then close."""
        send = self._class.send
        times = {"PROBE_AFTER_SECONDS": PROBE_AFTER_SECONDS, "LOCK_SECONDS": 2 * PROBE_AFTER_SECONDS}

        def step_by_step(wire: RawConnection, sql: str, values: Any = None, first: Any = ()) -> Any:
            actor = Actor.current()
            if actor is None or not sql:  # a savepoint's end is no step
                return send(wire, sql, values, first)
            try:
                return self._steps(send, actor, wire, sql, values, first)
            except Stop:
                if actor.crashed:
                    wire.driver.close()
                elif sql == "ROLLBACK":  # dismissed, not crashed: it leaves nothing behind
                    return send(wire, sql)
                raise

        with (
            closing(self._admin),
            closing(self.redis),
            patch.object(self._class, "send", step_by_step),
            patch.object(holds, "time", Clock),
            patch.multiple(lock, sender=sender_in_steps, **times),
        ):
            yield self
            self.engine.dispose()

    def _steps(
        self, send: Any, actor: Actor, wire: RawConnection, sql: str, values: Any, first: Any
    ) -> Any:
        """Send a message part by part, as if its sender might be stopped between them."""
        if "pg_constraint" in sql:  # nothing here changes what it asks for
            return send(wire, sql, values, first)
        answers: list[Any] = []
        for part in _parts(sql):
            name, kind = next((name, kind) for words, name, kind in _NAMES if words in part)
            if name in ("commit", "rollback") and not actor.holds:
                kind = Kind.UNNOTICED  # it ends a transaction that did nothing
            elif name == "lock" and not actor.claimed:
                kind = Kind.LOOK  # no record is its own, so it locks none
            how = actor.stop_before(name, kind)
            if how == TIMES_OUT and name == "wait":
                Clock.ahead += values["milliseconds"] / 1000
            patience = 1 if how == TIMES_OUT else PATIENCE_SECONDS * 1000
            given = {**values, "milliseconds": patience} if name == "wait" else values
            in_front = () if answers else first
            try:
                answers.append(send(wire, _TIMEOUT.sub(str(patience), part), given, in_front))
            except wire.Error:
                if actor.dead:
                    raise Stop from None
                raise
            found = kind is Kind.CHANGE and _found_rows(name, answers[-1])
            actor.acted = kind is Kind.COMMIT or found
            actor.claimed |= actor.acted and name in ("insert", "update")
            actor.holds = wire.status() != IDLE and (actor.holds or actor.acted)
            if how == ANSWER_LOST:
                self.terminate(wire.driver.info.backend_pid)
                send(wire, "SELECT 1")
        # The purge asks how many rows its DELETE found; everybody else about the last statement.
        return answers[0 if "DELETE" in sql else -1]


def sender_in_steps(client: redis.Redis) -> Callable[..., Callable[[], Any]]:
    """What sends each command of the lock's as a step."""
    sent = SENDER(client)

    def send(*command: Any) -> Callable[[], Any]:
        actor = Actor.current()
        if actor is None:
            return sent(*command)
        name = {lock.ACQUIRE: "acquire", lock.RELEASE: "release"}.get(command[1], "mark")
        how = actor.stop_before(name, Kind.REDIS)
        reply = sent(*command)()
        actor.acted = name == "acquire" and reply[0] == command[4]  # else there is nothing left to lose
        return lambda: _lost() if how == ANSWER_LOST else reply

    return send


def _lost() -> None:
    raise redis.ConnectionError("the answer did not come")


def _found_rows(name: str, answer: Any) -> bool:
    """Whether a part of a message has changed or locked any."""
    rows, count = answer
    if name != "lock":
        return count > 0  # type: ignore[no-any-return]
    ((held,),) = rows  # see LOCKED in the statements: first the owner of what was locked
    return not held.startswith("-")


def _parts(text: str) -> list[str]:
    """A message cut before and after each COMMIT."""
    if "DELETE FROM ONLY" in text:  # the purge, whose COMMIT goes without saying
        text = f"BEGIN;{text};COMMIT"
    return [part for part in _CUT.split(text) if part.strip()]
