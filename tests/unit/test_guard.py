"""What a statement does to a transaction, read from its text."""

import time

import pytest

from flask_idempotency.session.guard import traits_of

IS_REFUSED = [
    "COMMIT",
    " \n\tRollback",
    "-- note\nEND",
    "/* a */ /* b */ COMMIT",
    "; COMMIT",
    "select 1; COMMIT",
    "prepare transaction 'x'",
    "select $$ ; $$; commit",
    "/*/**/*/ commit",
    "/* /* nested */ ; commit */ select 1",  # of nested comments, nobody reads the end
    "select 1; -- a comment\rcommit",
    "select 1 as a$x$; commit; select 2 as b$x$",
    "select E'\\'; --'; commit; --'",
    "select 'a'\n'b\\'; commit",
    'select 1 as "a""; --"; commit',
    "select a$b$ from t; commit; select '$b$'",
    "create function f() returns int begin atomic select 1; end",
    r"select '\''; commit; --'",  # where a backslash escapes
    "set transaction isolation level serializable",
    "set session characteristics as transaction read only",
    "set local transaction_read_only = on",
    "create temp table d () on commit delete rows",
]
IS_NOT = [
    "",
    "/* open commit",
    "set local transaction_timeout = '5s'",
    "ROLLBACK TO SAVEPOINT a",
    "insert into t values ('; commit')",
    'select "; commit" from t',
    "select 1 -- ; commit",
    "do $body$ begin; commit; end $body$",
    "select E'\\'; commit'",
    "select commit from t",
    "select '/*'; select 1 /* '; commit */",
    "create temp table d on commit drop as select 1",
]


@pytest.mark.parametrize("text", IS_REFUSED)
def test_statements_that_are_refused(text):
    assert traits_of(text).is_refused


@pytest.mark.parametrize("text", IS_NOT)
def test_statements_that_are_not(text):
    assert not traits_of(text).is_refused


@pytest.mark.parametrize(
    "text",
    [
        "insert into t values (1)",
        "/* tag */ insert into t values (1)",
        "-- tag\n update t set a = 1",
        "with gone as (delete from t returning *) select * from gone",
        "do $$ begin end $$",
        "select * into u from t",
        "select * from t for no key update of t skip locked",
        "select shop.count(1)",
        'select "price"(1)',
        'select "1st"(1)',
        "select überweisen(1)",
        "select pg_notify('c', '')",
        "/* why */ set\nlocal a.b = 'c'",
        "select set_config('a.b', 'c', false)",
    ],
)
def test_statements_that_may_do_more_than_read(text):
    assert traits_of(text).writes


@pytest.mark.parametrize(
    "text",
    [
        "(select 1) union (select 2)",
        "SELECT t.id AS t_id, t.updated_at FROM t WHERE t.id = %(pk)s",
        "select count(*), coalesce(max(a), 0) from t where b in (1, 2)",
        "select cast(b as numeric(10, 2)) from t where c between %(one)s and (%(two)s)",
        "show all",
        "/* delete from t */ select 1",
        "select 'insert' ; select 2",
        "",
    ],
)
def test_statements_that_only_read(text):
    assert not traits_of(text).writes


@pytest.mark.parametrize("noise", ["*//*" * 5000, "/*" * 5000, "'" * 9999, "$a$" * 5000, "(" * 9999])
def test_no_text_takes_long_to_read(noise):
    started = time.process_time()
    traits_of(f"/* {noise} commit")
    traits_of(f"with {noise} select 1")
    assert time.process_time() - started < 0.5
