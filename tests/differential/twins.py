"""The two applications that programs run in: one plain, one protected.

Both are alike but for the protection, each has a database of its own, and both serve one program
after the other: between two programs only rows are put back, so that one costs some 40 milliseconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from types import SimpleNamespace
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


@dataclass
class Twin:
    """One of the two applications."""

    app: Flask
    db: Any
    models: SimpleNamespace
    steps: dict[str, Callable[..., Any]]
    protected: bool
    url: str
    run: Run = field(init=False)
    errors: list[BaseException] = field(default_factory=list)
    observer: Any = None
    """A connection that reads and puts back rows."""
    holder: Any = None
    """A connection that holds the row of ``held``."""

    def new_session(self) -> Any:
        """A session beside ``db.session``."""
        return factory_of(self.app, self.db)()

    def clear(self) -> None:
        """Put the rows back, and lock what is always locked."""
        records = "delete from idempotency_record;" if self.protected else ""
        with self.observer.cursor() as cursor:
            cursor.execute(models.CLEAR + records)
        with self.holder.cursor() as cursor:
            cursor.execute("rollback; begin; select * from held for update")

    def rows(self) -> list[Any]:
        """All committed rows of the application."""
        with self.observer.cursor() as cursor:
            cursor.execute(models.ROWS)
            return [tuple(row) for row in cursor]

    def is_completed(self) -> bool:
        """Whether a record holds an answer."""
        with self.observer.cursor() as cursor:
            cursor.execute("select 1 from idempotency_record where state = 'completed'")
            return cursor.fetchone() is not None

    def state(self) -> list[list[str]]:
        """What is not as on a new connection, for each connection in the pool with such a thing."""
        if left_behind(self.db):
            return [[LEFT]]
        with self.app.app_context():
            pool = self.db.engine.pool
        if pool.checkedout():
            return [[LEAKED]]
        found = []
        for connection in [pool.connect() for _ in range(pool.checkedin())]:
            with closing(connection), connection.cursor() as cursor:
                cursor.execute(STATE)
                lines = (line for (line,) in cursor if not line.startswith("setting transaction_"))
                found.append(sorted(lines))
        return sorted(filter(None, found))

    def is_fresh(self) -> bool:
        """Whether the next program finds what the first one found: one clean connection at most."""
        with self.app.app_context():
            return self.db.engine.pool.checkedin() < 2 and not self.state()

    def forget_connections(self) -> None:
        """Let the next request begin on a new connection; cut off what was not given back."""
        with self.app.app_context():
            leaked = self.db.engine.pool.checkedout()
            self.db.engine.dispose()
        if leaked:
            with self.observer.cursor() as cursor:
                cursor.execute(CUT_OFF, (self.holder.get_backend_pid(),))

    def post(self, program: Program, key: str) -> Request:
        """Send one request in which the program runs."""
        self.run, self.errors = Run(program, self), []
        with warnings.catch_warnings(), _listeners(self, program):
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
        self.observer.close()
        self.holder.close()


@contextmanager
def savepoints_unchecked(twin: Twin) -> Iterator[list[str]]:
    """Savepoints are set and ended also where SQLAlchemy's own check forbids it: those that were.

    After a RELEASE that failed, SQLAlchemy sends nothing more on a connection, not even what rolls back
    to the savepoint around it.
    """
    found: list[str] = []
    with twin.app.app_context():
        dialect = twin.db.engine.dialect

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

    with twin.app.app_context():
        engine = twin.db.engine
    sa.event.listen(engine, "commit", before_commit)
    sa.event.listen(Session, "after_begin", after_begin)
    try:
        yield kept
    finally:
        sa.event.remove(engine, "commit", before_commit)
        sa.event.remove(Session, "after_begin", after_begin)


def make_twin(
    url: str,
    isolation: str,
    grammar: Grammar,
    *,
    protected: bool,
    redis_url: str | None = None,
    enforce: bool = True,
    hidden: bool = False,
) -> Twin:
    """An application on an empty database."""
    db = make_db()
    app = Flask("protected" if protected else "plain")
    app.logger.disabled = True
    classes = models.define(db)
    options = {"isolation_level": isolation} if isolation else {}
    app.config.update(SQLALCHEMY_DATABASE_URI=url, SQLALCHEMY_ENGINE_OPTIONS=options)
    db.init_app(app)
    if protected:
        app.config["IDEMPOTENCY_STORE"] = "hybrid" if redis_url else "postgres"
        app.config["IDEMPOTENCY_ENFORCE"] = enforce
        if redis_url:
            app.config["IDEMPOTENCY_REDIS_URL"] = redis_url
        protect(app, db, scope=None)
    steps = {row.kind: row.do for row in grammar.table}
    twin = Twin(app, db, classes, steps, protected, url)
    _add_surroundings(twin)
    _add_view(twin)
    with app.app_context():
        db.create_all()
        db.engine.dispose()
    twin.observer, twin.holder = psycopg2.connect(plain_dsn(url)), psycopg2.connect(plain_dsn(url))
    twin.observer.autocommit = twin.holder.autocommit = True
    with twin.observer.cursor() as cursor:
        cursor.execute(models.SET_UP + models.HIDDEN * hidden + models.ONLY_FOR_THE_OWNER * protected)
    return twin


@contextmanager
def _listeners(twin: Twin, program: Program) -> Iterator[None]:
    """Listeners of the application, for a program that has such: else nothing hears its sessions."""

    def choose(_session: Any, _transaction: Any, connection: Any) -> None:
        connection.execute(sa.text(program.each))

    def refuse(*_: Any) -> None:
        if twin.run.part == "view":
            raise Veto

    found = [("after_begin", choose)] * bool(program.each)
    found += [(program.vetoes, refuse)] * bool(program.vetoes)
    for name, listener in found:
        sa.event.listen(factory_of(twin.app, twin.db), name, listener)
    yield
    for name, listener in found:
        sa.event.remove(factory_of(twin.app, twin.db), name, listener)


def _add_view(twin: Twin) -> None:
    """The view, protected or not, and a decorator above it."""
    app, db = twin.app, twin.db

    def view() -> Any:
        run = twin.run
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

    protected = idempotent(view) if twin.protected else view

    @wraps(protected)
    def outermost() -> Response:
        run = twin.run
        run.baseline = twin.rows()
        run.failed_outside |= run.program.begins_above and present_session(db).in_transaction()
        response = None
        try:
            with db.session.begin() if run.program.begins_above else nullcontext():
                response = app.make_response(protected())
                run.perform_part("above", run.program.above)
        except Exception:
            run.failed_outside |= response is not None
            raise
        return response

    app.add_url_rule("/run", "run", outermost, methods=["POST"])


def _add_surroundings(twin: Twin) -> None:
    """The application's own functions before and after the view, and its error handler."""
    app, db = twin.app, twin.db

    @app.before_request
    def before() -> None:
        twin.run.perform_part("before", twin.run.program.before)

    @app.errorhandler(Handled)
    def handled(error: Handled) -> Any:
        run = twin.run
        if run.program.handler == "rolls back":
            db.session.rollback()
        return {"handled": name_of(error.__cause__ or error)}, 409

    @app.after_request
    def after(response: Response) -> Response:
        run = twin.run
        if not run.after_has_run:
            run.after_has_run = True
            run.perform_part("after", run.program.after)
        return response

    def note_error(_app: Flask, exception: BaseException, **_: Any) -> None:
        twin.errors.append(exception)

    got_request_exception.connect(note_error, app, weak=False)
