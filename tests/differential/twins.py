"""The two applications that programs run in: one plain, one protected.

Both are alike but for the protection, each has a database of its own, and both serve one program
after the other: between two programs only rows are put back, so that one costs some 40 milliseconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg2
import sqlalchemy as sa
from flask import Response
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from flask_idempotency import NotAtomic
from servers import plain_dsn
from tests.differential import models
from tests.differential.harness import Case
from tests.differential.steps import SHOWN, Handled, Oops, Program, Row, Run, Veto, name_of
from tests.differential.worlds import Reply, World
from tests.sessions import factory_of, present_session

CUT_OFF = """
    select pg_terminate_backend(pid, 5000) from pg_stat_activity
    where datname = current_database() and backend_type = 'client backend'
        and pid not in (pg_backend_pid(), %s)
"""

STATUSES = {"created": 201, "conflict": 409, "forbidden": 403, "error": 500}


@dataclass
class Request:
    """One request: its answer, what its program saw, and the rows after it."""

    reply: Reply
    run: Run
    rows: list[Any]

    @property
    def status(self) -> int:
        """It is 0 where a teardown function failed, which a server would only log."""
        return self.reply.status or 0

    @property
    def text(self) -> str:
        return self.reply.body

    @property
    def refusal(self) -> str:
        """By which name it was refused, if it was."""
        for error in self.reply.errors:
            if error.name == "NotAtomic" and self.status == 500:
                return f"NotAtomic: {error.message}"
        if self.status == 500 and "NotAtomic" in [what for _, what in self.run.saw("view")]:
            return "NotAtomic, told to the view, which then failed by itself"
        is_strict = self.status >= 500 and self.run.program.isolation  # a decorator may have raised
        failed = is_strict and any(str(what).endswith(" 40001") for _, what in self.run.saw("view"))
        if failed or (self.status == 503 and "problem:transaction-conflict" in self.text):
            return "TransactionConflict"
        return ""

    @property
    def errors_by_name(self) -> str:
        return ", ".join(map(str, self.reply.errors)) or "no error"


class Twin(World):
    """One of the two applications, on an empty database."""

    run: Run

    def __init__(
        self,
        url: str,
        driver: str,
        table: list[Row],
        isolation: str,
        *,
        hidden: bool = False,
        **options: Any,
    ) -> None:
        case = Case(
            "a program",
            Twin.view,
            before=lambda twin: twin.run.perform_part("before", twin.run.program.before),
            above=Twin.outermost,
            after_request=Twin.after,
            engine_options={
                "connect_args": {},
                **({"isolation_level": isolation} if isolation else {}),
            },
            pool=15,
        )
        super().__init__(url, driver, case, **options)
        self.steps = {row.kind: row.do for row in table}
        self.app.register_error_handler(Handled, self._handle)
        self.admin_run(
            models.SET_UP + models.HIDDEN * hidden + models.ONLY_FOR_THE_OWNER * self.protected
        )
        self.engine.dispose()
        self._holder = psycopg2.connect(plain_dsn(url))
        self._holder.autocommit = True
        self.first_state = super().state()

    def _define_models(self) -> None:
        self.models = models.define(self.db)

    # What the application does around the view, and in it

    def outermost(self, view: Callable[[], Any]) -> Response:
        run = self.run
        run.baseline = self.rows()
        run.failed_outside |= run.program.begins_above and present_session(self.db).in_transaction()
        response = None
        try:
            with self.db.session.begin() if run.program.begins_above else nullcontext():
                response = self.app.make_response(view())
                run.perform_part("above", run.program.above)
        except Exception:
            run.failed_outside |= response is not None
            raise
        return response

    def view(self) -> Any:
        run = self.run
        run.views += 1
        try:
            run.perform_part("view", run.program.view)
            if run.program.answer == "raise":
                raise Oops
        except Exception as error:
            if run.program.handler and not isinstance(error, NotAtomic):
                raise Handled from error
            raise
        finally:
            if run.second is not None:
                run.second.session.close()
        return run.saw("view"), STATUSES[run.program.answer]

    def new_session(self) -> Any:
        """A session beside ``db.session``."""
        return factory_of(self.app, self.db)()

    def _handle(self, error: Handled) -> Any:
        if self.run.program.handler == "rolls back":
            self.db.session.rollback()
        return {"handled": name_of(error.__cause__ or error)}, 409

    def after(self, response: Response) -> Response:
        run = self.run
        if not run.after_has_run:
            run.after_has_run = True
            run.perform_part("after", run.program.after)
        return response

    # From outside

    def clear(self) -> None:
        """Put the rows back, and lock what is always locked."""
        self.kept.clear()
        self.admin_run(models.CLEAR + "delete from idempotency_record;" * self.protected)
        with self._holder.cursor() as cursor:
            cursor.execute("rollback; begin; select * from held for update")

    def rows(self) -> list[Any]:  # type: ignore[override]
        return self.admin_run(models.ROWS)

    def is_completed(self) -> bool:
        return any(state == "completed" for state, _ in self.records())

    def state(self) -> frozenset[str]:
        """What is not as on a new connection, on whichever of the pool it is."""
        return super().state() - (self.first_state or frozenset())

    def is_fresh(self) -> bool:
        """Whether the next program finds what the first one found: one clean connection at most."""
        return self.engine.pool.checkedin() < 2 and not self.state()

    def forget_connections(self) -> None:
        """Let the next request begin on a new connection; cut off what was not given back."""
        leaked = self.engine.pool.checkedout()
        self.engine.dispose()
        if leaked:
            self.admin_run(CUT_OFF, self._holder.get_backend_pid())

    def post(self, program: Program, key: str) -> Request:
        self.run = Run(program, self)
        with warnings.catch_warnings(), _listening(self, program):
            warnings.simplefilter("ignore")  # SQLAlchemy's about programs that do odd things
            reply = self.send(key)
        return Request(reply, self.run, self.rows())

    def close(self) -> None:
        self.forget_connections()
        super().close()
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
