"""psycopg2's own doors: its connection, its transactions, and classes of one's own.

Its cursors: ``test_documented.py``.
"""

from __future__ import annotations

import logging

import sqlalchemy as sa
from psycopg2 import extensions, extras, sql

from tests.differential.harness import EQUAL, EQUAL_OR_REFUSED, Either, Family, NothingKept, Refused
from tests.differential.schemas import role_per_tenant
from tests.session.verdicts import SOUND_OR_FAILED

family = Family()


def driver(world):
    """The driver's connection, through the session's."""
    return world.session.connection().connection.driver_connection


# Ends of a transaction past the session. What the driver commits or undoes is the session's.


def ending(end):
    """The view goes on whatever the end raises, and commits: that makes good nothing."""

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


def set_autocommit(world):
    driver(world).autocommit = True


def set_isolation_attribute(world):
    driver(world).isolation_level = extensions.ISOLATION_LEVEL_SERIALIZABLE


CHANGES = {
    "reset": lambda world: driver(world).reset(),
    "set_isolation_level to autocommit": lambda world: driver(world).set_isolation_level(0),
    "set_isolation_level to serializable": lambda world: driver(world).set_isolation_level(3),
    "set_session": lambda world: driver(world).set_session(isolation_level="SERIALIZABLE"),
    "set_session to autocommit": lambda world: driver(world).set_session(autocommit=True),
    "autocommit": set_autocommit,
    "isolation_level": set_isolation_attribute,
    "tpc_begin": lambda world: driver(world).tpc_begin(driver(world).xid(1, "a", "b")),
}
for what, change in CHANGES.items():
    family.add(what, ending(change), expect=SOUND_OR_FAILED, status=None)

for what, view in {"caught": ending, "not caught": ending_uncaught}.items():
    family.add(
        f"close, {what}",
        view(lambda world: driver(world).close()),
        status=500,
        expect=Either((EQUAL, Refused(), NothingKept(503))),
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
def notices(world):
    driver(world).cursor().execute("do $$ begin raise notice 'hello'; end $$")
    world.pay(1)
    world.commit()


@family()
def helpers_that_want_the_drivers_own_class(world):
    connection = world.session.connection().connection.dbapi_connection
    world.note(extensions.quote_ident("a b", connection))
    world.note(sql.Identifier("a b").as_string(connection))
    world.note(isinstance(connection, extensions.connection))
    world.pay(1)
    world.commit()


@family(expect=Either((EQUAL, Refused(leaves="client_encoding"))))
def an_encoding(world):
    """The driver rolls back before it sets one."""
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


@family.in_every_store()
def test_the_drivers_doors_lead_nowhere_without_the_record(hold, case, store):
    hold(case, store)
