"""No write that was undone stays behind a success, whoever has made it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import sqlalchemy as sa

from tests.differential.harness import Family
from tests.differential.schemas import TENANT, role_per_tenant
from tests.session.cases import SOUND_OR_REFUSED, asks, pays, rolls_back, sends, then, writes
from tests.sessions import factory_of

family, loud = Family(events=False), {"expect": SOUND_OR_REFUSED}

INSERT = "insert into audit (text) values ('undone')"


def raw(connection):
    """By a cursor of the driver, which the session knows nothing of."""
    connection.connection.cursor().execute(INSERT)


def directly(connection):
    connection.exec_driver_sql(INSERT)


def elsewhere(write):
    """In a thread without the view's context."""

    def call(connection):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(write, connection).result(10)

    return call


# Something else than the session writes, in a unit in which nothing was sent yet.


def undone_by_begin_nested(write):
    def view(world):
        connection = world.session.connection()
        nested = connection.begin_nested()
        write(connection)
        nested.rollback()
        pays(world)

    return view


def undone_by_a_rollback(write):
    return then(lambda world: write(world.session.connection()), rolls_back, pays)


def kept_after_a_rollback(write):
    """The other way round: what the view did not undo is there."""

    def view(world):
        world.session.begin_nested().rollback()
        write(world.session.connection())
        world.commit()

    return view


for what, write in {
    "a raw cursor": raw,
    "a raw cursor in another thread": elsewhere(raw),
    "another thread": elsewhere(directly),
    "the connection": directly,
}.items():
    for way in (undone_by_begin_nested, undone_by_a_rollback, kept_after_a_rollback):
        options = loud if "thread" in what else {}
        family.add(f"{what}, {way.__name__}", way(write), **options)


def undone_in_begin_nested(world):
    nested = world.session.begin_nested()
    writes(world)
    nested.rollback()


def touches(world):
    """Nothing is sent in the unit but what the listener sends."""
    world.session.connection()


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
    for name, send in {
        "do_execute": lambda cursor, text, values, _context: cursor.execute(text, values),
        "do_execute_no_params": lambda cursor, text, _context: cursor.execute(text),
        "do_executemany": lambda cursor, text, values, _context: cursor.executemany(text, values),
    }.items():
        sa.event.listen(world.engine, name, lambda *given, send=send: send(*given) or True)


undo = then(writes, rolls_back)
for arranged in (writes_in_after_begin, writes_in_before_insert, executes_by_itself):
    for view, do in {
        "undoes and pays": then(undo, undone_in_begin_nested, pays, undo),
        "rolls back at once": then(touches, rolls_back, pays, touches, rolls_back),
    }.items():
        family.add(f"{arranged.__name__}, {view}", do, setup=arranged)


@family(**loud)
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
    then(rolls_back, pays)(world)


# What looks like a read and writes.


def functions(world):
    """A function that writes, and a policy that calls it."""
    role_per_tenant(world)
    for statement in (
        f"create function writes() returns int language sql as $$ {INSERT} returning 1 $$",
        "create table guarded (a int)",
        "insert into guarded values (1)",
        "alter table guarded enable row level security",
        f"grant select on guarded to {TENANT}",
        "create policy writes on guarded using (writes() = 1)",
    ):
        world.admin_run(statement)


for what, read in {
    "two statements": sends("select 1; update account set balance = 1 where name = 'alice'"),
    "a function": sends("select writes()"),
    "a policy": sends(f"set local role {TENANT}", "select a from guarded"),
}.items():
    view = then(pays, read, rolls_back, asks("select balance from account where name = 'alice'"), pays)
    family.add(f"{what}, undone", view, setup=functions, **loud)


def fails(world):
    with world.catching():
        world.sql("select 1 / 0")


def commits_a_nested_transaction_that_failed(world):
    """The error was caught inside: the server refuses the RELEASE, and what was done is undone."""
    nested = world.session.begin_nested()
    writes(world)
    fails(world)
    with world.catching():
        nested.commit()


family.add("a connection asked for after a failure", then(fails, touches, rolls_back, pays))
family.add(
    "a nested transaction that failed", then(commits_a_nested_transaction_that_failed, rolls_back, pays)
)


@family.in_every_store()
def test_what_was_undone_is_gone_or_the_request_is_refused(hold, case, store):
    hold(case, store)
