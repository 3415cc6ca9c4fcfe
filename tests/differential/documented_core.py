"""Steps from the manuals of SQLAlchemy's Core, of PostgreSQL and of psycopg2 and psycopg.

Texts have their own table of names here, so that a program can be read; what only one of the drivers
has is in :data:`OF_DRIVER`.
"""

from __future__ import annotations

import datetime as dt
import decimal
import importlib
import io
import uuid
from collections.abc import Callable
from contextlib import closing
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert as upsert

from tests.differential.steps import Hand, stays_on, step

TEXTS: dict[str, str] = {
    # Functions with effects, wherever a statement can call one
    "function": "select note_it('plain')",
    "function above": "select note_it('above')",
    "function in capitals": "SELECT NOTE_IT('capitals')",
    "quoted function": """select "Weird Name"('quoted')""",
    "quoted and plain": """select "note_it"('both')""",
    "function in a schema": "select audit_log.record('schema')",
    "quoted function in a schema": """select * from "Odd Schema"."Do It"('both')""",
    "a namesake of the server's": """select "Odd Schema".upper('namesake')""",
    "an overloaded name": "select lower('over', 1)",
    "a quoted overloaded name": """select "lower"('over', 1)""",
    "function with a comment": "select note_it/* a comment */('comment')",
    "function on the next line": "select note_it -- it is called\n('line')",
    "function in WHERE": "select name from author where note_it('where') = 0",
    "function in FROM": "select * from note_it('from') as found",
    "function in ORDER": "select 1 order by note_it('order')",
    "function in VALUES": "values (note_it('values'))",
    "function in CASE": "select case when true then note_it('case') end",
    "function in a CTE": "with x as (select note_it('cte') as one) select one from x",
    "function in a lateral": "select n from author a, lateral note_it('of ' || left(a.name, 0)) n",
    "function in a subselect": "select (select note_it('sub'))",
    "function that catches": "select note_and_catch('inside')",
    "function that fails": "select note_and_fail('fails')",
    "function that locks a row": "select lock_author('Austen')",
    "function that locks": "select lock_all(7)",
    "function that tells": "select tell('function')",
    "view": "select number from busy",
    "view as TABLE": "table busy",
    "calm view": "select name from calm order by name",
    "operator": "select 1 @+@ 2",
    "attribute": "select a.note_author from author a",
    "domain": "select 'x'::checked",
    "cast": "select cast('x'::text as wrapped)",
    "aggregate": "select note_total(born) from author",
    "policy": "select label from guarded",
    "explained": "explain (analyze, costs off, timing off, summary off, buffers off)"
    " insert into journal (text) values ('explained')",
    "explained function": "explain (analyze, costs off, timing off, summary off, buffers off)"
    " select note_it('e')",
    "call": "call work('called')",
    "call that commits": "call work_and_commit('called')",
    "block": "do $$ begin perform note_it('block'); end $$",
    "block that catches": "do $$ begin perform note_and_fail('x'); exception when others then"
    " perform note_it('handled'); end $$",
    "block that commits": "do $$ begin perform note_it('block'); commit; end $$",
    "view with a trigger": "insert into writable values ('through')",
    "trigger that writes": "insert into author (name) values ('noted')",
    "trigger that tells": "insert into author (name) values ('told')",
    "trigger that refuses": "insert into author (name) values ('forbidden')",
    # Statements that write
    "CTE that moves": "with gone as (delete from letter returning text)"
    " insert into journal (text) select text from gone",
    "CTE that updates": "with done as (update author set born = born + 1 returning name)"
    " select name from done order by name",
    "insert from select": "insert into journal (text) select name from author order by id",
    "update from": "update book set price = born from author where author.id = author_id",
    "update nothing": "update book set price = 1 where false",
    "delete using": "delete from letter using author where author.id = author_id",
    "merge": "merge into author using (values ('Austen'), ('Eliot')) as n (name)"
    " on n.name = author.name when matched then update set born = 3"
    " when not matched then insert (name) values (n.name)",
    "select into": "select name into made.names from author",
    "create as": "create table made.copied as select name from author",
    "truncate": "truncate letter",
    "create": 'create table made."New Table" (id serial primary key, x int)',
    "create if not there": "create table if not exists made.twice (x int)",
    "drop": 'drop table made."New Table"',
    "alter": "alter table seat alter number set default 1",
    "index": "create index on seat (number)",
    "concurrently": "create index concurrently on seat (number)",
    "vacuum": "vacuum journal",
    "analyze": "analyze journal",
    "comment": "comment on table seat is 'it''s; a seat -- and $$ more'",
    "refresh": "refresh materialized view stale_names",
    "sequence": """select nextval('"Odd Counter"') > 0""",
    "sequence by name": """select setval('"Odd Counter"', 500)""",
    "two statements": "insert into journal (text) values ('one'); insert into journal (text) values"
    " ('two')",
    "read, then write": "select 1; insert into journal (text) values ('behind')",
    "write, then read": "insert into journal (text) values ('before'); select 1",
    "write, then fail": "insert into journal (text) values ('lost'); select 1/0",
    "only a comment": "/* nothing */ -- at all",
    "empty": ";",
    "odd names": """insert into "Odd Schema"."Weird Table" ("Key", "select") values ('; commit', 2)""",
    "line": """update "Order Line" set "Item's %%name" = '%%s %%(x)s $$' where "position" = 1""",
    "returning": "delete from tag where name = 'new' returning name",
    # Settings
    "set local": "set local app.tenant = 't1'",
    "set local quoted": """set local "app.tenant" = 't2'""",
    "set_config": "select set_config('app.tenant', 't3', true)",
    "set_config nested": "select upper(set_config('app.tenant', 't4', true))",
    "set_config by a table": "select set_config('app.tenant', name, true) from tag where name = 'old'",
    "set_config of several": "select set_config('app.tenant', 't5', true),"
    " set_config('app.note', 'n', true)",
    "show": "select nullif(current_setting('app.tenant', true), '')",
    "set path": """set local search_path = "Odd Schema", public""",
    "show path": "show search_path",
    "set zone": "set local time zone 'UTC'",
    "show zone": "show timezone",
    "set_config of the path": "select set_config('search_path', 'public', true)",
    "style": "set local datestyle = 'SQL, DMY'",
    "show style": "show datestyle",
    "strings": "set local standard_conforming_strings = off",
    "a backslash": r"select 'a\\b'",
    "clerk": "set local role programs_clerk",
    "who": "select current_user",
    # Locks
    "lock table": "lock table author in share mode",
    "lock two tables": "lock table author, book in row exclusive mode nowait",
    "lock quoted": """lock "Odd Schema"."Weird Table" in exclusive mode""",
    "advisory": "select pg_advisory_xact_lock(1, 2)",
    "try advisory": "select pg_try_advisory_xact_lock_shared(12)",
    "for update": "select name from author order by name for update",
    "for share": "select name from author order by name for key share skip locked",
    # Constraints
    "seats swapped": "update seat set number = 3 - number",
    "a seat taken": "insert into seat values (1)",
    "one seat deferred": "set constraints one_seat deferred",
    "one seat immediate": "set constraints one_seat immediate",
    "all deferred": "set constraints all deferred",
    "all immediate": "set constraints all immediate",
    "a parent missing": "insert into node (name, parent_id) values ('x', 888)",
    "the parent": "insert into node (id, name) values (888, 'parent')",
    "a place twice": "insert into place (spot) values (1)",
    # Savepoints as text
    "savepoint": "savepoint s1",
    "savepoint quoted": 'savepoint "My Point"',
    "savepoint in capitals": "SAVEPOINT S1",
    "to savepoint": "rollback to s1",
    "to savepoint quoted": 'rollback to savepoint "My Point"',
    "release": "release savepoint s1",
    "release quoted": 'release "My Point"',
    "savepoint and more": "savepoint s1; insert into journal (text) values ('in s1')",
    "back and more": "rollback to s1; insert into journal (text) values ('behind s1')",
    # Notifications, cursors, prepared statements
    "notify": "notify news, 'text'",
    "pg_notify": "select pg_notify('news', 'function')",
    "declare": "declare c1 cursor for select name from author order by name",
    "declare scroll": """declare "My Cursor" scroll cursor for select generate_series(1, 3)""",
    "fetch": "fetch c1",
    "fetch all": "fetch all c1",
    "fetch quoted": """fetch last "My Cursor" """,
    "close": "close c1",
    "close all": "close all",
    "declare a write": "declare c2 cursor for select note_it('cursor')",
    "fetch a write": "fetch c2",
    "move": "move forward all in c2",
    "deallocate": "deallocate all",
    "unlisten": "unlisten *",
    "large object": "select lo_from_bytea(4711, 'abc')",
    "unlink": "select lo_unlink(4711)",
    # Reads
    "read": "select name, born from author order by name",
    "journal": "select text from journal order by id",
    "percent": "select 'a%%' like 'a%%'",
    "numbers": "select 'NaN'::float8::text, 'infinity'::date::text, 12345678901234567890.5::text",
    "unicode": "select 'żółć – 🦀', U&'\\0041'",
    "literals": "select $tag$ commit; $tag$, E'\\' rollback', 'it''s; begin'",
    # What fails
    "syntax": "selec 1",
    "no column": "select nothing from author",
    "no function": "select no_such_function(1)",
    "division": "select 1/0",
    "bad date": "select 'no date'::date",
    "duplicate": "insert into author (name) values ('Austen')",
    "raise": "do $$ begin raise exception 'on purpose' using errcode = 'P0001'; end $$",
    "one row too many": "select (select name from author)",
    "cancel": "set local statement_timeout = '30ms'; select pg_sleep(2)",
}
"""By name, what is sent as text. ``%%`` is a percent sign; :func:`as_text` and the drivers need it."""

FOR_GOOD = {"strings"}
"""What stays on its connection."""

CURSORS = {"declare", "declare scroll", "fetch", "fetch all", "fetch quoted", "close", "close all"}
CURSORS |= {"declare a write", "fetch a write", "move"}
"""Inside an operation they stay open over a commit."""

FAILING = ("syntax", "no column", "no function", "division", "bad date", "duplicate", "raise", "cancel")
FAILING += ("one row too many", "function that fails", "trigger that refuses", "call that commits")
FAILING += ("write, then fail", "concurrently", "vacuum", "a seat taken")

_ONLY_ONCE = {"advisory", "try advisory"}


def _rows(result: Any) -> Any:
    if getattr(result, "returns_rows", True):
        return [list(map(str, row)) for row in result]
    return result.rowcount


def differs_by_design(hand: Hand, name: str) -> bool:
    """Whether to leave out what a commit ends, and nobody could end in its place."""
    return name in CURSORS and hand.run.committed


@step("text")
def as_text(hand: Hand, name: str) -> Any:
    """By the session, as ``text()``."""
    if differs_by_design(hand, name):
        return "left out"
    text = sa.text(TEXTS[name].replace("%%", "%").replace(":", r"\:"))
    return _rows(hand.session.execute(text))


@step("driver SQL")
def driver_sql(hand: Hand, name: str) -> Any:
    """By the connection, as the driver takes it; without parameters, percent signs are doubled."""
    if differs_by_design(hand, name):
        return "left out"
    return _rows(hand.session.connection().exec_driver_sql(TEXTS[name]))


def cursor_of(hand: Hand, *args: Any, **kwargs: Any) -> Any:
    """A cursor of the driver's on the session's connection."""
    return hand.session.connection().connection.cursor(*args, **kwargs)


@step("cursor")
def by_cursor(hand: Hand, name: str) -> Any:
    """By a cursor of the driver's: what that sets, nobody hears."""
    if differs_by_design(hand, name) or TEXTS[name].startswith(("set ", "select set_config")):
        return "left out"
    with cursor_of(hand) as cursor:
        cursor.execute(TEXTS[name].replace("%%", "%"))
        return [list(map(str, row)) for row in cursor] if cursor.description else cursor.rowcount


# Functions by Core


@step("function by Core")
def function_by_core(hand: Hand, how: str) -> Any:
    calls: dict[str, Any] = {
        "plain": sa.func.note_it("core"),
        "schema": sa.func.audit_log.record("core"),
        "quoted": getattr(sa.func, "Weird Name")("core"),
        "both": sa.func.__getattr__("Odd Schema").__getattr__("Do It")("core"),
        "operator": sa.literal(1).op("@+@")(2),
        "cast": sa.text("'x'::text::wrapped"),
        "locks": sa.func.lock_author("Austen"),
        "setting": sa.func.set_config("app.tenant", "core", True),
        "role": sa.func.set_config("role", "programs_clerk", sa.true()),
        "view": sa.table("busy", sa.column("number")).c.number,
        "scalar": sa.select(sa.func.note_it("scalar")).scalar_subquery(),
    }
    return _rows(hand.session.execute(sa.select(calls[how])))


# Values


@step("expanding")
def expanding(hand: Hand, values: tuple[Any, ...]) -> Any:
    """``IN`` with as many values as there are, also none."""
    text = sa.text("select name from author where born in :values order by 1")
    return _rows(
        hand.session.execute(
            text.bindparams(sa.bindparam("values", expanding=True)), {"values": list(values)}
        )
    )


@step("expanding by Core")
def expanding_by_core(hand: Hand, values: tuple[Any, ...]) -> Any:
    kind = hand.run.twin.models.Author
    inside = sa.select(kind.name).where(kind.born.in_(list(values))).order_by(kind.name)
    outside = sa.select(kind.name).where(kind.born.not_in(list(values))).order_by(kind.name)
    return [*map(str, hand.session.scalars(inside)), "and", *map(str, hand.session.scalars(outside))]


@step("literal")
def literal(hand: Hand, value: Any) -> Any:
    """Written into the text by SQLAlchemy."""
    kind = hand.run.twin.models.Author
    found = sa.bindparam("v", value, literal_execute=True)
    asked = sa.select(kind.name).where(kind.name != found).order_by(kind.name)
    return _rows(hand.session.execute(asked))


VALUES: dict[str, Any] = {
    "int": 5,
    "None": None,
    "text": "5",
    "quotes": "it's; commit; -- \\ %s :x $1",
    "unicode": "żółć 🦀",
    "empty": "",
    "big": 2**40,
    "huge": 10**30,
    "float": 1.5,
    "nan": float("nan"),
    "infinity": float("inf"),
    "decimal": decimal.Decimal("1.10"),
    "decimal nan": decimal.Decimal("NaN"),
    "bytes": b"\0\xff'\\",
    "bool": True,
    "date": dt.date(2026, 2, 28),
    "moment": dt.datetime(2026, 2, 28, 12, tzinfo=dt.timezone.utc),
    "span": dt.timedelta(days=1, microseconds=5),
    "uuid": uuid.UUID(int=5),
    "list": [1, 2],
    "empty list": [],
    "list of None": [None],
    "list of texts": ["a", 'b"', None],
    "nested list": [[1], [2]],
    "tuple": (1, 2),
    "empty tuple": (),
    "one tuple": (1816,),
    "tuple of None": (None,),
    "tuple of texts": ("a", "b"),
    "object": object(),
    "dict": {"a": 1},
    "NUL": "a\0b",
    "surrogate": "\ud800",
    "long": "x" * 20_000,
}
"""By name, what is bound."""

SLOTS = {
    "select": "select %s is null",
    "text": "select %s::text",
    "in": "select name from author where born in %s order by 1",
    "any": "select name from author where born = any(%s) order by 1",
    "any of texts": "select name from author where name = any(%s::text[]) order by 1",
    "interval": "select (date '2026-01-01' + interval '%s days')::text",
    "date": "select (date %s)::text",
    "limit": "select name from author order by 1 limit %s",
    "minus": "select 5 -%s",
    "name": "select count(*) from %s",
    "write": "insert into journal (text) values (%s)",
    "write a number": "update author set born = %s where name = 'Austen'",
    "write a measure": "insert into measure (name, payload) values ('p', %s)",
    "function": "select note_it(%s)",
    "cast": "select %s::int + 1",
    "json": "select %s::jsonb",
    "array": "select array_length(%s, 1)",
}
"""By name, statements with one place for a value, as psycopg2's manual writes them."""


@step("bind")
def bind(hand: Hand, slot: str, value: str) -> Any:
    """By a cursor: what is a good statement with one value is none with another."""
    with cursor_of(hand) as cursor:
        cursor.execute(SLOTS[slot], (VALUES[value],))
        return str(cursor.fetchall()) if cursor.description else cursor.rowcount


@step("bind by SQL")
def bind_by_sql(hand: Hand, slot: str, value: str) -> Any:
    return _rows(hand.session.connection().exec_driver_sql(SLOTS[slot], (VALUES[value],)))


@step("bind in text")
def bind_in_text(hand: Hand, slot: str, value: str) -> Any:
    text = SLOTS[slot].replace("%s", ":v") if "'%s" not in SLOTS[slot] else "select :v is null"
    return _rows(hand.session.execute(sa.text(text), {"v": VALUES[value]}))


@step("forget a value")
def forget_a_value(hand: Hand) -> Any:
    return _rows(hand.session.execute(sa.text("select :one, :two"), {"one": 1}))


@step("measure")
def measure(hand: Hand, column: str, value: str) -> Any:
    table = hand.run.twin.models.Measure.__table__
    row = {"name": "new", column: VALUES[value]}
    found = hand.session.execute(sa.insert(table).values(row).returning(table.c[column]))
    return str(found.scalar())


# Writes by Core


def _names(hand: Hand) -> Any:
    authors = hand.run.twin.models.Author.__table__
    return sa.select(authors.c.name).order_by(authors.c.name)


def _insert_from_select(hand: Hand) -> Any:
    journal = hand.run.twin.models.Journal.__table__
    return hand.session.execute(sa.insert(journal).from_select(["text"], _names(hand))).rowcount


def _cte_that_deletes(hand: Hand) -> Any:
    models = hand.run.twin.models
    gone = sa.delete(models.Letter.__table__).returning(models.Letter.text).cte("gone")
    statement = sa.insert(models.Journal.__table__).from_select(["text"], sa.select(gone.c.text))
    return hand.session.execute(statement.add_cte(gone)).rowcount


def _cte_that_is_not_read(hand: Hand) -> Any:
    noted = sa.insert(hand.run.twin.models.Journal.__table__).values(text="cte").cte("noted")
    return _rows(hand.session.execute(_names(hand).add_cte(noted)))


def _executemany(hand: Hand) -> None:
    rows = [{"text": f"many {number}"} for number in range(4)]
    hand.session.connection().execute(sa.insert(hand.run.twin.models.Journal.__table__), rows)


def _executemany_of_updates(hand: Hand) -> Any:
    authors = hand.run.twin.models.Author.__table__
    statement = sa.update(authors).where(authors.c.id == sa.bindparam("which"))
    rows = [{"which": 1, "born": 3}, {"which": 2, "born": 4}]
    return hand.session.connection().execute(statement, rows).rowcount


def _executemany_that_fails(hand: Hand) -> None:
    rows = [{"name": "first"}, {"name": "Austen"}, {"name": "third"}]
    hand.session.connection().execute(sa.insert(hand.run.twin.models.Author.__table__), rows)


def _returning_of_many(hand: Hand) -> Any:
    authors = hand.run.twin.models.Author.__table__
    rows = [{"name": f"r{number}"} for number in range(3)]
    return _rows(hand.session.execute(sa.insert(authors).returning(authors.c.name), rows))


def _upsert(hand: Hand) -> Any:
    odd = hand.run.twin.models.odd
    statement = upsert(odd).values(Key="k", select=9)
    changes = {"select": statement.excluded.select}
    statement = statement.on_conflict_do_update(index_elements=["Key"], set_=changes)
    return _rows(hand.session.execute(statement.returning(odd.c.select)))


def _multiple_values(hand: Hand) -> Any:
    odd = hand.run.twin.models.odd
    return hand.session.execute(sa.insert(odd).values([{"Key": "a"}, {"Key": "b"}])).rowcount


def _sequence(hand: Hand) -> Any:
    return hand.session.scalar(hand.run.twin.models.counter.next_value()) > 0


def _default_values(hand: Hand) -> Any:
    return hand.session.execute(sa.insert(hand.run.twin.models.Journal.__table__)).rowcount


def _mappings(hand: Hand) -> Any:
    return [dict(row) for row in hand.session.execute(_names(hand)).mappings()]


def _frozen(hand: Hand) -> Any:
    return _rows(hand.session.execute(_names(hand)).freeze()())


BY_CORE: dict[str, Callable[[Hand], Any]] = {
    "insert from select": _insert_from_select,
    "CTE": _cte_that_deletes,
    "CTE that is not read": _cte_that_is_not_read,
    "executemany": _executemany,
    "executemany of updates": _executemany_of_updates,
    "executemany that fails": _executemany_that_fails,
    "returning many": _returning_of_many,
    "upsert": _upsert,
    "multiple values": _multiple_values,
    "sequence": _sequence,
    "default values": _default_values,
    "mappings": _mappings,
    "frozen": _frozen,
}


@step("by Core")
def by_core(hand: Hand, how: str) -> Any:
    return BY_CORE[how](hand)


# The connection of a session


def _commit(hand: Hand) -> None:
    hand.run.committed = True
    hand.session.connection().commit()


def _nested(hand: Hand, end: str) -> None:
    connection = hand.session.connection()
    nested = connection.begin_nested()
    connection.exec_driver_sql("insert into journal (text) values ('nested')")
    getattr(nested, end)()


def _stream(hand: Hand) -> Any:
    options = {"stream_results": True, "max_row_buffer": 1}
    numbers = sa.text("select generate_series(1, 4)")
    result = hand.session.connection().execute(numbers, execution_options=options)
    return [result.fetchone()[0], *(row[0] for row in result.fetchmany(2))]


def _inspected(hand: Hand) -> Any:
    found = sa.inspect(hand.session.connection())
    return ["seat" in found.get_table_names(), found.get_pk_constraint("tag")["constrained_columns"]]


def _reflected(hand: Hand) -> Any:
    table = sa.Table("tag", sa.MetaData(), autoload_with=hand.session.connection())
    return sorted(table.c.keys())


def _made() -> sa.Table:
    return sa.Table("by core", sa.MetaData(schema="made"), sa.Column("x", sa.Integer))


def _temporary_table(hand: Hand, when: str) -> None:
    table = sa.Table(
        "Of Core",
        sa.MetaData(),
        sa.Column("x", sa.Integer),
        prefixes=["TEMPORARY"],
        postgresql_on_commit=when,
    )
    connection = hand.session.connection()
    table.create(connection)
    connection.execute(sa.insert(table).values(x=1))


def _no_parameters(hand: Hand) -> Any:
    options = {"no_parameters": True}
    connection = hand.session.connection()
    return _rows(connection.exec_driver_sql("select 'a%'", execution_options=options))


def _stream_everything(hand: Hand) -> None:
    """What follows on this connection is streamed, too."""
    hand.session.connection().execution_options(stream_results=True)


def _with_options(hand: Hand) -> None:
    hand.session.connection(execution_options={"logging_token": "x"})


BY_CONNECTION: dict[str, Callable[[Hand], Any]] = {
    "begin": lambda hand: hand.session.connection().begin() and None,
    "commit": _commit,
    "rollback": lambda hand: hand.session.connection().rollback(),
    "nested commit": lambda hand: _nested(hand, "commit"),
    "nested rollback": lambda hand: _nested(hand, "rollback"),
    "stream": _stream,
    "stream everything": _stream_everything,
    "schema": _inspected,
    "reflect": _reflected,
    "create": lambda hand: _made().create(hand.session.connection()),
    "drop": lambda hand: _made().metadata.drop_all(hand.session.connection()),
    "temporary, emptied": lambda hand: _temporary_table(hand, "DELETE ROWS"),
    "options": _with_options,
    "no parameters": _no_parameters,
}


@step("by a connection")
def by_a_connection(hand: Hand, how: str) -> Any:
    return BY_CONNECTION[how](hand)


# Not ON COMMIT DROP: inside an operation such a table lives until its end.
TEMPORARY = {
    "quoted": 'create temporary table "My Scrap" (x int) on commit delete rows',
    "kept": "create temp table kept_scrap (x int) on commit preserve rows",
    "in the schema": "create table pg_temp.in_schema (x int)",
    "sequence": "create temporary sequence tick",
    "view": "create temporary view glance as select 1 as one",
    "into": "select name into temporary of_into from author",
}
READ_TEMPORARY = {
    "quoted": 'insert into "My Scrap" values (1)',
    "count quoted": 'select count(*) from "My Scrap"',
}
_STAY = {"quoted", "kept", "in the schema", "sequence", "view", "into"}


@step("temporary")
def temporary(hand: Hand, how: str) -> Any:
    if how in _STAY and hand.run.program.uses_other_connections:
        return "left out"
    return _rows(hand.session.execute(sa.text(TEMPORARY[how])))


@step("use the temporary")
def use_the_temporary(hand: Hand, how: str) -> Any:
    return _rows(hand.session.execute(sa.text(READ_TEMPORARY[how])))


PREPARED = {
    "prepare": "prepare written (text) as insert into journal (text) values ($1)",
    "execute": "execute written('prepared')",
    "prepare a function": "prepare noting as select note_it('prepared')",
    "execute a function": "execute noting",
    "hold": "declare held_one cursor with hold for select name from author order by name",
    "fetch held": "fetch held_one",
    "close held": "close held_one",
    "discard": "discard temp",
    "reset": "reset all",
    "listen": 'listen "News"',
}
"""What stays on a connection: not in programs that use others."""


@step("for good")
def for_good(hand: Hand, how: str) -> Any:
    if stays_on(hand, "listen"):
        return "left out"
    return _rows(hand.session.execute(sa.text(PREPARED[how])))


# psycopg2


def _psycopg2(name: str) -> Any:
    return importlib.import_module(f"psycopg2.{name}")


def _execute_values(hand: Hand) -> Any:
    with cursor_of(hand) as cursor:
        rows = [(f"v{number}",) for number in range(5)]
        statement = "insert into journal (text) values %s returning text"
        return str(_psycopg2("extras").execute_values(cursor, statement, rows, page_size=2, fetch=True))


def _execute_values_of_none(hand: Hand) -> Any:
    with cursor_of(hand) as cursor:
        _psycopg2("extras").execute_values(cursor, "insert into journal (text) values %s", [])


def _execute_batch(hand: Hand) -> Any:
    with cursor_of(hand) as cursor:
        rows = [(f"b{number}",) for number in range(5)]
        _psycopg2("extras").execute_batch(
            cursor, "insert into journal (text) values (%s)", rows, page_size=2
        )


def _batch_that_fails(hand: Hand) -> Any:
    with cursor_of(hand) as cursor:
        rows = [("one",), ("Austen",), ("two",)]
        _psycopg2("extras").execute_batch(cursor, "insert into author (name) values (%s)", rows)


def _cursor_class(name: str) -> Callable[[Hand], Any]:
    def read(hand: Hand) -> Any:
        with cursor_of(hand, cursor_factory=getattr(_psycopg2("extras"), name)) as cursor:
            cursor.execute("select name, born from author order by name")
            return str(cursor.fetchone())

    return read


def _write_by_class(hand: Hand) -> Any:
    with cursor_of(hand, cursor_factory=_psycopg2("extras").NamedTupleCursor) as cursor:
        cursor.execute("insert into journal (text) values (%(t)s) returning text", {"t": "by class"})
        return cursor.fetchone().text


def _json(hand: Hand) -> Any:
    with cursor_of(hand) as cursor:
        value = _psycopg2("extras").Json({"a": [1, None]})
        cursor.execute("insert into measure (name, document) values ('j', %s)", (value,))


def _composed(hand: Hand) -> Any:
    sql = _psycopg2("sql")
    statement = sql.SQL("insert into {} ({}) values ({}) returning {}").format(
        sql.Identifier("Odd Schema", "Weird Table"),
        sql.SQL(", ").join([sql.Identifier("Key"), sql.Identifier("select")]),
        sql.SQL(", ").join([sql.Placeholder(), sql.Literal(5)]),
        sql.Identifier("Key"),
    )
    with cursor_of(hand) as cursor:
        cursor.execute(statement, ("composed",))
        return cursor.fetchone()[0]


def _composed_function(hand: Hand) -> Any:
    sql = _psycopg2("sql")
    with cursor_of(hand) as cursor:
        cursor.execute(sql.SQL("select {}({})").format(sql.Identifier("Weird Name"), sql.Literal("s")))
        return cursor.fetchone()[0]


def _callproc(name: str, *values: Any) -> Callable[[Hand], Any]:
    def call(hand: Hand) -> Any:
        with cursor_of(hand) as cursor:
            cursor.callproc(name, values)
            return str(cursor.fetchall())

    return call


def _copy_in(hand: Hand) -> Any:
    with cursor_of(hand) as cursor:
        cursor.copy_expert("copy journal (text) from stdin", io.StringIO("one\ntwo\n"))
        return cursor.rowcount


def _copy_that_fails(hand: Hand) -> Any:
    with cursor_of(hand) as cursor:
        cursor.copy_expert("copy author (name) from stdin", io.StringIO("first\nAusten\n"))


def _copy_from(hand: Hand) -> Any:
    with cursor_of(hand) as cursor:
        cursor.copy_from(io.StringIO("x\ny\n"), "tag", columns=("name",))


def _copy_out(hand: Hand) -> Any:
    found = io.StringIO()
    with cursor_of(hand) as cursor:
        cursor.copy_expert("copy (select name from author order by 1) to stdout with csv", found)
    return found.getvalue()


def _copy_a_write(hand: Hand) -> Any:
    found = io.StringIO()
    with cursor_of(hand) as cursor:
        statement = "copy (insert into journal (text) values ('c') returning text) to stdout"
        cursor.copy_expert(statement, found)
    return found.getvalue()


def _copy_a_function(hand: Hand) -> Any:
    found = io.StringIO()
    with cursor_of(hand) as cursor:
        cursor.copy_expert("copy (select note_it('copied')) to stdout", found)
    return found.getvalue()


def _copy_to(hand: Hand) -> Any:
    found = io.StringIO()
    with cursor_of(hand) as cursor:
        cursor.copy_to(found, "tag")
    return len(found.getvalue())


def _named(hand: Hand) -> Any:
    with cursor_of(hand, "Named One") as cursor:
        cursor.itersize = 1
        cursor.execute("select name from author order by name")
        return str([cursor.fetchone(), *cursor])


def _named_write(hand: Hand) -> Any:
    with cursor_of(hand, "noting") as cursor:
        cursor.execute("select note_it('named') from author")
        return str(cursor.fetchall())


def _with_hold(hand: Hand) -> Any:
    """It outlasts the commit, and is closed."""
    if hand.run.program.uses_other_connections:
        return "left out"
    cursor = cursor_of(hand, "holding", withhold=True)
    cursor.execute("select name from author order by name")
    first = cursor.fetchone()
    hand.run.committed = True
    hand.session.commit()
    hand.session.connection()
    rest = cursor.fetchall()
    cursor.close()
    return str([first, rest])


def _scrolled(hand: Hand) -> Any:
    with cursor_of(hand, "scrolling", scrollable=True) as cursor:
        cursor.execute("select generate_series(1, 5)")
        cursor.scroll(3)
        one = cursor.fetchone()
        cursor.scroll(-2)
        return str([one, cursor.fetchone()])


def _many(hand: Hand) -> Any:
    with cursor_of(hand) as cursor:
        cursor.executemany("insert into journal (text) values (%s)", [("m1",), ("m2",)])
        return cursor.rowcount


def _many_functions(hand: Hand) -> Any:
    with cursor_of(hand) as cursor:
        cursor.executemany('select "Weird Name"(%s)', [("m1",), ("m2",)])


def _large_object(hand: Hand) -> Any:
    found = hand.session.connection().connection.driver_connection.lobject(0, "wb", 4712)
    found.write(b"large")
    found.close()


def _status(hand: Hand) -> Any:
    """A few words about the connection that programs ask for."""
    driver = hand.session.connection().connection.driver_connection
    return [driver.closed, driver.encoding, driver.autocommit]


def _mogrify(hand: Hand) -> Any:
    with cursor_of(hand) as cursor:
        return cursor.mogrify("select %s, %s", ("it's", None)).decode()


def _closed_cursor(hand: Hand) -> Any:
    cursor = cursor_of(hand)
    cursor.close()
    cursor.execute("select 1")


def _no_results(hand: Hand) -> Any:
    with cursor_of(hand) as cursor:
        cursor.execute("insert into journal (text) values ('x')")
        cursor.fetchall()


def _wrong_count(hand: Hand) -> Any:
    with cursor_of(hand) as cursor:
        try:
            cursor.execute("select %s, %s", (1,))
        except IndexError:
            raise ValueError("too few") from None


def _unmentioned(hand: Hand) -> Any:
    with cursor_of(hand) as cursor:
        cursor.execute("select %(one)s", {"one": 1, "two": object()})
        return cursor.fetchone()[0]


def _bytes(hand: Hand) -> Any:
    with cursor_of(hand) as cursor:
        cursor.execute(b"insert into journal (text) values ('bytes')")
        return cursor.rowcount


def _several(hand: Hand) -> Any:
    with cursor_of(hand) as cursor:
        cursor.execute(TEXTS["two statements"])


_COMMON: dict[str, Callable[[Hand], Any]] = {
    "bytes": _bytes,
    "several": _several,
    "many": _many,
    "many functions": _many_functions,
    "named": _named,
    "named write": _named_write,
    "with hold": _with_hold,
    "closed cursor": _closed_cursor,
    "no results": _no_results,
}

# psycopg


def _copy_by_psycopg(hand: Hand) -> Any:
    with cursor_of(hand) as cursor:
        with cursor.copy("copy journal (text) from stdin") as copy:
            copy.write_row(("row",))
            copy.write("text\n")
        return cursor.rowcount


def _copy_out_by_psycopg(hand: Hand) -> Any:
    with cursor_of(hand) as cursor, cursor.copy("copy (select note_it('c')) to stdout") as copy:
        return [list(map(str, row)) for row in copy.rows()]


def _copy_that_the_view_ends(hand: Hand) -> Any:
    with cursor_of(hand) as cursor, cursor.copy("copy journal (text) from stdin") as copy:
        copy.write_row(("lost",))
        raise ValueError("in the middle")


def _stream_by_psycopg(hand: Hand) -> Any:
    with cursor_of(hand) as cursor:
        return str(list(cursor.stream("select name from author order by name")))


def _stream_left_early(hand: Hand) -> Any:
    with cursor_of(hand) as cursor, closing(cursor.stream("select generate_series(1, 9)")) as rows:
        return str(next(rows))


def _row_factory(hand: Hand) -> Any:
    rows = importlib.import_module("psycopg.rows")
    with cursor_of(hand, row_factory=rows.dict_row) as cursor:
        return str(cursor.execute("select name from author order by name").fetchone())


def _client_cursor(hand: Hand) -> Any:
    kind = importlib.import_module("psycopg").ClientCursor
    with kind(hand.session.connection().connection.driver_connection) as cursor:
        cursor.execute("insert into journal (text) values (%s)", ("client",))


def _pipeline(hand: Hand) -> Any:
    driver = hand.session.connection().connection.driver_connection
    with driver.pipeline(), driver.cursor() as cursor:
        cursor.execute("insert into journal (text) values (%s)", ("pipelined",))
        return str(cursor.execute("select name from author order by name").fetchone())


def _pipeline_that_fails(hand: Hand) -> Any:
    driver = hand.session.connection().connection.driver_connection
    with driver.pipeline(), driver.cursor() as cursor:
        cursor.execute("insert into journal (text) values (%s)", ("pipelined",))
        cursor.execute("select 1/0")


def _transaction(hand: Hand) -> Any:
    """Inside a transaction it is a savepoint."""
    driver = hand.session.connection().connection.driver_connection
    with driver.transaction(), driver.cursor() as cursor:
        cursor.execute("insert into journal (text) values ('transaction')")


def _transaction_that_fails(hand: Hand) -> Any:
    driver = hand.session.connection().connection.driver_connection
    with driver.transaction("inner one"), driver.cursor() as cursor:
        cursor.execute("insert into journal (text) values ('transaction')")
        cursor.execute("select 1/0")


def _transaction_rolled_back(hand: Hand) -> Any:
    driver = hand.session.connection().connection.driver_connection
    rollback = importlib.import_module("psycopg").Rollback
    with driver.transaction() as transaction:
        driver.execute("insert into journal (text) values ('transaction')")
        raise rollback(transaction)


def _execute_by_connection(hand: Hand) -> Any:
    driver = hand.session.connection().connection.driver_connection
    return str(driver.execute("select note_it(%s)", ("connection",)).fetchone())


def _returning_many(hand: Hand) -> Any:
    with cursor_of(hand) as cursor:
        rows = [("m1",), ("m2",)]
        cursor.executemany("insert into tag values (%s) returning name", rows, returning=True)
        return str([result.fetchone() for result in cursor.results()])


def _prepared_by_psycopg(hand: Hand) -> Any:
    with cursor_of(hand) as cursor:
        cursor.execute("insert into journal (text) values (%s)", ("prepared",), prepare=True)


def _composed_by_psycopg(hand: Hand) -> Any:
    sql = importlib.import_module("psycopg.sql")
    with cursor_of(hand) as cursor:
        cursor.execute(sql.SQL("select {}({})").format(sql.Identifier("Weird Name"), sql.Literal("s")))
        return str(cursor.fetchone())


OF_DRIVER: dict[str, dict[str, Callable[[Hand], Any]]] = {
    "psycopg2": {
        **_COMMON,
        "execute_values": _execute_values,
        "execute_values of none": _execute_values_of_none,
        "execute_batch": _execute_batch,
        "execute_batch that fails": _batch_that_fails,
        "NamedTupleCursor": _cursor_class("NamedTupleCursor"),
        "RealDictCursor": _cursor_class("RealDictCursor"),
        "DictCursor": _cursor_class("DictCursor"),
        "write by class": _write_by_class,
        "Json": _json,
        "composed": _composed,
        "composed function": _composed_function,
        "callproc": _callproc("note_it", "proc"),
        "callproc in a schema": _callproc("audit_log.record", "proc"),
        "callproc that locks": _callproc("pg_advisory_xact_lock", 5),
        "callproc that fails": _callproc("note_and_fail", "proc"),
        "copy in": _copy_in,
        "copy that fails": _copy_that_fails,
        "copy_from": _copy_from,
        "copy out": _copy_out,
        "copy a write": _copy_a_write,
        "copy a function": _copy_a_function,
        "copy_to": _copy_to,
        "scrolled": _scrolled,
        "large object": _large_object,
        "status": _status,
        "mogrify": _mogrify,
        "wrong count": _wrong_count,
        "unmentioned": _unmentioned,
    },
    "psycopg": {
        **_COMMON,
        "copy": _copy_by_psycopg,
        "copy out": _copy_out_by_psycopg,
        "copy that the view ends": _copy_that_the_view_ends,
        "stream": _stream_by_psycopg,
        "stream left early": _stream_left_early,
        "row factory": _row_factory,
        "client cursor": _client_cursor,
        "pipeline": _pipeline,
        "pipeline that fails": _pipeline_that_fails,
        "transaction": _transaction,
        "transaction that fails": _transaction_that_fails,
        "transaction rolled back": _transaction_rolled_back,
        "execute by connection": _execute_by_connection,
        "returning many": _returning_many,
        "prepared": _prepared_by_psycopg,
        "composed function": _composed_by_psycopg,
    },
}
"""By driver and name, what only the driver's own connection has."""


@step("driver")
def by_driver(hand: Hand, driver: str, name: str) -> Any:
    return OF_DRIVER[driver][name](hand)
