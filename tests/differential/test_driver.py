"""psycopg2's own doors: its connection, its cursors, its transactions, and classes of one's own."""

from __future__ import annotations

import io
import logging

import psycopg2
import sqlalchemy as sa
from psycopg2 import extensions, extras, sql

from tests.differential.harness import EQUAL, EQUAL_OR_REFUSED, Either, Family, NothingKept, Refused
from tests.differential.schemas import role_per_tenant

family = Family()


def driver(world):
    """psycopg2's connection, through the session's."""
    return world.session.connection().connection.driver_connection


# Ends of a transaction past the session.


def ending(end):
    """A row before it, one after it, and a commit of the session."""

    def view(world):
        world.pay(1)
        world.session.flush()
        with world.catching():
            end(world)
        world.session.rollback()
        world.pay(2)
        world.commit()

    return view


def ending_uncaught(end):
    def view(world):
        world.pay(1)
        world.session.flush()
        end(world)
        world.pay(2)
        world.commit()

    return view


def in_a_with(world):
    with driver(world):
        pass


def through_a_result(method):
    def end(world):
        getattr(world.session.execute(sa.text("select 1")).cursor.connection, method)()

    return end


def through_a_cursor(method):
    def end(world):
        cursor = driver(world).cursor()
        getattr(cursor.connection, method)()

    return end


def set_autocommit(world):
    driver(world).autocommit = True


def set_isolation_attribute(world):
    driver(world).isolation_level = extensions.ISOLATION_LEVEL_SERIALIZABLE


ENDS = {
    "commit": lambda world: driver(world).commit(),
    "rollback": lambda world: driver(world).rollback(),
    "with": in_a_with,
    "commit through a result": through_a_result("commit"),
    "rollback through a result": through_a_result("rollback"),
    "rollback through a cursor": through_a_cursor("rollback"),
    "reset": lambda world: driver(world).reset(),
    "set_isolation_level to autocommit": lambda world: driver(world).set_isolation_level(0),
    "set_isolation_level to serializable": lambda world: driver(world).set_isolation_level(3),
    "set_session": lambda world: driver(world).set_session(isolation_level="SERIALIZABLE"),
    "set_session to autocommit": lambda world: driver(world).set_session(autocommit=True),
    "autocommit": set_autocommit,
    "isolation_level": set_isolation_attribute,
    "a cursor with a factory that commits": lambda world: (
        driver(world).cursor(cursor_factory=extensions.cursor).execute("COMMIT")
    ),
    "COMMIT as composed SQL": lambda world: driver(world).cursor().execute(sql.SQL("COMMIT")),
    "COMMIT by copy_expert": lambda world: driver(world).cursor().copy_expert("COMMIT", io.StringIO()),
    "COMMIT in a batch": lambda world: extras.execute_batch(
        driver(world).cursor(), "insert into audit (text) values (%s); commit", [("a",), ("b",)]
    ),
}
for what, end in ENDS.items():
    family.add(
        f"{what}, not caught", ending_uncaught(end), expect=EQUAL_OR_REFUSED, status=None, mistakes=True
    )


for what in (
    "commit",
    "rollback",
    "with",
    "commit through a result",
    "rollback through a result",
    "reset",
    "set_isolation_level to autocommit",
    "autocommit",
    "COMMIT as composed SQL",
):
    family.add(
        f"{what}, caught", ending(ENDS[what]), expect=EQUAL_OR_REFUSED, status=None, mistakes=True
    )
for what, view in {"caught": ending, "not caught": ending_uncaught}.items():
    family.add(
        f"close, {what}",
        view(lambda world: driver(world).close()),
        status=500,
        expect=Either((EQUAL, Refused(), NothingKept(503))),
    )
family.add(
    "a bare cursor that commits",
    ending_uncaught(lambda world: extensions.cursor(driver(world)).execute("COMMIT")),
    expect=Either((EQUAL, Refused(), NothingKept(500))),
)


# Cursors and connections of the application's own classes.


class Commenting(extensions.cursor):
    """Says in each statement where it comes from."""

    def execute(self, query, vars=None):  # noqa: A002
        if isinstance(query, bytes):
            query = query.decode()
        return super().execute(f"/* app=shop */ {query}", vars)


class Counting(extensions.cursor):
    """Does nothing special, but is of another class."""


class Logging(extras.LoggingConnection):
    """Logs statements; as the manual says, it must be given a logger."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.initialize(logging.getLogger("tests.differential.statements"))


class OwnConnection(extensions.connection):
    """Does nothing special, but is of another class."""


def connect(**arguments):
    return {"connect_args": {"options": "-c lock_timeout=500ms", **arguments}}


def everything(world):
    """Writes, reads, a nested rollback, a commit, a rollback."""
    world.pay(1)
    nested = world.session.begin_nested()
    world.pay(2)
    world.session.flush()
    nested.rollback()
    world.commit()
    world.pay(3)
    world.session.flush()
    world.session.rollback()
    world.note(world.session.query(world.Payment).count() > 0)
    world.pay(4)
    world.commit()


def commit_as_text(world):
    world.pay(1)
    world.session.flush()
    world.sql("commit")


FACTORIES = {
    "a cursor that puts a comment in front": connect(cursor_factory=Commenting),
    "a cursor of another class": connect(cursor_factory=Counting),
    "a connection that logs": connect(connection_factory=Logging),
    "a connection of another class": connect(connection_factory=OwnConnection),
}
for what, options in FACTORIES.items():
    family.add(what, everything, engine_options=options)
    family.add(
        f"{what}, and COMMIT as text", commit_as_text, engine_options=options, expect=EQUAL_OR_REFUSED
    )


def comments(world):
    """As sqlcommenter does."""

    @sa.event.listens_for(world.engine, "before_cursor_execute", retval=True)
    def say_where(connection, cursor, statement, parameters, context, executemany):
        return f"/* route=/payments */ {statement}", parameters


def comments_behind(world):
    @sa.event.listens_for(world.engine, "before_cursor_execute", retval=True)
    def say_where(connection, cursor, statement, parameters, context, executemany):
        return f"{statement} -- route=/payments", parameters


family.add("a listener that puts a comment in front", everything, setup=comments)
family.add("a listener that puts a comment behind", everything, setup=comments_behind)


# What people use the driver for.


@family()
def execute_values(world):
    extras.execute_values(
        driver(world).cursor(), "insert into payment (amount) values %s", [(1,), (2,)]
    )
    world.commit()


@family()
def execute_batch(world):
    statement = "insert into payment (amount) values (%s)"
    extras.execute_batch(driver(world).cursor(), statement, [(1,), (2,)])
    world.commit()


@family()
def execute_values_rolled_back(world):
    extras.execute_values(
        driver(world).cursor(), "insert into payment (amount) values %s", [(1,), (2,)]
    )
    world.session.rollback()
    world.pay(3)
    world.commit()


@family()
def execute_values_in_a_nested_transaction(world):
    nested = world.session.begin_nested()
    extras.execute_values(
        driver(world).cursor(), "insert into payment (amount) values %s", [(1,), (2,)]
    )
    nested.rollback()
    world.pay(3)
    world.commit()


@family()
def copy(world):
    driver(world).cursor().copy_expert("copy payment (amount) from stdin", io.StringIO("1\n2\n"))
    out = io.StringIO()
    driver(world).cursor().copy_expert("copy (select max(amount) from payment) to stdout", out)
    world.note(out.getvalue())
    world.commit()


@family()
def a_named_cursor(world):
    with driver(world).cursor("rows") as cursor:
        cursor.execute("select generate_series(1, 5)")
        world.note(cursor.fetchall())
    world.pay(1)
    world.commit()


@family()
def a_procedure(world):
    cursor = driver(world).cursor()
    cursor.callproc("pg_advisory_xact_lock", (4,))
    world.pay(1)
    world.commit()


@family(expect=Refused("lobject"))
def a_large_object(world):
    large = driver(world).lobject(0, "wb")
    large.write(b"abc")
    large.close()
    world.pay(1)
    world.commit()


@family(status=None)
def an_error_of_the_driver(world):
    world.pay(1)
    world.session.flush()
    with world.catching(psycopg2.Error):
        driver(world).cursor().execute("select 1 / 0")
    world.session.rollback()
    world.pay(2)
    world.commit()


@family()
def notices(world):
    driver(world).cursor().execute("do $$ begin raise notice 'hello'; end $$")
    world.pay(1)
    world.commit()


@family(expect=EQUAL_OR_REFUSED)
def an_encoding(world):
    driver(world).set_client_encoding("LATIN1")
    world.pay(1, "ä")
    with world.catching():
        world.commit()
    driver(world).set_client_encoding("UTF8")
    world.session.rollback()


@family(setup=role_per_tenant, expect=EQUAL_OR_REFUSED)
def reset_after_a_role(world):
    world.sql("set role differential_tenant")
    driver(world).reset()
    world.pay(1)
    world.commit()


# Options of the transaction, chosen in the view.


def chooses(**options):
    def view(world):
        world.session.connection(execution_options=options)
        world.pay(1)
        world.commit()
        world.note(world.sql("show transaction_isolation"))

    return view


REFUSED = Refused("isolation|read.only|deferrable|transaction")
for level in ("REPEATABLE READ", "SERIALIZABLE", "AUTOCOMMIT"):
    family.add(
        f"isolation {level} chosen in the view",
        chooses(isolation_level=level),
        expect=REFUSED,
    )
family.add(
    "isolation READ COMMITTED chosen in the view",
    chooses(isolation_level="READ COMMITTED"),
    expect=EQUAL_OR_REFUSED,
)
family.add(
    "read only chosen in the view", chooses(postgresql_readonly=True), status=500, expect=REFUSED
)
family.add("deferrable chosen in the view", chooses(postgresql_deferrable=True), expect=REFUSED)
family.add(
    "the engine's isolation chosen in the view",
    chooses(isolation_level="SERIALIZABLE"),
    engine_options={"isolation_level": "SERIALIZABLE"},
    expect=EQUAL_OR_REFUSED,
)


@family(expect=EQUAL_OR_REFUSED)
def isolation_as_a_statement(world):
    world.sql("set transaction isolation level serializable")
    world.pay(1)
    world.commit()
    world.note(world.sql("show transaction_isolation"))


@family(expect=EQUAL_OR_REFUSED)
def isolation_after_a_commit(world):
    world.pay(1)
    world.commit()
    world.session.connection(execution_options={"isolation_level": "SERIALIZABLE"})
    world.pay(2)
    world.commit()


@family(expect=EQUAL_OR_REFUSED, status=500)
def read_only_as_a_statement(world):
    world.sql("set transaction read only")
    world.pay(1)
    world.commit()


@family(expect=REFUSED)
def read_only_until_the_commit(world):
    world.sql("set transaction read only")
    world.note(world.session.query(world.Payment).count() >= 0)
    world.commit()
    world.pay(1)
    world.commit()


@family()
def a_named_cursor_with_hold(world):
    cursor = world.session.connection().connection.cursor("kept", withhold=True)
    cursor.execute("select name from account order by 1")
    world.commit()
    world.note(cursor.fetchone())
    world.pay(1)
    world.commit()
    world.note(cursor.fetchall())
    cursor.close()
    world.commit()


@family.in_every_store()
def test_the_drivers_doors_lead_nowhere_without_the_record(hold, case, store):
    hold(case, store)
