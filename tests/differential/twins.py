"""The two applications that programs run in: one plain, one protected.

Both are alike but for the protection, each has a database of its own, and both serve one program
after the other: between two programs only rows are put back, so that one costs some 40 milliseconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import psycopg2
import sqlalchemy as sa
from flask import Flask, Response, got_request_exception
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from flask_idempotency import NotAtomic, idempotent
from servers import plain_dsn
from tests.differential import models
from tests.differential.grammar import Grammar, Program
from tests.differential.steps import SHOWN, Handled, Oops, Run, Veto, ended_second_session, name_of
from tests.differential.worlds import STATE
from tests.sessions import factory_of, left_behind, make_db, present_session, protect

CUT_OFF = """
    select pg_terminate_backend(pid, 5000) from pg_stat_activity
    where datname = current_database() and backend_type = 'client backend'
        and pid not in (pg_backend_pid(), %s)
"""

LEAKED = "a connection was not given back"
LEFT = "a session was not removed"

STATUSES = {"created": 201, "conflict": 409, "forbidden": 403, "error": 500}


@dataclass
class Request:
    """One request: its answer, what its program saw, and the rows after it.

    The status is 0 where a teardown function failed, which a server would only log.
    """

    status: int
    text: str
    replayed: bool
    run: Run
    errors: list[BaseException]
    rows: list[Any]

    @property
    def refusal(self) -> str:
        """By which name it was refused, if it was."""
        for error in self.errors:
            if isinstance(error, NotAtomic) and self.status == 500:
                return f"NotAtomic: {error}"
        if self.status == 500 and "NotAtomic" in [what for _, what in self.run.saw("view")]:
            return "NotAtomic, told to the view, which then failed by itself"
        is_strict = self.status >= 500 and self.run.program.isolation  # a decorator may have raised
        failed = is_strict and any(str(what).endswith(" 40001") for _, what in self.run.saw("view"))
        if failed or (self.status == 503 and "problem:transaction-conflict" in self.text):
            return "TransactionConflict"
        return ""

    @property
    def errors_by_name(self) -> str:
        return ", ".join(map(name_of, self.errors)) or "no error"


class Twin:
    """One of the two applications, on an empty database."""

    def __init__(
        self,
        url: str,
        isolation: str,
        grammar: Grammar,
        *,
        protected: bool,
        redis_url: str | None = None,
        hidden: bool = False,
    ) -> None:
        self.url, self.protected = url, protected
        self.steps = {row.kind: row.do for row in grammar.table}
        self.run: Run
        self.errors: list[BaseException] = []
        self.db = make_db()
        self.models = models.define(self.db)
        self.app = Flask("protected" if protected else "plain")
        self.app.logger.disabled = True
        self.app.config.update(
            SQLALCHEMY_DATABASE_URI=url,
            SQLALCHEMY_ENGINE_OPTIONS={"isolation_level": isolation} if isolation else {},
            IDEMPOTENCY_STORE="hybrid" if redis_url else "postgres",
            IDEMPOTENCY_REDIS_URL=redis_url,
        )
        self.db.init_app(self.app)
        if protected:
            protect(self.app, self.db, scope=None)
        self.app.before_request(lambda: self.run.perform_part("before", self.run.program.before))
        self.app.register_error_handler(Handled, self._handle)
        self.app.after_request(self._after)
        self._protected_view = idempotent(self._view) if protected else self._view
        outermost = wraps(self._protected_view)(lambda: self._outermost())  # noqa: PLW0108 -- it carries a mark
        self.app.add_url_rule("/run", "run", outermost, methods=["POST"])
        got_request_exception.connect(self._note_error, self.app)
        with self.app.app_context():
            self.db.create_all()
            self.engine = self.db.engine
            self.engine.dispose()
        self._observer, self._holder = (psycopg2.connect(plain_dsn(url)) for _ in range(2))
        self._observer.autocommit = self._holder.autocommit = True
        self.ask(models.SET_UP + models.HIDDEN * hidden + models.ONLY_FOR_THE_OWNER * protected)

    def _note_error(self, _app: Flask, exception: BaseException, **_: Any) -> None:
        self.errors.append(exception)

    # What the application does around the view, and in it

    def _outermost(self) -> Response:
        run = self.run
        run.baseline = self.rows()
        run.failed_outside |= run.program.begins_above and present_session(self.db).in_transaction()
        response = None
        try:
            with self.db.session.begin() if run.program.begins_above else nullcontext():
                response = self.app.make_response(self._protected_view())
                run.perform_part("above", run.program.above)
        except Exception:
            run.failed_outside |= response is not None
            raise
        return response

    def _view(self) -> Any:
        run = self.run
        run.views += 1
        try:
            with ended_second_session(run):
                run.perform_part("view", run.program.view)
                if run.program.answer == "raise":
                    raise Oops
        except Exception as error:
            if run.program.handler and not isinstance(error, NotAtomic):
                raise Handled from error
            raise
        return run.saw("view"), STATUSES[run.program.answer]

    def _handle(self, error: Handled) -> Any:
        if self.run.program.handler == "rolls back":
            self.db.session.rollback()
        return {"handled": name_of(error.__cause__ or error)}, 409

    def _after(self, response: Response) -> Response:
        run = self.run
        if not run.after_has_run:
            run.after_has_run = True
            run.perform_part("after", run.program.after)
        return response

    # From outside

    def ask(self, sql: str, *values: Any) -> list[Any]:
        """What a connection is told that the application knows nothing of."""
        with self._observer.cursor() as cursor:
            cursor.execute(sql, values or None)
            return [tuple(row) for row in cursor] if cursor.description else []

    def clear(self) -> None:
        """Put the rows back, and lock what is always locked."""
        self.ask(models.CLEAR + "delete from idempotency_record;" * self.protected)
        with self._holder.cursor() as cursor:
            cursor.execute("rollback; begin; select * from held for update")

    def rows(self) -> list[Any]:
        """All committed rows of the application."""
        return self.ask(models.ROWS)

    def is_completed(self) -> bool:
        """Whether a record holds an answer."""
        return self.protected and bool(
            self.ask("select 1 from idempotency_record where state = 'completed'")
        )

    def state(self) -> set[str]:
        """What is not as on a new connection, on whichever of the pool it is."""
        pool: Any = self.engine.pool
        if left_behind(self.db):
            return {LEFT}
        if pool.checkedout():
            return {LEAKED}
        found: set[str] = set()
        for connection in [pool.connect() for _ in range(pool.checkedin())]:
            with closing(connection), connection.cursor() as cursor:
                cursor.execute(STATE)
                found |= {line for (line,) in cursor if not line.startswith("setting transaction_")}
        return found

    def is_fresh(self) -> bool:
        """Whether the next program finds what the first one found: one clean connection at most."""
        return self.engine.pool.checkedin() < 2 and not self.state()  # type: ignore[attr-defined]

    def forget_connections(self) -> None:
        """Let the next request begin on a new connection; cut off what was not given back."""
        leaked = self.engine.pool.checkedout()  # type: ignore[attr-defined]
        self.engine.dispose()
        if leaked:
            self.ask(CUT_OFF, self._holder.get_backend_pid())

    def post(self, program: Program, key: str) -> Request:
        """Send one request in which the program runs."""
        self.run, self.errors = Run(program, self), []
        with warnings.catch_warnings(), _listening(self, program):
            warnings.simplefilter("ignore")  # SQLAlchemy's about programs that do odd things
            try:
                answer = self.app.test_client().post("/run", headers={"Idempotency-Key": key})
            except Exception as error:  # of a teardown function
                return Request(0, name_of(error), False, self.run, [*self.errors, error], self.rows())
        replayed = "Idempotent-Replayed" in answer.headers
        return Request(answer.status_code, answer.text, replayed, self.run, self.errors, self.rows())

    def close(self) -> None:
        """Close every connection."""
        self.forget_connections()
        self._observer.close()
        self._holder.close()


@contextmanager
def savepoints_unchecked(twin: Twin) -> Iterator[list[str]]:
    """Savepoints are set and ended also where SQLAlchemy's own check forbids it: those that were.

    After a RELEASE that failed, SQLAlchemy sends nothing more on a connection, not even what rolls back
    to the savepoint around it.
    """
    found: list[str] = []
    dialect = twin.engine.dialect

    def unchecked(send: Callable[[Any, str], None], connection: Any, name: str) -> None:
        nested = connection.get_nested_transaction()
        if nested is None or nested.is_active:
            return send(connection, name)
        found.append(name)
        connection._nested_transaction = None
        try:
            return send(connection, name)
        finally:
            connection._nested_transaction = nested

    verbs = ("do_savepoint", "do_release_savepoint", "do_rollback_to_savepoint")
    for verb in verbs:
        setattr(dialect, verb, partial(unchecked, getattr(dialect, verb)))
    try:
        yield found
    finally:
        for verb in verbs:
            delattr(dialect, verb)


@contextmanager
def settings_outlasting(twin: Twin, parts: Collection[str]) -> Iterator[dict[str, str]]:
    """What a view commits keeps its settings for transactions of these parts, as in an operation.

    The role comes last: another one may not be allowed to set the rest.
    """
    kept: dict[str, str] = {}
    begun: dict[Session, Any] = {}
    keep = sa.select(*(sa.func.current_setting(name, True).label(name) for name in SHOWN))

    def before_commit(connection: Any) -> None:
        if connection not in begun.values() or twin.run.part not in parts:
            return
        with suppress(SQLAlchemyError):  # it has failed: nothing of it is kept
            (row,) = connection.execute(keep).mappings()
            kept.update((name, value) for name, value in row.items() if value is not None)
            for session, other in begun.items():  # that has only read until then
                if other is not connection and session.in_transaction():
                    apply(other)

    def apply(connection: Any) -> None:
        by = [sa.func.set_config(name, kept[name], True) for name in SHOWN if name in kept]
        connection.execute(sa.select(*by))

    def after_begin(session: Session, transaction: Any, connection: Any) -> None:
        begun[session] = connection
        if kept and twin.run.part in parts and not transaction.nested:
            apply(connection)

    sa.event.listen(twin.engine, "commit", before_commit)
    sa.event.listen(Session, "after_begin", after_begin)
    try:
        yield kept
    finally:
        sa.event.remove(twin.engine, "commit", before_commit)
        sa.event.remove(Session, "after_begin", after_begin)


@contextmanager
def _listening(twin: Twin, program: Program) -> Iterator[None]:
    """Listeners of the application, for a program that has such: else nothing hears its sessions."""

    def choose(_session: Any, _transaction: Any, connection: Any) -> None:
        connection.execute(sa.text(program.each))

    def refuse(*_: Any) -> None:
        if twin.run.part == "view":
            raise Veto

    found = [("after_begin", choose)] * bool(program.each)
    found += [(program.vetoes, refuse)] * bool(program.vetoes)
    for each in found:
        sa.event.listen(factory_of(twin.app, twin.db), *each)
    yield
    for each in found:
        sa.event.remove(factory_of(twin.app, twin.db), *each)
