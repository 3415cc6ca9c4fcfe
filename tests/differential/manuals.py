"""Steps from the manuals of SQLAlchemy, PostgreSQL, psycopg2 and psycopg, as these show them."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from contextlib import closing
from typing import Any

import sqlalchemy as sa
from flask import g
from psycopg2 import extras
from sqlalchemy import orm

from tests.differential.steps import TABLE as COMMON
from tests.differential.steps import Hand, Row, rows_of

TEXTS: dict[str, dict[str, str]] = {
    "effects": {
        "function": "select note_it('plain')",
        "quoted function": """select "Weird Name"('quoted')""",
        "function in a schema": "select audit_log.record('schema')",
        "an overloaded name": "select lower('over', 1)",
        "function in WHERE": "select name from author where note_it('where') = 0",
        "function that fails": "select note_and_fail('fails')",
        "function that locks a row": "select lock_author('Austen')",
        "view": "select number from busy",
        "operator": "select 1 @+@ 2",
        "call": "call work('called')",
        "call that commits": "call work_and_commit('called')",
        "block": "do $$ begin perform note_it('block'); end $$",
        "block that catches": "do $$ begin perform note_and_fail('x'); exception when others then"
        " perform note_it('handled'); end $$",
        "block that commits": "do $$ begin perform note_it('block'); commit; end $$",
        "trigger that writes": "insert into author (name) values ('noted')",
        "trigger that tells": "insert into author (name) values ('told')",
        "trigger that refuses": "insert into author (name) values ('forbidden')",
    },
    "writes": {
        "insert from select": "insert into journal (text) select name from author order by id",
        "upsert": "insert into author (name) values ('Austen'), ('Eliot') on conflict do nothing",
        "merge": "merge into author using (values ('Austen'), ('Eliot')) as n (name)"
        " on n.name = author.name when matched then update set born = 3"
        " when not matched then insert (name) values (n.name)",
        "truncate": "truncate seat",
        "create": 'create table made."New Table" (id serial primary key, x int)',
        "drop": 'drop table made."New Table"',
        "concurrently": "create index concurrently on seat (number)",
        "vacuum": "vacuum journal",
        "two statements": "insert into journal (text) values ('one');"
        " insert into journal (text) values ('two')",
        "read, then write": "select 1; insert into journal (text) values ('behind')",
        "write, then fail": "insert into journal (text) values ('lost'); select 1/0",
    },
    "constraints": {
        "seats swapped": "update seat set number = 3 - number",
        "a seat taken": "insert into seat values (1)",
        "one seat deferred": "set constraints one_seat deferred",
        "a parent missing": "insert into node (name, parent_id) values ('x', 888)",
        "the parent": "insert into node (id, name) values (888, 'parent')",
    },
    "savepoints": {
        "savepoint": "savepoint s1",
        "savepoint in capitals": "SAVEPOINT S1",
        "savepoint quoted": 'savepoint "My Point"',
        "to savepoint": "rollback to savepoint s1",
        "to savepoint quoted": 'rollback to "My Point"',
        "release": "release savepoint s1",
        "savepoint and more": "savepoint s1; insert into journal (text) values ('in s1')",
        "back and more": "rollback to s1; insert into journal (text) values ('behind s1')",
    },
    "server": {
        "notify": "notify news, 'text'",
        "large object": "select lo_from_bytea(4711, 'abc')",
    },
    "reads": {
        "authors": "select name, born from author order by name",
        "journal": "select text from journal order by id",
    },
    "failing": {
        "no column": "select nothing from author",
        "duplicate": "insert into author (name) values ('Austen')",
    },
}
"""By family and name, what is sent as text."""

ALL_TEXTS = {name: text for texts in TEXTS.values() for name, text in texts.items()}


def send(hand: Hand, door: str, name: str) -> Any:
    """By the session, by SQLAlchemy's connection, or by a cursor of the driver's."""
    text = ALL_TEXTS[name]
    if door == "cursor" and text.startswith("set "):  # what that sets, nobody hears
        return "left out"
    if door == "text":
        return rows_of(hand.session.execute(sa.text(text.replace(":", r"\:"))))
    if door == "driver SQL":
        return rows_of(hand.connection.exec_driver_sql(text))
    with cursor_of(hand) as cursor:
        cursor.execute(text)
        return [list(map(str, row)) for row in cursor] if cursor.description else cursor.rowcount


def cursor_of(hand: Hand, *args: Any, **kwargs: Any) -> Any:
    """A cursor of the driver's on the session's connection."""
    return hand.connection.connection.cursor(*args, **kwargs)


# The ORM


def kept(hand: Hand) -> Any:
    """The book that was kept before, or else one that is now."""
    emma = sa.select(hand.run.twin.models.Book).filter_by(title="Emma")
    hand.book = hand.book or hand.session.scalars(emma).one()
    return hand.book


def write_a_book(hand: Hand, title: str) -> None:
    hand.session.add(hand.run.twin.models.Book(title=title, author_id=1))


def read_kept(hand: Hand) -> Any:
    """Expired by a commit, it is read once more."""
    found = kept(hand)
    return [found.title, str(found.price), found.touched]


def change_kept(hand: Hand, what: str) -> None:
    found = kept(hand)
    if what == "expression":
        found.price = type(found).price + 1
    elif what == "title":
        found.title = "Persuasion"
    else:
        found.price = -1 if what == "negative" else 9


def state_of_kept(hand: Hand, how: str) -> Any:
    found, session = kept(hand), hand.session
    if how == "merge":
        hand.book = session.merge(found)
    elif how == "for update":
        session.refresh(found, with_for_update={"nowait": True})
    elif how == "transient":
        orm.make_transient(found)
        found.id, found.title, found.version = None, "transient", None
        session.add(found)
    else:
        getattr(session, how)(found)
    seen = sa.inspect(found)
    names = ("transient", "pending", "persistent", "deleted", "detached")
    return [name for name in names if getattr(seen, name)]


def a_session_on_the_connection(hand: Hand, mode: str) -> None:
    """A session that joins the view's own connection, as the manual does it for tests."""
    with orm.Session(hand.connection, join_transaction_mode=mode) as session:
        session.add(hand.run.twin.models.Journal(text=f"joined {mode}"))
        session.commit()


# SQLAlchemy's connection, and the driver's own


def commit_the_connection(hand: Hand) -> None:
    hand.run.committed = True
    hand.connection.commit()


BY_CONNECTION: dict[str, Callable[[Hand], Any]] = {
    "begin": lambda hand: hand.connection.begin() and None,
    "commit": commit_the_connection,
    "rollback": lambda hand: hand.connection.rollback(),
}


def named(hand: Hand, sql: str) -> str:
    with cursor_of(hand, "Named One") as cursor:
        cursor.itersize = 1
        cursor.execute(sql)
        return str([cursor.fetchone(), *cursor])


def large_object(hand: Hand) -> None:
    found = hand.driver.lobject(0, "wb", 4712)
    found.write(b"large")
    found.close()


def on_a_cursor(function: Callable[[Any], Any]) -> Callable[[Hand], Any]:
    """What a cursor of the driver's does; what it fetched is seen."""

    def use(hand: Hand) -> Any:
        with cursor_of(hand) as cursor:
            function(cursor)
            return str(cursor.fetchall()) if cursor.description else cursor.rowcount

    return use


def copied(sql: str, given: str = "") -> Callable[[Hand], Any]:
    def copy(hand: Hand) -> Any:
        found = io.StringIO(given)
        with cursor_of(hand) as cursor:
            cursor.copy_expert(sql, found)
        return found.getvalue()

    return copy


def copy_by_psycopg(hand: Hand, *, ends: bool = True) -> None:
    with cursor_of(hand) as cursor, cursor.copy("copy journal (text) from stdin") as copy:
        copy.write_row(("row",))
        if not ends:
            raise ValueError("in the middle")


def copy_out_by_psycopg(hand: Hand) -> Any:
    with cursor_of(hand) as cursor, cursor.copy("copy (select note_it('c')) to stdout") as copy:
        return [list(map(str, row)) for row in copy.rows()]


def stream_by_psycopg(hand: Hand, *, early: bool) -> Any:
    with cursor_of(hand) as cursor, closing(cursor.stream("select generate_series(1, 9)")) as rows:
        return str(next(rows) if early else list(rows))


def pipeline(hand: Hand, *statements: str) -> Any:
    with hand.driver.pipeline(), hand.driver.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def transaction(hand: Hand, end: str) -> None:
    """Inside a transaction it is a savepoint."""
    hand.ask("select 1")
    with hand.driver.transaction() as own:
        hand.driver.execute(INSERT)
        if end == "fails":
            hand.driver.execute("select 1/0")
        if end == "rolled back":
            raise importlib.import_module("psycopg").Rollback(own)


INSERT, VALUES = "insert into journal (text) values ('x')", "insert into journal (text) values (%s)"
NAMES, ROWS = "select name from author order by name", [("one",), ("two",)]

_COMMON: dict[str, Callable[[Hand], Any]] = {
    "many": on_a_cursor(lambda cursor: cursor.executemany(VALUES, ROWS)),
    "named": lambda hand: named(hand, NAMES),
    "named write": lambda hand: named(hand, "select note_it('named') from author"),
    "closed cursor": on_a_cursor(lambda cursor: cursor.close() or cursor.execute(INSERT)),
    "a NUL": on_a_cursor(lambda cursor: cursor.execute(VALUES, ("a\0b",))),
}

OF_DRIVER: dict[str, dict[str, Callable[[Hand], Any]]] = {
    "psycopg2": {
        **_COMMON,
        "execute_batch": on_a_cursor(
            lambda cursor: extras.execute_batch(cursor, VALUES, ROWS, page_size=1)
        ),
        "callproc": on_a_cursor(lambda cursor: cursor.callproc("note_it", ("proc",))),
        "copy in": copied("copy journal (text) from stdin", "one\ntwo\n"),
        "copy that fails": copied("copy author (name) from stdin", "first\nAusten\n"),
        "copy out": copied("copy (select note_it('copied')) to stdout"),
        "large object": large_object,
    },
    "psycopg": {
        **_COMMON,
        "copy in": copy_by_psycopg,
        "copy that the view ends": lambda hand: copy_by_psycopg(hand, ends=False),
        "copy out": copy_out_by_psycopg,
        "stream": lambda hand: stream_by_psycopg(hand, early=False),
        "stream left early": lambda hand: stream_by_psycopg(hand, early=True),
        "pipeline": lambda hand: pipeline(hand, INSERT, NAMES),
        "pipeline that fails": lambda hand: pipeline(hand, INSERT, "select 1/0"),
        "transaction": lambda hand: transaction(hand, "kept"),
        "transaction that fails": lambda hand: transaction(hand, "fails"),
        "transaction rolled back": lambda hand: transaction(hand, "rolled back"),
        "prepared": on_a_cursor(lambda cursor: cursor.execute(VALUES, ("p",), prepare=True)),
    },
}
"""By driver and name, what only the driver's own connection has."""

TABLE = [
    *(
        Row(family, door, tuple(texts), lambda h, name, door=door: send(h, door, name))
        for family, texts in TEXTS.items()
        for door in ("text", "driver SQL", "cursor")
    ),
    Row("states", "write a book", ("new", "evented"), write_a_book),
    Row("states", "keep a book", (), lambda h: kept(h).title),
    Row("states", "read the kept book", (), read_kept),
    Row(
        *("states", "change the kept book"),
        ("price", "expression", "negative", "title"),
        change_kept,
    ),
    Row(
        *("states", "state of the kept book"),
        ("expire", "refresh", "for update", "expunge", "add", "delete", "merge", "transient"),
        state_of_kept,
    ),
    Row("states", "what listeners heard", (), lambda h: g.pop("heard", [])),
    Row(
        *("states", "a session on the connection"),
        ("create_savepoint", "conditional_savepoint", "rollback_only"),
        a_session_on_the_connection,
    ),
    Row("by connection", "by a connection", tuple(BY_CONNECTION), lambda h, x: BY_CONNECTION[x](h)),
]


def table_of(driver: str) -> list[Row]:
    """All steps there are, with what this driver has of its own."""
    ways = OF_DRIVER[driver]
    return [*COMMON, *TABLE, Row("driver", "driver", tuple(ways), lambda h, name: ways[name](h))]
