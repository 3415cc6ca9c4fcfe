"""Errors that are not those of the operation's transaction: the application's handlers answer them."""

from __future__ import annotations

from contextlib import closing

import psycopg
import psycopg2
import sqlalchemy as sa
from flask import g
from sqlalchemy.exc import DBAPIError

from flask_idempotency.core.errors import sqlstate
from tests.differential.harness import EQUAL, NOWHERE, ByDesign, Either, Family, NothingKept, Refused
from tests.differential.sentences import CONFLICT
from tests.drivers import EACH, connect

family = Family()

CODES = {
    "a deadlock": "40P01",
    "a serialization failure": "40001",
    "a lost connection": "08006",
    "a shutdown": "57P01",
    "a lock that is not free": "55P03",
}


def failing(code):
    """A statement that fails with this SQLSTATE, whatever database it is sent to."""
    return sa.text(f"do $$ begin raise exception 'as asked' using errcode = '{code}'; end $$")


def handled(world):
    """The application's own answer to errors of databases."""

    @world.app.errorhandler(DBAPIError)
    @world.app.errorhandler(psycopg2.Error)
    @world.app.errorhandler(psycopg.Error)
    def answer(error):
        world.session.rollback()
        code = sqlstate(getattr(error, "orig", error))
        return {"error": code}, 424


def bind(world, name):
    return world.db.engines[name]


def on_another_bind(statement):
    def view(world):
        world.pay(1)
        world.session.flush()
        with bind(world, "other").connect() as connection:
            connection.execute(statement)
        world.commit()

    return view


def in_the_session_on_another_bind(statement):
    def view(world):
        world.pay(1)
        world.session.flush()
        world.session.execute(statement, bind_arguments={"bind": bind(world, "other")})
        world.commit()

    return view


def on_another_connection(statement):
    def view(world):
        world.pay(1)
        world.session.flush()
        with world.engine.connect() as connection:
            connection.execute(statement)
        world.commit()

    return view


def on_a_raw_connection(statement):
    def view(world):
        world.pay(1)
        world.session.flush()
        with closing(connect(world.url, world.engine.dialect.driver)) as connection:
            connection.cursor().execute(str(statement))
        world.commit()

    return view


OTHER = {"binds": ("other",), "options": {"other_binds": ["other"]}}
for what, code in CODES.items():
    family.add(
        f"{what} of another bind, handled",
        on_another_bind(failing(code)),
        setup=handled,
        status=424,
        **OTHER,
    )
for what in ("a deadlock", "a serialization failure", "a lost connection"):
    code = CODES[what]
    family.add(
        f"{what} of another bind, not handled",
        on_another_bind(failing(code)),
        status=500,
        **OTHER,
    )
    family.add(
        f"{what} of another connection, handled",
        on_another_connection(failing(code)),
        setup=handled,
        status=424,
        pool=2,
    )
    family.add(
        f"{what} of another connection, not handled",
        on_another_connection(failing(code)),
        status=500,
        pool=2,
    )
    family.add(
        f"{what} of a raw connection, handled",
        on_a_raw_connection(failing(code)),
        setup=handled,
        status=424,
    )
    family.add(
        f"{what} of a raw connection, not handled", on_a_raw_connection(failing(code)), status=500
    )
    family.add(
        f"{what} of the session on another bind, handled",
        in_the_session_on_another_bind(failing(code)),
        setup=handled,
        status=424,
        **OTHER,
    )


@family(setup=handled, status=424, binds=("down",))
def a_database_that_is_down_handled(world):
    world.pay(1)
    world.session.flush()
    bind(world, "down").connect()


@family(status=500, binds=("down",))
def a_database_that_is_down_not_handled(world):
    world.pay(1)
    world.session.flush()
    bind(world, "down").connect()


@family(binds=("down",))
def a_database_that_is_down_and_the_view_does_without(world):
    with world.catching(DBAPIError):
        bind(world, "down").connect()
    world.pay(1)
    world.commit()


@family(setup=handled, status=424)
def a_raw_connection_to_a_database_that_is_down(world):
    world.pay(1)
    world.session.flush()
    connect(NOWHERE, world.engine.dialect.driver)


@family(setup=handled, status=424, **OTHER)
def a_connection_of_another_bind_that_is_cut(world):
    world.pay(1)
    world.session.flush()
    with bind(world, "other").connect() as connection:
        connection.execute(sa.text("select pg_terminate_backend(pg_backend_pid())"))


@family(setup=handled, status=424, pool=2)
def another_connection_of_the_engine_that_is_cut(world):
    world.pay(1)
    world.session.flush()
    with world.engine.connect() as connection:
        connection.execute(sa.text("select pg_terminate_backend(pg_backend_pid())"))


@family(setup=handled, status=424)
def an_error_of_a_driver_that_the_application_made(world):
    world.pay(1)
    world.session.flush()
    raise world.engine.dialect.dbapi.errors.SerializationFailure("made by hand")


# The session's own connection.


def of_the_session(statement):
    def view(world):
        world.pay(1)
        world.session.flush()
        world.session.execute(statement)

    return view


def of_the_session_caught(statement):
    def view(world):
        world.pay(1)
        world.session.flush()
        with world.catching(DBAPIError):
            world.session.execute(statement)
        world.session.rollback()
        world.pay(2)
        world.commit()

    return view


for what in ("a deadlock", "a serialization failure"):
    statement = failing(CODES[what])
    family.add(
        f"{what} of the session",
        of_the_session(statement),
        status=500,
        expect=ByDesign(CONFLICT, NothingKept(503).problems),
    )
    family.add(f"{what} of the session, caught", of_the_session_caught(statement))
family.add(
    "a lock that is not free for the session, caught",
    of_the_session_caught(failing(CODES["a lock that is not free"])),
)


@family(status=500, expect=Either((EQUAL, Refused(), NothingKept(503))))
def the_sessions_own_connection_is_cut(world):
    world.pay(1)
    world.session.flush()
    world.sql("select pg_terminate_backend(pg_backend_pid())")


# Other binds.


@family(**OTHER)
def a_write_to_another_bind_that_is_allowed(world):
    world.session.add(world.Remote(text="r"))
    world.pay(1)
    with world.catching():
        world.commit()
    world.session.rollback()


@family(binds=("other",), expect=Refused("another bind"))
def a_write_to_another_bind_that_is_not_allowed(world):
    world.session.add(world.Remote(text=None))
    world.pay(1)
    world.commit()


@family(binds=("other",), expect=Refused("another bind"))
def a_read_of_another_bind(world):
    world.note(world.session.query(world.Remote).count())
    world.pay(1)
    world.commit()


def read_other(world):
    g.count = world.session.query(world.Remote).count()


def a_read_of_another_bind_before_the_view(world):
    world.pay(g.count)
    world.commit()


family.add(
    "a read of another bind before the view",
    a_read_of_another_bind_before_the_view,
    before=read_other,
    binds=("other",),
)


family.add(
    "a read of another bind before the view that is allowed",
    a_read_of_another_bind_before_the_view,
    before=read_other,
    **OTHER,
)


def write_other(world):
    world.session.add(world.Remote(text=None))
    world.commit()


@family(binds=("other",), before=write_other)
def a_write_to_another_bind_committed_before_the_view(world):
    world.pay(1)
    world.commit()


def write_other_and_flush(world):
    world.session.add(world.Remote(text=None))
    world.session.flush()


for what, view in {
    "committed by the view": a_write_to_another_bind_committed_before_the_view,
    "never committed": lambda world: None,
}.items():
    family.add(
        f"a write to another bind before the view, {what}",
        view,
        binds=("other",),
        before=write_other_and_flush,
    )


@EACH
@family.in_every_store()
def test_errors_of_other_databases_are_handled_as_without_us(hold, case, store):
    hold(case, store)
