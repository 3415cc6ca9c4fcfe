"""Programs and their steps: what a view can do with a session, each a row of ``TABLE``, here or beside.

A row says to which family a step belongs, how programs call it, which words it may be given, and what
it does. It runs in a :class:`Run`, one request in one application, by a :class:`Hand`, which is whose
session it works with. What it saw is noted, or its error's class and SQLSTATE: both applications must
have seen the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
import psycopg2
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from flask_idempotency.core.errors import sqlstate
from tests.sessions import proxy_of

if TYPE_CHECKING:
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
        return tuple(each for each in self.arguments if isinstance(each, Step))

    @property
    def kinds(self) -> set[str]:
        """Its own, and those of the steps inside it."""
        return {self.kind}.union(*(each.kinds for each in self.inner))


def do(kind: str, *arguments: Any) -> Step:
    """A step, as programs write it."""
    return Step(kind, arguments)


Steps = tuple[Step, ...]

COMMIT, ROLLBACK, FLUSH, READ = do("commit"), do("rollback"), do("flush"), do("read")
SHOW = do("read settings")


def texts(*names: str) -> Steps:
    return tuple(do("text", name) for name in names)


@dataclass(frozen=True)
class Program:
    """What an application does in one request: a program is short.

    ``above`` runs in a decorator above the protection, after the view; ``after`` in an
    ``after_request`` function; ``begins_above`` puts ``with db.session.begin():`` around the view.
    ``handler`` stands for an error handler that answers 409: it is "plain" or "rolls back".
    ``each`` is SQL that a listener sends when a transaction begins, and ``vetoes`` the event in which
    a listener raises.
    """

    view: Steps = ()
    before: Steps = ()
    above: Steps = ()
    after: Steps = ()
    answer: str = "created"
    catches: str = "database errors"
    handler: str = ""
    isolation: str = ""
    begins_above: bool = False
    each: str = ""
    vetoes: str = ""

    def __repr__(self) -> str:
        named = [
            f"    {each.name}={getattr(self, each.name)!r},"
            for each in fields(self)
            if getattr(self, each.name) != each.default
        ]
        return "\n".join(["Program(", *named, ")"])

    @property
    def surroundings(self) -> bool:
        """Whether it does something outside of the view."""
        return bool(self.before or self.above or self.after or self.begins_above)

    @property
    def kinds(self) -> set[str]:
        """The kinds of all its steps."""
        parts = self.before + self.view + self.above + self.after
        return set().union(*(step.kinds for step in parts))

    @property
    def uses_other_connections(self) -> bool:
        return bool(self.kinds & OTHER_CONNECTIONS)


class Row(NamedTuple):
    """A kind of step. Without a family it is only written by hand; without words it is given none."""

    family: str
    kind: str
    words: tuple[Any, ...]
    do: Callable[..., Any]


class Oops(Exception):
    """What a program raises: no error of a database."""


class Veto(Exception):
    """What a listener raises."""


class Handled(Exception):
    """An error for which the application has a handler."""


DATABASE_ERRORS = (SQLAlchemyError, psycopg2.Error, psycopg.Error, ValueError, TypeError)
"""What a careful view catches. A value that cannot be bound may be any of the last two."""

CATCHES = {"nothing": (), "database errors": DATABASE_ERRORS, "everything": (Exception,)}

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
    has_failed: bool = False
    baseline: list[Any] | None = None
    """The rows when the protected part began."""
    audits: list[str] = field(default_factory=list)
    counted: int = 0
    """How often ``count up by engine`` came through."""
    second: Hand | None = None
    mistakes: int = 0
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
        return [[kind, what] for where, kind, what in self.seen if where == part]


@dataclass
class Hand:
    """Whose session a step works with, and what it has kept from earlier steps."""

    run: Run
    session: Any
    book: Any = None
    stream: Any = None
    savepoints: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.item = self.run.twin.models.Item
        self.table = self.item.__table__

    @property
    def itself(self) -> Any:
        """The session that a scoped one stands for."""
        return getattr(self.session, "registry", lambda: self.session)()

    @property
    def connection(self) -> sa.Connection:
        return self.session.connection()

    @property
    def driver(self) -> Any:
        return self.connection.connection.driver_connection

    def perform(self, step: Step, *, catching: bool = True) -> None:
        """Do a step and note what it saw; its error too, unless the program lets errors out."""
        run = self.run
        run.executed[step.kind] += 1
        try:
            seen = run.twin.steps[step.kind](self, *step.arguments)
        except Oops:
            run.note(step.kind, "Oops")
            raise
        except Exception as error:
            run.note(step.kind, name_of(error))
            run.mistakes += is_mistake(error)
            run.has_failed = True
            if not catching or not isinstance(error, CATCHES[run.program.catches]):
                raise
        else:
            if seen is not None:
                run.note(step.kind, seen)

    def perform_all(self, steps: tuple[Step, ...], *, catching: bool = True) -> None:
        for step in steps:
            self.perform(step, catching=catching)

    def send(self, statement: Any, *values: Any) -> None:
        """Run a statement in the session, whatever it gives."""
        self.session.execute(statement, *values)

    def ask(self, sql: str, **values: Any) -> Any:
        """Run text in the session; the rows, as JSON has them."""
        return rows_of(self.session.execute(sa.text(sql), values))

    def find(self, label: str) -> Any:
        return self.session.scalars(sa.select(self.item).filter_by(label=label)).one_or_none()

    def stays(self, what: str) -> bool:
        """Whether to leave out what stays on a connection: the pool decides who finds it again."""
        return what in BEYOND_TRANSACTIONS and self.run.program.uses_other_connections

    def commit(self) -> None:
        self.stream = None  # inside an operation a commit does not close it
        self.session.commit()
        self.run.committed = True


def rows_of(result: Any) -> Any:
    if not getattr(result, "returns_rows", True):
        return None
    return [[x if isinstance(x, (int, type(None))) else str(x) for x in row] for row in result]


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


# Writes and reads


def _many(label: str) -> list[dict[str, Any]]:
    return [{"label": f"{label}{number}", "amount": number} for number in range(3)]


def modify(hand: Hand, label: str) -> Any:
    found = hand.find(label)
    if found is None:
        return "gone"
    found.amount += 1
    return None


def delete(hand: Hand, label: str) -> Any:
    found = hand.find(label)
    return "gone" if found is None else hand.session.delete(found)


def update(hand: Hand, label: str, kind: Any, more: int) -> int:
    item = hand.table.c if kind == "core" else hand.item
    changed = sa.update(hand.table if kind == "core" else hand.item).where(item.label == label)
    return hand.session.execute(changed.values(amount=item.amount + more)).rowcount


def read(hand: Hand) -> Any:
    item = hand.item
    asked = sa.select(item.label, item.amount, item.owner).where(item.label > "")
    return rows_of(hand.session.execute(asked.order_by(item.label)))


def read_the_view(hand: Hand) -> Any:
    """As a query that SQLAlchemy compiles."""
    return rows_of(hand.session.execute(sa.select(sa.table("busy", sa.column("number")))))


def read_tally(hand: Hand) -> Any:
    """Not after another connection has counted, where the snapshot decides what is seen."""
    if hand.run.program.isolation and hand.run.counted:
        return "not observed"
    return hand.ask("select amount from tally")


def read_the_session(hand: Hand) -> Any:
    """What it says of itself."""
    session = hand.itself
    changes = [len(session.new), len(session.dirty), len(session.deleted)]
    return [session.is_active, session.in_transaction(), session.in_nested_transaction(), changes]


def open_a_stream(hand: Hand) -> Any:
    options = {"stream_results": True, "max_row_buffer": 1}
    numbers = sa.text("select generate_series(1, 5)")
    hand.stream = hand.session.execute(numbers, execution_options=options)
    return hand.stream.fetchone()[0]


# The session's own life


def unit_of_work(hand: Hand, *inner: Step) -> None:
    with hand.session.begin():
        hand.perform_all(inner, catching=False)
    hand.run.committed = True


class Undone(Exception):
    """What undoes a block and nothing else."""


def nested(hand: Hand, *inner: Step, catching: bool = True, end: str = "") -> None:
    """A block, or what is ended by hand; "undone" by an error of its own."""
    if end in ("commit", "rollback"):
        savepoint = hand.session.begin_nested()
        hand.perform_all(inner)
        getattr(savepoint, end)()
        return
    with suppress(Undone), hand.session.begin_nested():
        hand.perform_all(inner, catching=catching)
        if end == "undone":
            raise Undone


def in_a_savepoint_of_the_connection(hand: Hand, *inner: Step) -> None:
    with hand.connection.begin_nested():
        hand.perform_all(inner)


def no_autoflush(hand: Hand, *inner: Step) -> None:
    with hand.session.no_autoflush:
        hand.perform_all(inner)


def end_the_savepoint(end: str) -> Callable[[Hand], Any]:
    return lambda hand: getattr(hand.savepoints.pop(), end)() if hand.savepoints else "none"


# Statements that fail


def fail_by_itself(_hand: Hand) -> None:
    raise Oops


def flush_of(**values: Any) -> Callable[[Hand], Any]:
    return lambda hand: hand.session.add(hand.item(**values)) or hand.session.flush()


def insert_of(**values: Any) -> Callable[[Hand], Any]:
    return lambda hand: hand.send(sa.insert(hand.table).values(**values))


def statements_of(*statements: str, **values: Any) -> Callable[[Hand], Any]:
    return lambda hand: [hand.ask(statement, **values) for statement in statements] and None


FAILURES: dict[str, Callable[[Hand], Any]] = {
    "unique": insert_of(label="old", amount=1),
    "unique in a flush": flush_of(label="old", amount=1),
    "check in a flush": flush_of(label="d", amount=-1),
    "division": statements_of("select 1/0"),
    "a query": lambda hand: hand.session.execute(sa.select(sa.literal(1) / sa.literal(0))),
    "NUL": insert_of(label="d\0", amount=1),
    "NUL in a flush": flush_of(label="d\0", amount=1),
    "surrogate": insert_of(label="d\ud800", amount=1),
    "unadaptable": statements_of("select :value", value=object()),
    "a value is missing": statements_of("select :one, :two", one=1),
    "syntax": statements_of("selct 1"),
    "syntax behind a statement": statements_of("select 1; selct 1"),
    "no table": statements_of("select * from nowhere"),
    "time-out": statements_of("set local statement_timeout = '50ms'", "select pg_sleep(1)"),
    "lock time-out": statements_of("set local lock_timeout = '50ms'", "select * from held for update"),
    "lock refused": statements_of("select * from held for update nowait"),
    "cancelled": statements_of("select pg_cancel_backend(pg_backend_pid()), pg_sleep(0.05)"),
    "conflict": statements_of("do $$ begin raise sqlstate '40001'; end $$"),
}


# Settings, locks, and other state of a connection

SETTINGS = {
    "local tenant": "select set_config('app.tenant', 't1', true)",
    "other local tenant": "select set_config('app.tenant', 't2', true)",
    "tenant": "select set_config('app.tenant', 't3', false)",
    "mode": "set app.note = 'm1'",
    "local mode": "set local app.note = 'm2'",
    "local path": "set local search_path = elsewhere, public",
    "path": "set search_path = elsewhere, public",
    "empty path": "set local search_path = ''",
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
    "local, quoted": """set local "app.tenant" = 't4'""",
    "local, nested": "select upper(set_config('app.tenant', 't5', true))",
    "local, two": "select set_config('app.tenant', 't6', true), set_config('app.note', 'n', true)",
    "local, default": "set local lock_timeout to default",
}

IMMEDIATE = "constraints immediate"
"""Not by chance: by design (``DEFERRED``) it outlasts a commit of nothing."""

BEYOND_TRANSACTIONS = {
    *("tenant", "mode", "path", "role", "no role", "time-out", "for a connection"),
    *("advisory for good", "for good", "for a transaction", "with hold"),
}
"""What stays on its connection: settings, locks, temporary tables, cursors."""

SHOWN = ("search_path", "app.tenant", "app.note", "statement_timeout", "lock_timeout", "timezone")
SHOWN += ("idle_in_transaction_session_timeout", "synchronous_commit", "role")
"""Settings that programs make. The role is last: another one may not be allowed to set the rest."""

_SETTINGS = ", ".join(f"nullif(current_setting('{name}', true), '')" for name in SHOWN)
SETTINGS_NOW = f"select {_SETTINGS}, current_user, current_setting('transaction_isolation'),"
SETTINGS_NOW += " current_setting('transaction_read_only')"

LOCKS = {
    "advisory": "select pg_advisory_xact_lock(7)",
    "advisory at once": "select pg_try_advisory_xact_lock(7)",
    "advisory for good": "select pg_advisory_lock(8)",
    "row": "select label from tally for update",
    "row at once": "select label from tally for update nowait",
    "table": "lock table tally in share row exclusive mode",
    "authors": "select name from author order by name for key share skip locked",
}

TEMPORARY = {
    "for good": "create temporary table scratch (label text) on commit preserve rows",
    "for a transaction": "create temporary table scratch (label text) on commit delete rows",
}
"""Not ON COMMIT DROP: inside an operation such a table lives until its end."""


def asks(texts: dict[str, str]) -> Callable[[Hand, str], Any]:
    """One of some texts, unless what it leaves on a connection could be found by another session."""
    return lambda hand, what: "left out" if hand.stays(what) else hand.ask(texts[what])


def choose(hand: Hand, what: str) -> None:
    options: dict[str, Any] = {
        "schema": {"schema_translate_map": {None: "elsewhere"}},
        "serializable": {"isolation_level": "SERIALIZABLE"},
        "streams": {"stream_results": True},
    }
    hand.session.connection(execution_options=options[what])


def read_locks(hand: Hand) -> Any:
    """Not after a commit: what was locked by then stays so until the operation ends."""
    if hand.run.committed:
        return "not observed"
    mine = "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"
    return hand.ask(mine)


# Other sessions and connections


def in_a_context(hand: Hand, *inner: Step) -> None:
    twin = hand.run.twin
    with twin.app.app_context():
        Hand(hand.run, twin.db.session).perform_all(inner)


def in_a_session(hand: Hand, *inner: Step) -> None:
    with hand.run.twin.new_session() as session:
        Hand(hand.run, session).perform_all(inner)


def by_a_second_session(hand: Hand, *inner: Step) -> None:
    """The same one for the whole view: it is closed where the view ends."""
    run = hand.run
    if run.second is None:
        run.second = Hand(run, run.twin.new_session())
    run.second.perform_all(inner)


COUNT_UP = "update tally set amount = amount + 1"


def by_engine(hand: Hand, sql: str) -> None:
    with hand.run.twin.engine.begin() as connection:
        connection.execute(sa.text(sql))


def write_an_audit(hand: Hand, label: str) -> None:
    by_engine(hand, f"insert into audit values ('{label}')")
    hand.run.audits.append(label)


def count_up_by_engine(hand: Hand) -> Any:
    """Not after a commit, or what has failed: what was locked by then may stay so for longer."""
    if hand.run.committed or hand.run.has_failed:
        return "left out"
    by_engine(hand, COUNT_UP)
    hand.run.counted += 1
    return None


OTHER_CONNECTIONS = {
    *("in a helper's context", "in a session of its own", "by a second session"),
    *("write an audit by engine", "count up by engine"),
}


# How each is called, and with which words.

INSERT = sa.text("insert into item (label, amount) values (:label, 3)")
NEW, OLD = ("a", "b", "c"), ("old", "older")

TABLE = [
    Row("orm", "add", NEW, lambda h, label: h.session.add(h.item(label=label, amount=1))),
    Row("orm", "add several", NEW, lambda h, x: h.session.add_all(h.item(**y) for y in _many(x))),
    Row("orm", "modify", OLD, modify),
    Row("orm", "delete", OLD, delete),
    Row("orm", "update by ORM", OLD, lambda h, label: update(h, label, "orm", 100)),
    Row("core", "insert", NEW, lambda h, x: h.send(sa.insert(h.table).values(label=x, amount=2))),
    Row("core", "insert many", ("b",), lambda h, label: h.send(sa.insert(h.item), _many(label))),
    Row("core", "update", (*OLD, "a"), lambda h, label: update(h, label, "core", 10)),
    Row(
        *("core", "delete by core", (*OLD, "a")),
        lambda h, x: h.session.execute(sa.delete(h.table).where(h.table.c.label == x)).rowcount,
    ),
    Row("core", "insert as text", NEW, lambda h, x: h.send(INSERT, {"label": x})),
    Row(
        *("core", "insert by connection", NEW),
        lambda h, x: h.connection.execute(INSERT, {"label": x}).rowcount,
    ),
    Row("core", "count up", (), lambda h: h.ask(COUNT_UP)),
    Row("core", "read tally", (), read_tally),
    Row("always", "read", (), read),
    Row("always", "read the session", (), read_the_session),
    Row("loaded", "expire all", (), lambda h: h.session.expire_all()),
    Row("loaded", "expunge all", (), lambda h: h.session.expunge_all()),
    Row("loaded", "close", (), lambda h: h.session.close()),
    Row("loaded", "reset", (), lambda h: h.session.reset()),
    Row("loaded", "remove", (), lambda h: getattr(h.session, "remove", h.session.close)()),
    Row("loaded", "begin twice", (), lambda h: h.session.begin() and None),
    Row("always", "flush", (), lambda h: h.session.flush()),
    Row("always", "commit", (), Hand.commit),
    Row("always", "rollback", (), lambda h: h.session.rollback() or "done"),
    Row("savepoints", "savepoint", (), lambda h: h.savepoints.append(h.session.begin_nested())),
    Row("savepoints", "release the savepoint", (), end_the_savepoint("commit")),
    Row("savepoints", "undo the savepoint", (), end_the_savepoint("rollback")),
    Row("failures", "fail", tuple(FAILURES), lambda h, how: FAILURES[how](h)),
    Row("settings", "set", tuple(each for each in SETTINGS if each != IMMEDIATE), asks(SETTINGS)),
    Row("settings", "read settings", (), lambda h: h.ask(SETTINGS_NOW)),
    Row("connection", "choose", ("schema", "serializable"), choose),
    Row("locks", "lock", tuple(LOCKS), asks(LOCKS)),
    Row("locks", "read locks", (), read_locks),
    Row("connection", "make a temporary table", tuple(TEMPORARY), asks(TEMPORARY)),
    Row(
        "connection",
        "fill the temporary table",
        (),
        lambda h: h.ask("insert into scratch values ('s')"),
    ),
    Row("connection", "read the temporary table", (), lambda h: h.ask("select count(*) from scratch")),
    Row("connection", "open a stream", (), open_a_stream),
    Row("connection", "read the stream", (), lambda h: h.stream and h.stream.fetchone()[0]),
    Row(
        *("connection", "for a connection"),
        (
            *("listen news", "unlisten *", "discard temp", "reset all", "deallocate all"),
            *("prepare ready as select note_it('prepared')", "execute ready"),
            "declare held_one cursor with hold for select name from author order by name",
            *("fetch held_one", "close held_one"),
        ),
        lambda h, sql: "left out" if h.stays("for a connection") else h.ask(sql),
    ),
    Row("engine", "write an audit by engine", ("x",), write_an_audit),
    Row("engine", "count up by engine", (), count_up_by_engine),
    Row("", "raise", (), fail_by_itself),
    Row("", "ask", (), lambda h, sql: h.ask(sql)),
    Row("", "read the view", (), read_the_view),
    Row("blocks", "unit of work", (), unit_of_work),
    Row("blocks", "nested, kept", (), nested),
    Row("blocks", "nested, undone", (), partial(nested, end="undone")),
    Row("blocks", "nested, first error ends it", (), partial(nested, catching=False)),
    Row("blocks", "nested, then its own commit", (), partial(nested, end="commit")),
    Row("blocks", "nested, then its own rollback", (), partial(nested, end="rollback")),
    Row("blocks", "in a savepoint of the connection", (), in_a_savepoint_of_the_connection),
    Row("blocks", "no autoflush", (), no_autoflush),
    Row("helpers", "in a helper's context", (), in_a_context),
    Row("helpers", "in a session of its own", (), in_a_session),
    Row("helpers", "by a second session", (), by_a_second_session),
]
