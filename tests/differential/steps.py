"""What a program can do with a session: each kind of step, by the name that programs call it.

A step runs in a :class:`Run`, one request in one application, by a :class:`Hand`, which is whose
session it works with. What it saw is written down: a value, or the class and SQLSTATE of its error.
Both applications must have seen the same.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg
import psycopg2
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from flask_idempotency.core.errors import sqlstate
from tests.sessions import proxy_of

if TYPE_CHECKING:
    from tests.differential.programs import Program
    from tests.differential.twins import Twin


@dataclass(frozen=True)
class Step:
    """One thing to do. Its ``arguments`` are words, or the steps inside it."""

    kind: str
    arguments: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        return f"do({', '.join(map(repr, (self.kind, *self.arguments)))})"

    @property
    def inner(self) -> tuple[Step, ...]:
        """The steps inside this one."""
        return tuple(each for each in self.arguments if isinstance(each, Step))


def do(kind: str, *arguments: Any) -> Step:
    """A step, as programs write it."""
    return Step(kind, arguments)


class Oops(Exception):
    """What a program raises: no error of a database."""


class Handled(Exception):
    """An error for which the application has a handler."""


DATABASE_ERRORS = (SQLAlchemyError, psycopg2.Error, psycopg.Error, ValueError, TypeError)
"""What a careful view catches. A value that cannot be bound may be any of the last two."""

MISTAKES = {"AttributeError", "ImportError", "KeyError", "NameError"}
"""What no step may raise in the plain application: it would prove nothing."""


@dataclass
class Run:
    """One request: the program's steps in one application, and what they saw."""

    program: Program
    twin: Twin
    part: str = "before"
    seen: list[tuple[str, str, Any]] = field(default_factory=list)
    executed: Counter[str] = field(default_factory=Counter)
    views: int = 0
    committed: bool = False
    baseline: list[Any] | None = None
    """The rows when the protected part began."""
    audits: list[str] = field(default_factory=list)
    counted: int = 0
    """How often ``count up by engine`` came through."""
    second: Hand | None = None
    mistakes: int = 0
    """How many errors were those of a step that is wrongly written."""
    after_has_run: bool = False
    failed_outside: bool = False
    """Whether an error came out of what runs before, above or after the view."""
    hand: Hand = field(init=False)

    def __post_init__(self) -> None:
        self.hand = Hand(self, proxy_of(self.twin.db))

    def perform_part(self, part: str, steps: tuple[Step, ...]) -> None:
        """Do the steps of a part with the request's own session."""
        self.part = part
        try:
            self.hand.perform_all(steps)
        except Exception:
            self.failed_outside |= part != "view"
            raise

    def note(self, kind: str, what: Any) -> None:
        self.seen.append((self.part, kind, what))

    def saw(self, part: str) -> list[Any]:
        """What was seen in one part."""
        return [[kind, what] for where, kind, what in self.seen if where == part]


@dataclass
class Hand:
    """Whose session a step works with, and what it has kept from earlier steps."""

    run: Run
    session: Any
    loaded: Any = None
    loaded_book: Any = None
    stream: Any = None
    savepoints: list[Any] = field(default_factory=list)

    def perform(self, step: Step, *, catching: bool = True) -> None:
        """Do a step and note what it saw; its error too, unless the program lets errors out."""
        run = self.run
        run.executed[step.kind] += 1
        catches = {"nothing": (), "database errors": DATABASE_ERRORS, "everything": (Exception,)}
        try:
            seen = STEPS[step.kind](self, *step.arguments)
        except Oops:
            run.note(step.kind, "Oops")
            raise
        except Exception as error:
            run.note(step.kind, name_of(error))
            run.mistakes += is_mistake(error)
            if not catching or not isinstance(error, catches[run.program.catches]):
                raise
        else:
            if seen is not None:
                run.note(step.kind, seen)

    def perform_all(self, steps: tuple[Step, ...], *, catching: bool = True) -> None:
        """Do steps one after the other."""
        for step in steps:
            self.perform(step, catching=catching)

    def ask(self, sql: str, **values: Any) -> list[Any]:
        """Run text in the session; the rows, as JSON has them."""
        result = self.session.execute(sa.text(sql), values)
        return [list(row) for row in result] if result.returns_rows else []

    def find(self, label: str) -> Any:
        item = self.run.twin.item
        return self.session.scalars(sa.select(item).filter_by(label=label)).one_or_none()


def name_of(error: BaseException) -> str:
    """An error's class and SQLSTATE."""
    code = sqlstate(getattr(error, "orig", error))
    # By design one stands for the other, after a commit that has failed.
    name = type(error).__name__.replace("PendingRollbackError", "InvalidRequestError")
    return f"{name} {code}" if code else name


def is_mistake(error: BaseException) -> bool:
    """Whether an error of those :data:`MISTAKES` was raised here, not in what a step called."""
    if type(error).__name__ not in MISTAKES:
        return False
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and "differential" in frame.tb_frame.f_code.co_filename


STEPS: dict[str, Callable[..., Any]] = {}
"""What each kind of step does. It gives what it saw, or None."""


def step(kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as what a kind of step does."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        STEPS[kind] = function
        return function

    return register


# Writes


@step("add")
def add(hand: Hand, label: str) -> None:
    hand.session.add(hand.run.twin.item(label=label, amount=1))


@step("add several")
def add_several(hand: Hand, label: str) -> None:
    item = hand.run.twin.item
    hand.session.add_all([item(label=f"{label}{number}", amount=number) for number in range(3)])


@step("save in bulk")
def save_in_bulk(hand: Hand, label: str) -> None:
    item = hand.run.twin.item
    hand.session.bulk_save_objects([item(label=f"{label}{number}", amount=4) for number in range(2)])


@step("modify")
def modify(hand: Hand, label: str) -> Any:
    found = hand.find(label)
    if found is None:
        return "gone"
    found.amount += 1


@step("delete")
def delete(hand: Hand, label: str) -> Any:
    found = hand.find(label)
    if found is None:
        return "gone"
    hand.session.delete(found)


@step("insert")
def insert(hand: Hand, label: str) -> None:
    hand.session.execute(sa.insert(hand.run.twin.item.__table__).values(label=label, amount=2))


@step("insert many")
def insert_many(hand: Hand, label: str) -> None:
    rows = [{"label": f"{label}{number}", "amount": number} for number in range(3)]
    hand.session.execute(sa.insert(hand.run.twin.item), rows)


@step("update")
def update(hand: Hand, label: str) -> int:
    table = hand.run.twin.item.__table__
    changed = sa.update(table).where(table.c.label == label).values(amount=table.c.amount + 10)
    return hand.session.execute(changed).rowcount


@step("update by ORM")
def update_by_orm(hand: Hand, label: str) -> int:
    item = hand.run.twin.item
    changed = sa.update(item).where(item.label == label).values(amount=item.amount + 100)
    return hand.session.execute(changed).rowcount


@step("delete by core")
def delete_by_core(hand: Hand, label: str) -> int:
    table = hand.run.twin.item.__table__
    return hand.session.execute(sa.delete(table).where(table.c.label == label)).rowcount


@step("insert as text")
def insert_as_text(hand: Hand, label: str) -> None:
    hand.ask("insert into item (label, amount) values (:label, 3)", label=label)


@step("take a place")
def take_a_place(hand: Hand, spot: int) -> None:
    """Two who take one place collide when they commit, not before."""
    hand.session.execute(sa.insert(hand.run.twin.place.__table__).values(spot=spot))


@step("take a place by ORM")
def take_a_place_by_orm(hand: Hand, spot: int) -> None:
    hand.session.add(hand.run.twin.place(spot=spot))


@step("insert by connection")
def insert_by_connection(hand: Hand, label: str) -> None:
    table = hand.run.twin.item.__table__
    hand.session.connection().execute(sa.insert(table).values(label=label, amount=6))


@step("insert in a savepoint of the connection")
def insert_in_a_savepoint(hand: Hand, label: str) -> None:
    table, connection = hand.run.twin.item.__table__, hand.session.connection()
    with connection.begin_nested():
        connection.execute(sa.insert(table).values(label=label, amount=7))


@step("count up")
def count_up(hand: Hand) -> None:
    hand.ask("update tally set amount = amount + 1")


# Reads


@step("read")
def read(hand: Hand) -> Any:
    item = hand.run.twin.item
    found = hand.session.execute(sa.select(item.label, item.amount, item.owner).order_by(item.label))
    return [list(row) for row in found]


@step("read places")
def read_places(hand: Hand) -> Any:
    return hand.ask("select spot from place order by spot")


@step("read tally")
def read_tally(hand: Hand) -> Any:
    """Not after another connection has counted, where the snapshot decides what is seen."""
    if hand.run.program.isolation and hand.run.counted:
        return "not observed"
    return hand.ask("select amount from tally")


@step("read the session")
def read_the_session(hand: Hand) -> Any:
    """What it says of itself."""
    session = hand.session() if callable(hand.session) else hand.session
    changes = [len(session.new), len(session.dirty), len(session.deleted)]
    return [session.is_active, session.in_transaction(), session.in_nested_transaction(), changes]


@step("load")
def load(hand: Hand, label: str) -> Any:
    hand.loaded = hand.find(label)
    return None if hand.loaded else "gone"


@step("read what is loaded")
def read_loaded(hand: Hand) -> Any:
    return [hand.loaded.label, hand.loaded.amount] if hand.loaded else "nothing"


@step("change what is loaded")
def change_loaded(hand: Hand) -> Any:
    if not hand.loaded:
        return "nothing"
    hand.loaded.amount += 5


@step("refresh what is loaded")
def refresh_loaded(hand: Hand) -> Any:
    if not hand.loaded:
        return "nothing"
    hand.session.refresh(hand.loaded)


@step("expunge what is loaded")
def expunge_loaded(hand: Hand) -> Any:
    if not hand.loaded:
        return "nothing"
    hand.session.expunge(hand.loaded)


@step("merge what is loaded")
def merge_loaded(hand: Hand) -> Any:
    if not hand.loaded:
        return "nothing"
    hand.loaded = hand.session.merge(hand.loaded)


@step("open a stream")
def open_a_stream(hand: Hand) -> Any:
    options = {"stream_results": True, "max_row_buffer": 1}
    numbers = sa.text("select generate_series(1, 5)")
    hand.stream = hand.session.execute(numbers, execution_options=options)
    return hand.stream.fetchone()[0]


@step("read the stream")
def read_the_stream(hand: Hand) -> Any:
    return hand.stream.fetchone()[0] if hand.stream is not None else "nothing"


# The session's own life


@step("flush")
def flush(hand: Hand) -> None:
    hand.session.flush()


@step("commit")
def commit(hand: Hand) -> None:
    hand.stream = None  # inside an operation a commit does not close it
    hand.session.commit()
    hand.run.committed = True


@step("rollback")
def rollback(hand: Hand) -> str:
    hand.session.rollback()
    return "done"


@step("expire all")
def expire_all(hand: Hand) -> None:
    hand.session.expire_all()


@step("close")
def close(hand: Hand) -> None:
    hand.session.close()


@step("remove")
def remove(hand: Hand) -> None:
    """As ``db.session.remove()``; a session of one's own is closed."""
    getattr(hand.session, "remove", hand.session.close)()


@step("unit of work")
def unit_of_work(hand: Hand, *inner: Step) -> None:
    with hand.session.begin():
        hand.perform_all(inner, catching=False)
    hand.run.committed = True


@step("nested, kept")
def nested_kept(hand: Hand, *inner: Step) -> None:
    with hand.session.begin_nested():
        hand.perform_all(inner)


@step("nested, first error ends it")
def nested_until_error(hand: Hand, *inner: Step) -> None:
    with hand.session.begin_nested():
        hand.perform_all(inner, catching=False)


@step("nested, undone")
def nested_undone(hand: Hand, *inner: Step) -> None:
    class Undone(Exception):
        pass

    try:
        with hand.session.begin_nested():
            hand.perform_all(inner)
            raise Undone
    except Undone:
        return


@step("savepoint")
def savepoint(hand: Hand) -> None:
    hand.savepoints.append(hand.session.begin_nested())


@step("release the savepoint")
def release_the_savepoint(hand: Hand) -> Any:
    if not hand.savepoints:
        return "none"
    hand.savepoints.pop().commit()


@step("undo the savepoint")
def undo_the_savepoint(hand: Hand) -> Any:
    if not hand.savepoints:
        return "none"
    hand.savepoints.pop().rollback()


@step("send")
def send(hand: Hand, sql: str) -> None:
    hand.ask(sql)


@step("ask")
def ask(hand: Hand, sql: str) -> Any:
    return hand.ask(sql)


@step("wait")
def wait(_hand: Hand) -> None:
    """What the view does elsewhere, for longer than a transaction of ``tables`` may be idle."""
    time.sleep(0.3)


@step("raise")
def raise_oops(_hand: Hand) -> None:
    raise Oops


# Statements that fail


def _flush_of(**values: Any) -> Callable[[Hand], Any]:
    def fail(hand: Hand) -> None:
        hand.session.add(hand.run.twin.item(**values))
        hand.session.flush()

    return fail


def _insert_of(**values: Any) -> Callable[[Hand], Any]:
    return lambda hand: hand.session.execute(sa.insert(hand.run.twin.item.__table__).values(**values))


def _texts(*statements: str, **values: Any) -> Callable[[Hand], Any]:
    return lambda hand: [hand.ask(statement, **values) for statement in statements]


FAILURES: dict[str, Callable[[Hand], Any]] = {
    "unique": _insert_of(label="old", amount=1),
    "unique in a flush": _flush_of(label="old", amount=1),
    "check": _insert_of(label="d", amount=-1),
    "check in a flush": _flush_of(label="d", amount=-1),
    "not null": _insert_of(label=None, amount=1),
    "overflow": _insert_of(label="d", amount=2**40),
    "division": _texts("select 1/0"),
    "NUL": _insert_of(label="d\0", amount=1),
    "NUL in a flush": _flush_of(label="d\0", amount=1),
    "surrogate": _insert_of(label="d\ud800", amount=1),
    "surrogate in the text": _texts("select '\ud800'"),
    "unadaptable": _texts("select :value", value=object()),
    "syntax": _texts("selct 1"),
    "syntax behind a statement": _texts("select 1; selct 1"),
    "no table": _texts("select * from nowhere"),
    "time-out": _texts("set local statement_timeout = '50ms'", "select pg_sleep(1)"),
    "lock time-out": _texts("set local lock_timeout = '50ms'", "select * from held for update"),
    "lock refused": _texts("select * from held for update nowait"),
    "cancelled": _texts("select pg_cancel_backend(pg_backend_pid()), pg_sleep(0.05)"),
    "conflict": _texts("do $$ begin raise sqlstate '40001'; end $$"),
}


@step("fail")
def fail(hand: Hand, how: str) -> None:
    FAILURES[how](hand)


# Settings, locks, and other state of a connection

SETTINGS = {
    "local tenant": "select set_config('app.tenant', 't1', true)",
    "other local tenant": "select set_config('app.tenant', 't2', true)",
    "tenant": "select set_config('app.tenant', 't3', false)",
    "mode": "set app.note = 'm1'",
    "local mode": "set local app.note = 'm2'",
    "local path": "set local search_path = elsewhere, public",
    "path": "set search_path = elsewhere, public",
    "local role": "set local role programs_clerk",
    "role": "set role programs_clerk",
    "no role": "reset role",
    "local time-out": "set local statement_timeout = '19s'",
    "local time-out for locks": "set local lock_timeout = '41ms'",
    "local time-out for idleness": "set local idle_in_transaction_session_timeout = '9s'",
    "local zone": "set local timezone = 'Europe/Berlin'",
    "time-out": "set statement_timeout = '18s'",
    "local asynchronous": "set local synchronous_commit = off",
    "constraints immediate": "set constraints all immediate",
    "constraints deferred": "set constraints all deferred",
    "read only": "set transaction read only",
    "serializable": "set transaction isolation level serializable",
}

BEYOND_TRANSACTIONS = {"tenant", "mode", "path", "role", "no role", "time-out"}
BEYOND_TRANSACTIONS |= {"advisory for good", "for good", "for a transaction", "prepare", "listen"}
"""What stays on its connection: settings, locks, temporary tables."""


def stays_on(hand: Hand, what: str) -> bool:
    """Whether to leave out what stays on a connection: the pool would decide who finds it again."""
    return what in BEYOND_TRANSACTIONS and hand.run.program.uses_other_connections


@step("set")
def set_something(hand: Hand, what: str) -> Any:
    if stays_on(hand, what):
        return "left out"
    hand.ask(SETTINGS[what])


@step("read settings")
def read_settings(hand: Hand) -> Any:
    return hand.ask(
        "select current_user, current_setting('search_path'),"
        " nullif(current_setting('app.tenant', true), ''),"
        " nullif(current_setting('app.note', true), ''),"
        " current_setting('statement_timeout'), current_setting('lock_timeout'),"
        " current_setting('idle_in_transaction_session_timeout'), current_setting('timezone'),"
        " current_setting('synchronous_commit'), current_setting('transaction_isolation'),"
        " current_setting('transaction_read_only')"
    )


@step("translate the schema")
def translate_the_schema(hand: Hand) -> None:
    hand.session.connection(execution_options={"schema_translate_map": {None: "elsewhere"}})


@step("ask for serializable")
def ask_for_serializable(hand: Hand) -> None:
    hand.session.connection(execution_options={"isolation_level": "SERIALIZABLE"})


LOCKS = {
    "advisory": "select pg_advisory_xact_lock(7)",
    "advisory at once": "select pg_try_advisory_xact_lock(7)",
    "advisory for good": "select pg_advisory_lock(8)",
    "row": "select label from tally for update",
    "row at once": "select label from tally for update nowait",
    "table": "lock table tally in share row exclusive mode",
}


@step("lock")
def lock(hand: Hand, what: str) -> Any:
    if stays_on(hand, what):
        return "left out"
    return [
        [value if isinstance(value, bool) else "" for value in row] for row in hand.ask(LOCKS[what])
    ]


@step("read locks")
def read_locks(hand: Hand) -> Any:
    """Not after a commit: what was locked by then stays so until the operation ends."""
    if hand.run.committed:
        return "not observed"
    mine = "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"
    return hand.ask(mine)


TEMPORARY = {"for good": "preserve rows", "for a transaction": "delete rows"}
"""Not ON COMMIT DROP: inside an operation such a table lives until its end."""


@step("make a temporary table")
def make_a_temporary_table(hand: Hand, how: str) -> Any:
    if stays_on(hand, how):
        return "left out"
    hand.ask(f"create temporary table scratch (label text) on commit {TEMPORARY[how]}")


@step("fill the temporary table")
def fill_the_temporary_table(hand: Hand) -> None:
    hand.ask("insert into scratch values ('s')")


@step("read the temporary table")
def read_the_temporary_table(hand: Hand) -> Any:
    return hand.ask("select count(*) from scratch")


@step("prepare")
def prepare(hand: Hand) -> Any:
    if stays_on(hand, "prepare"):
        return "left out"
    hand.ask("prepare ready as select 1")


@step("listen")
def listen(hand: Hand) -> Any:
    if stays_on(hand, "listen"):
        return "left out"
    hand.ask("listen news")


# Other sessions and connections


@step("in a helper's context")
def in_a_context(hand: Hand, *inner: Step) -> None:
    twin = hand.run.twin
    with twin.app.app_context():
        Hand(hand.run, twin.db.session).perform_all(inner)


@step("in a session of its own")
def in_a_session(hand: Hand, *inner: Step) -> None:
    with hand.run.twin.new_session() as session:
        Hand(hand.run, session).perform_all(inner)


@step("by a second session")
def by_a_second_session(hand: Hand, *inner: Step) -> None:
    """The same one for the whole view: it is closed where the view ends."""
    run = hand.run
    if run.second is None:
        run.second = Hand(run, run.twin.new_session())
    run.second.perform_all(inner)


@step("write an audit by engine")
def write_an_audit(hand: Hand, label: str) -> None:
    with hand.run.twin.db.engine.begin() as connection:
        connection.execute(sa.text("insert into audit values (:label)"), {"label": label})
    hand.run.audits.append(label)


@step("count up by engine")
def count_up_by_engine(hand: Hand) -> Any:
    """Not after a commit: what was locked by then stays so until the operation ends."""
    if hand.run.committed:
        return "left out"
    with hand.run.twin.db.engine.begin() as connection:
        connection.execute(sa.text("update tally set amount = amount + 1"))
    hand.run.counted += 1


OTHER_CONNECTIONS = {
    "in a helper's context",
    "in a session of its own",
    "by a second session",
    "write an audit by engine",
    "count up by engine",
    "audit by a session of the engine",
}


@contextmanager
def ended_second_session(run: Run) -> Any:
    """Close what the view has opened beside its session."""
    try:
        yield
    finally:
        if run.second is not None:
            run.second.session.close()
