"""Statements, told apart by their text."""

from __future__ import annotations

import time

import pytest

from flask_idempotency.core.sqltext import ends_transaction, may_write

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
