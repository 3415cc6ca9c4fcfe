"""Statements, told apart by their text."""

import re
import time

import pytest

from flask_idempotency.drivers import sqltext
from flask_idempotency.drivers.sqltext import (
    CONSTRAINTS,
    CURSOR,
    LOCKS,
    ON_COMMIT,
    READS,
    SETS,
    SIGNALS,
    SUSPECT,
    UNSURE,
    WRITES,
    ends_transaction,
    may_write,
    settings_of,
    traits_of,
)

ENDS = [
    "COMMIT",
    "commit;",
    " \n\tRollback",
    "ROLLBACK WORK",
    "rollback and chain",
    "-- note\nEND",
    "/* a */ /* b */ COMMIT",
    "/* open",
    "; COMMIT",
    "select 1; COMMIT",
    "select 'a;b'; begin",
    "ABORT",
    "START TRANSACTION READ WRITE",
    "prepare transaction 'x'",
    "select $$ ; $$; commit",
    "select E'\\''; commit",
    "/* /* nested */ */ commit",
    "/*/**/*/ commit",
    "-- ' \n commit",
    "-- ' \r commit",
    "select 1; -- a comment\rcommit",
    "select 1 as a$x$; commit; select 2 as b$x$",
    "select E'\\'; --'; commit; --'",
    "select 'a'\n'b\\'; commit",
    'select 1 as "a""; --"; commit',
    "select a$b$ from t; commit; select '$b$'",
    "create function f() returns int begin atomic select 1; end",
]
DOES_NOT = [
    "",
    "select 1",
    "ROLLBACK TO SAVEPOINT a",
    "rollback work to a",
    "ROLLBACK TRANSACTION TO a",
    "insert into t values ('; commit')",
    "select 'it''s; commit'",
    'select "; commit" from t',
    "select 1 -- ; commit",
    "select 1 /* ; commit */",
    "do $$ begin perform 1; end $$",
    "do $body$ begin; commit; end $body$",
    "select E'\\'; commit'",
    "select case when a then b end from t",
    "prepare p as select 1",
    "select commit from t",
    "/* /* nested */ ; commit */ select 1",
    "select '/*'; select 1 /* '; commit */",
]


@pytest.mark.parametrize("text", [t for t in ENDS if t != "/* open"])
def test_statements_that_end_a_transaction(text):
    assert ends_transaction(text)


@pytest.mark.parametrize("text", [*DOES_NOT, "/* open commit"])
def test_statements_that_do_not(text):
    assert not ends_transaction(text)


@pytest.mark.parametrize(
    "text",
    [
        "insert into t values (1)",
        "/* tag */ insert into t values (1)",
        "-- tag\n update t set a = 1",
        "select 1; delete from t",
        "with gone as (delete from t returning *) select * from gone",
        "truncate t",
        "call p()",
        "do $$ begin end $$",
        "copy t from stdin",
        "create table t ()",
        "merge into t using s on true when matched then delete",
    ],
)
def test_statements_that_may_write(text):
    assert may_write(text)


@pytest.mark.parametrize(
    "text",
    [
        "select 1",
        "(select 1) union (select 2)",
        "with a as (select 1) select * from a",
        "show all",
        "/* delete from t */ select 1",
        "select 'insert' ; select 2",
        "values (1)",
        "",
    ],
)
def test_statements_that_only_read(text):
    assert not may_write(text)


@pytest.mark.parametrize("noise", ["*//*" * 5000, "/*" * 5000, "'" * 9999, "$a$" * 5000, "(" * 9999])
def test_no_text_takes_long_to_read(noise):
    started = time.process_time()
    ends_transaction(f"/* {noise} commit")
    may_write(f"with {noise} select 1")
    assert time.process_time() - started < 0.5


def _seconds_to_read(text):
    begun = time.process_time()
    sqltext.traits_of(text)
    return time.process_time() - begun


def test_the_rows_of_one_statement_are_read_quickly():
    rows = [f"(%(name__{n})s, %(amount__{n})s::INTEGER, %(note__{n})s)" for n in range(1000)]
    insert = "INSERT INTO payment (name, amount, note) VALUES " + ", ".join(rows)
    unlike = re.sub(r"%\((\w+)\)s", r"\1", insert)  # of about the same length
    assert sqltext.traits_of(insert) == sqltext.traits_of(unlike)
    quick, slow = (min(_seconds_to_read(text) for _ in range(5)) for text in (insert, unlike))
    assert quick < 0.7 * slow


def test_a_value_joins_no_words():
    insert = "INSERT INTO payment VALUES " + ", ".join(["(COM%(a)sMIT)"] * 1000)
    assert sqltext.traits_of(insert) == sqltext.WRITES


def test_where_a_backslash_escapes_it_hides_no_commit():
    text = r"select '\''; commit; --'"
    assert not ends_transaction(text)
    assert ends_transaction(text, backslashes=True)


@pytest.mark.parametrize(
    ("text", "traits"),
    [
        ("SELECT t.id AS t_id, t.updated_at FROM t WHERE t.id = %(pk)s", READS),
        ("select count(*), coalesce(max(a), 0) from t where b in (1, 2)", READS),
        ("with a as (select cast(b as numeric(10, 2)) from t) select * from a", READS),
        ("select nextval('s')", READS),
        ("select price(1)", UNSURE),
        ("call p()", WRITES | UNSURE),
        ("insert into t values (1)", WRITES),
        ("with gone as (delete from t returning *) select * from gone", WRITES),
        ("select * into u from t", WRITES),
        ("select * from t for update", LOCKS),
        ("select * from t for no key update of t skip locked", LOCKS),
        ("select pg_advisory_xact_lock(1)", LOCKS),
        ("lock table t", LOCKS),
        ("SET LOCAL a.b = 'c'", SETS),
        ("select set_config('a.b', 'c', true)", SETS),
        ("set transaction read only", SETS),
        ("set constraints all immediate", CONSTRAINTS),
        ("create table t (a int unique deferrable initially deferred)", WRITES | CONSTRAINTS | UNSURE),
        ("create temp table x (a int) on commit drop", WRITES | ON_COMMIT | UNSURE),
        ("notify c", SIGNALS),
        ("select pg_notify('c', '')", SIGNALS),
        ("declare c cursor for select 1", CURSOR | UNSURE),
        ("do $$ begin perform set_config('a.b', 'c', true); end $$", WRITES | UNSURE | SETS),
        ("/* update t */ select 'insert into t'", READS),
    ],
)
def test_what_a_statement_may_do(text, traits):
    assert traits_of(text) & ~SUSPECT == traits


@pytest.mark.parametrize(
    ("text", "session", "local"),
    [
        ("set search_path to a, b", {"search_path"}, set()),
        ("set session a.b = 'c'; set local d.e = 'f'", {"a.b"}, {"d.e"}),
        ("select set_config('a.b', 'it''s (c', true), set_config('D.e', '', 'f')", {"d.e"}, {"a.b"}),
        ("set role r", {"role"}, set()),
        ("set local role r", set(), {"role"}),
        ("reset role", {"role"}, set()),
        ("reset all", {"*"}, set()),
        ("set time zone 'UTC'", {"timezone"}, set()),
        ('set local "TimeZone" = 1', set(), {"timezone"}),
        ("set session authorization r", {"session_authorization"}, set()),
        ("set local transaction_read_only = on", set(), {"transaction_read_only"}),
        ("do $$ begin set local a.b = 'c'; end $$", set(), {"a.b"}),
        ("update t set search_path = 1", set(), set()),
        ("select 'set a.b = 1'", set(), set()),
    ],
)
def test_which_settings_a_statement_changes(text, session, local):
    assert settings_of(text) == (session, local)


def test_an_isolation_that_is_chosen_is_recognised():
    assert sqltext.chooses_isolation("set transaction isolation level serializable")
    assert sqltext.chooses_isolation("set session characteristics as transaction read only")
    assert sqltext.chooses_isolation("set default_transaction_isolation = 'serializable'")
    assert sqltext.chooses_isolation("set transaction read only")
    assert not sqltext.chooses_isolation("set local transaction_read_only = on")


def test_temporary_tables_that_end_with_a_transaction():
    kept = "create temp table if not exists a (b int) on commit preserve rows;"
    dropped = 'create temporary table "C" on commit drop as select 1'
    emptied = "; create temp table d () on commit delete rows"
    endings = ['DROP TABLE pg_temp."C"', "TRUNCATE pg_temp.d"]
    assert sqltext.temporary_endings(kept + dropped + emptied) == endings
