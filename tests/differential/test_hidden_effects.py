"""What a statement does and its text does not show: functions with effects, by any name.

Only the server knows. It is asked where something depends on it: another session's turn, a transaction
that is open before the view, and the end.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from tests.differential.harness import EQUAL, EQUAL_OR_REFUSED, Family, Refused

FUNCTIONS = """
    create schema audit;
    create function "createOrder"(amount int) returns int language sql as
        'insert into payment (amount) values (amount) returning 1';
    create function audit.log(text text) returns void language sql as
        'insert into audit (text) values (text)';
    create function lower(amount int) returns int language sql as
        'insert into payment (amount) values (amount) returning 1';
    create view "orders" as select "createOrder"(7) as made;
    create function lock_account(number int) returns void language sql as
        'select pg_advisory_xact_lock(number)';
    create function choose_tenant(name text) returns void language plpgsql as
        $$ begin perform set_config('app.tenant', name, true); end $$;
    create function "chooseTenant"(name text) returns void language sql as
        'select choose_tenant(name)'
"""


def functions(world):
    """Functions that write, lock and set something; one is called by a view."""
    world.admin_run(FUNCTIONS)


family = Family(setup=functions, pool=2)

WRITES = {
    "a quoted function": 'select "createOrder"(5)',
    "a function in a schema": "select audit.log('paid')",
    "a function with the name of another": "select public.lower(5)",
    "a quoted schema": "select \"audit\".log('paid')",
    "a view over a function": 'select made from "orders"',
    "a block": 'do $$ begin perform "createOrder"(5); end $$',
    "a CTE": 'with made as (select "createOrder"(5)) select * from made',
}


def other_session(world):
    """Reads on a connection of its own, as without us."""
    with Session(world.db.engine) as session:
        world.note(session.scalar(sa.text("select 1")))


def commit_after(world, response):
    world.commit()


for name, text in WRITES.items():

    def not_committed(world, text=text):
        world.sql(text)

    def committed(world, text=text):
        world.sql(text)
        world.commit()

    def with_another_session(world, text=text):
        world.sql(text)
        other_session(world)
        world.commit()

    def with_a_turn(world, text=text):
        """The other one works on the session's own bind, in the operation."""
        world.sql(text)
        with Session(world.session.get_bind()) as session:
            world.note(session.scalar(sa.text("select 1")))
        world.commit()

    family.add(f"{name}, committed", committed)
    family.add(f"{name}, committed above the view", not_committed, after_request=commit_after)
    family.add(f"{name}, another session reads", with_another_session, expect=EQUAL_OR_REFUSED)
    family.add(f"{name}, another session has its turn", with_a_turn, expect=EQUAL_OR_REFUSED)


@family(expect=EQUAL_OR_REFUSED)
def a_lock_in_a_function_and_another_session(world):
    world.sql("select lock_account(5)")
    with Session(world.session.get_bind()) as session:
        session.execute(sa.text("select 1"))
    world.sql(
        "insert into audit (text) select count(*)::text from pg_locks"
        " where locktype = 'advisory' and pid = pg_backend_pid()"
    )
    world.commit()


@family(expect=EQUAL_OR_REFUSED)
def a_setting_in_a_function_and_another_session(world):
    world.sql("select choose_tenant('a')")
    with Session(world.session.get_bind()) as session:
        session.execute(sa.text("select 1"))
    world.sql("insert into audit (text) values (current_setting('app.tenant'))")
    world.commit()


def choose(text):
    def before(world):
        world.sql(text)

    return before


@family(before=choose("select \"chooseTenant\"('a')"), expect=EQUAL_OR_REFUSED)
def a_setting_in_a_quoted_function_before_the_view(world):
    world.sql("insert into audit (text) values (coalesce(current_setting('app.tenant', true), '-'))")
    world.commit()


# What changed nothing need not be committed.

NOTHING = {
    "an update of no rows": "update payment set amount = 1 where id = -1",
    "a delete of no rows": "delete from payment where id = -1",
    "an insert that meets a conflict": (
        "insert into account (name, balance) values ('alice', 1) on conflict do nothing"
    ),
}

for name, text in NOTHING.items():

    def changes_nothing(world, text=text):
        world.sql(text)

    family.add(name, changes_nothing)


@family()
def an_update_of_no_rows_by_the_session(world):
    if world.session.query(world.Payment).filter_by(amount=-1).update({"amount": 1}) > 0:
        world.commit()


@family(expect=Refused("nobody committed"))
def an_update_of_a_row(world):
    world.session.query(world.Account).update({"balance": 1})


# Nor need what was rolled back to a savepoint.


def get_or_create(world):
    """SQLAlchemy's own recipe for "insert if it is not there"."""
    with world.catching(IntegrityError), world.session.begin_nested():
        world.session.add(world.Account(name="alice", balance=1))


def undone_as_text(world):
    world.sql("SAVEPOINT mine")
    write(world)
    world.sql("ROLLBACK TO SAVEPOINT mine")


def undone_by_hand(world):
    nested = world.session.begin_nested()
    world.pay(2)
    world.session.flush()
    nested.rollback()


def undone_in_a_loop(world):
    for _ in range(3):
        get_or_create(world)


def undone_inside_another(world):
    with world.session.begin_nested():
        get_or_create(world)


def undone_after_a_commit(world):
    world.pay(3)
    world.commit()
    get_or_create(world)


def write(world):
    world.sql("insert into payment (amount) values (9)")


def pay(world):
    world.pay(1)
    world.commit()


def both(*parts):
    def run(world):
        for part in parts:
            part(world)

    return run


calm, leased = Family(), Family(atomic=False)
"""Where no function hides anything."""

UNDONE = (get_or_create, undone_as_text, undone_by_hand, undone_in_a_loop)
for undone in (*UNDONE, undone_inside_another, undone_after_a_commit):
    expect = EQUAL_OR_REFUSED if undone is undone_as_text else EQUAL  # the server cannot tell
    calm.add(undone.__name__.replace("_", " "), undone, expect=expect)
for undone in UNDONE:
    for one in (calm, leased):
        one.add(f"{undone.__name__.replace('_', ' ')}, before the view", pay, before=undone)
for what, parts in {
    "before": (write, get_or_create),
    "after": (get_or_create, write),
    "around": (write, get_or_create, write),
}.items():
    expect = Refused("nobody committed")
    calm.add(f"what was written {what} one that was undone", both(*parts), expect=expect)


@family.in_every_store()
def test_what_a_text_does_not_show_is_not_lost(hold, case, store):
    hold(case, store)


@calm.in_every_store()
def test_what_was_undone_needs_no_commit(hold, case, store):
    hold(case, store)


@leased.in_every_store()
def test_what_was_undone_before_a_view_that_is_not_atomic_does_no_harm(hold, case, store):
    hold(case, store)
