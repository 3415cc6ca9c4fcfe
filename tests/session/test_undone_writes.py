"""No write that was undone stays behind a success, whoever has made it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import sqlalchemy as sa

from tests.differential.harness import Family
from tests.differential.schemas import TENANT, role_per_tenant
from tests.session.verdicts import SOUND_OR_REFUSED
from tests.sessions import factory_of

equal, loud = Family(events=False), Family(events=False, expect=SOUND_OR_REFUSED)

INSERT = "insert into audit (text) values ('undone')"


def raw(connection, statement=INSERT):
    """By a cursor of the driver, which the session knows nothing of."""
    cursor = connection.connection.cursor()
    cursor.execute(statement)
    cursor.close()


def elsewhere(call):
    """In a thread without the view's context."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(10)


def pays(world):
    world.pay(1)
    world.commit()


# Something else than the session writes, in a unit in which nothing was sent yet.

WRITERS = {
    "a raw cursor": raw,
    "a raw cursor in another thread": lambda connection: elsewhere(lambda: raw(connection)),
    "another thread": lambda connection: elsewhere(lambda: connection.exec_driver_sql(INSERT)),
    "the connection": lambda connection: connection.exec_driver_sql(INSERT),
}


def undone_by_begin_nested(write):
    def view(world):
        connection = world.session.connection()
        nested = connection.begin_nested()
        write(connection)
        nested.rollback()
        pays(world)

    return view


def undone_by_a_rollback(write):
    def view(world):
        write(world.session.connection())
        world.session.rollback()
        pays(world)

    return view


def kept_after_a_rollback(write):
    """The other way round: what the view did not undo is there."""

    def view(world):
        nested = world.session.begin_nested()
        nested.rollback()
        write(world.session.connection())
        world.commit()

    return view


WAYS = (undone_by_begin_nested, undone_by_a_rollback, kept_after_a_rollback)
for what, write in WRITERS.items():
    for way in WAYS:
        family = loud if "thread" in what else equal
        family.add(f"{what}, {way.__name__.replace('_', ' ')}", way(write))


def undoes_and_pays(world):
    world.pay(7)
    world.session.flush()
    world.session.rollback()
    nested = world.session.begin_nested()
    world.pay(8)
    world.session.flush()
    nested.rollback()
    pays(world)
    world.pay(9)
    world.session.flush()
    world.session.rollback()


def rolls_back_at_once(world):
    """Nothing is sent in the unit but what the listener sends."""
    world.session.connection()
    world.session.rollback()
    pays(world)
    world.session.connection()
    world.session.rollback()


def writes_in_after_begin(world):
    @sa.event.listens_for(factory_of(world.app, world.db), "after_begin")
    def write(_session, _transaction, connection):
        raw(connection)


def writes_in_before_insert(world):
    @sa.event.listens_for(world.Payment, "before_insert")
    def write(_mapper, connection, _payment):
        raw(connection)


def executes_by_itself(world):
    """An engine whose listeners send the statements, and say that they did."""

    @sa.event.listens_for(world.engine, "do_execute")
    def execute(cursor, statement, parameters, _context):
        cursor.execute(statement, parameters)
        return True

    @sa.event.listens_for(world.engine, "do_execute_no_params")
    def execute_without(cursor, statement, _context):
        cursor.execute(statement)
        return True

    @sa.event.listens_for(world.engine, "do_executemany")
    def execute_many(cursor, statement, parameters, _context):
        cursor.executemany(statement, parameters)
        return True


for arranged in (writes_in_after_begin, writes_in_before_insert, executes_by_itself):
    for view in (undoes_and_pays, rolls_back_at_once):
        name = f"{arranged.__name__}, {view.__name__}".replace("_", " ")
        equal.add(name, view, setup=arranged)


@loud()
def a_thread_that_does_not_know_the_operation(world):
    connection = world.session.connection()
    elsewhere(lambda: connection.exec_driver_sql(INSERT))
    pays(world)


@loud()
def two_threads_at_once(world):
    """One waits for a lock on the session's connection while the other sends a statement."""
    connection, ready = world.session.connection(), threading.Event()
    world.admin_run("select pg_advisory_lock(11)")

    def write():
        ready.set()
        connection.exec_driver_sql(INSERT)

    with ThreadPoolExecutor(2) as pool:
        try:
            waits = pool.submit(connection.exec_driver_sql, "select pg_advisory_xact_lock(11)")
            other = pool.submit(write)
            assert ready.wait(10)
        finally:
            world.admin_run("select pg_advisory_unlock(11)")
        waits.result(10)
        other.result(10)
    world.session.rollback()
    pays(world)


# What looks like a read and writes.


def functions(world):
    """Functions that write, and a view, a policy and an operator that call one."""
    role_per_tenant(world)
    world.admin_run(
        "create function writes() returns int language sql as"
        " $$ insert into audit (text) values ('undone') returning 1 $$"
    )
    world.admin_run("create view writing as select writes() as one")
    world.admin_run(
        "create function compares(int, int) returns int language sql as"
        " $$ insert into audit (text) values ('undone') returning 1 $$"
    )
    world.admin_run("create operator ### (leftarg = int, rightarg = int, function = compares)")
    world.admin_run("create table guarded (a int)")
    world.admin_run("insert into guarded values (1)")
    world.admin_run("alter table guarded enable row level security")
    world.admin_run(f"grant select on guarded to {TENANT}")
    world.admin_run("create policy writes on guarded using (writes() = 1)")


def text(statement):
    return lambda world: world.sql(statement)


def core(make):
    return lambda world: world.session.execute(make()).all()


def by_policy(world):
    world.sql(f"set local role {TENANT}")
    world.sql("select a from guarded")


READS = {
    "two statements": text("select 1; update account set balance = 1 where name = 'alice'"),
    "a function": text("select writes()"),
    "a view that calls a function": text("select one from writing"),
    "an operator": text("select 1 ### 1"),
    "an insert in WITH": text(f"with a as ({INSERT} returning 1) select * from a"),
    "a policy": by_policy,
    "FOR UPDATE": text("select * from account for update"),
    "a select of SQLAlchemy's with an operator": core(
        lambda: sa.select(sa.literal(1, sa.Integer).op("###")(sa.literal(1, sa.Integer)))
    ),
}


def undone_read(read):
    """After a commit of the view."""

    def view(world):
        pays(world)
        read(world)
        world.session.rollback()
        world.note(world.sql("select balance from account where name = 'alice'"))
        pays(world)

    return view


for what, read in READS.items():
    loud.add(f"{what}, undone", undone_read(read), setup=functions)


@equal()
def an_attribute_set_to_what_it_was_and_no_commit(world):
    pays(world)
    account = world.session.query(world.Account).filter_by(name="alice").one()
    account.balance = account.balance + 0


@equal()
def a_setting_of_the_drivers_connection(world):
    driver = world.session.connection().connection.dbapi_connection
    found = driver.cursor_factory
    driver.cursor_factory = type("Own", (type(driver.cursor()),), {})
    world.note(type(driver.cursor()).__name__)
    driver.cursor_factory = found
    pays(world)


@equal()
def a_connection_asked_for_after_a_failure(world):
    with world.catching():
        world.sql("select 1 / 0")
    world.session.connection()
    world.session.rollback()
    pays(world)


@equal()
def a_nested_transaction_that_failed_is_committed(world):
    """The error was caught inside: the server refuses the RELEASE, and what was done is undone."""
    nested = world.session.begin_nested()
    world.pay(7)
    world.session.flush()
    with world.catching():
        world.sql("select 1 / 0")
    with world.catching():
        nested.commit()
    world.session.rollback()
    pays(world)


@equal.in_every_store()
def test_what_was_undone_is_gone(hold, case, store):
    hold(case, store)


@loud.in_every_store()
def test_what_was_undone_is_gone_or_the_request_is_refused(hold, case, store):
    hold(case, store)
