"""A commit or rollback past the session: refused, or as without us. No retry doubles a row."""

from __future__ import annotations

import contextlib
import warnings

import sqlalchemy as sa

from tests.differential.harness import ByDesign, Family, Refused
from tests.drivers import PSYCOPG
from tests.session.verdicts import SOUND_OR_FAILED, SOUND_OR_REFUSED, Named, NothingAfterIt

ours = Family(events=False, status=None, expect=SOUND_OR_REFUSED)
of_the_driver = Family(events=False, status=None, expect=SOUND_OR_FAILED)
harmless = Family(events=False)
named = Family(events=False, status=None, expect=Named("NotAtomic"))
in_a_pipeline = Family(events=False, expect=Refused("pipeline"))
kept = Family(
    events=False,
    expect=ByDesign(
        "a connection kept over a commit still works",
        lambda outcome: [
            f"{step.label}: {step.notes} {step.rows['payment']}"
            for step in outcome.protected.steps
            if step.notes or not step.rows["payment"]
        ],
    ),
)
unseen = Family(events=False, status=None, expect=NothingAfterIt())


def handed_out(world):
    return world.session.connection().connection


def by_context(world):
    """A ``with`` block of psycopg2's connection commits; psycopg has one that nests."""
    driver = handed_out(world).driver_connection
    with driver if world.engine.driver == "psycopg2" else driver.transaction():
        pass


def by_raw_cursor(world):
    """No public hook sees this text: what is there is committed, and only the next statement tells."""
    handed_out(world).cursor().execute("commit")


OF_THE_DRIVER = {
    "commit of the pool's connection": lambda world: handed_out(world).commit(),
    "rollback of the pool's connection": lambda world: handed_out(world).rollback(),
    "commit of the driver's connection": lambda world: handed_out(world).driver_connection.commit(),
    "rollback of the driver's connection": lambda world: handed_out(world).driver_connection.rollback(),
    "commit of a cursor's connection": lambda world: handed_out(world).cursor().connection.commit(),
    "the driver's with block": by_context,
}


def innermost(world):
    """The session's own transaction on its connection, which is a savepoint in an operation."""
    connection = world.session.connection()
    return connection.get_nested_transaction() or connection.get_transaction()


OF_SQLALCHEMY = {
    "commit of the innermost transaction": lambda world: innermost(world).commit(),
    "rollback of the innermost transaction": lambda world: innermost(world).rollback(),
    "commit of the connection": lambda world: world.session.connection().commit(),
    "rollback of the connection": lambda world: world.session.connection().rollback(),
    "commit of the connection's transaction": lambda world: (
        world.session.connection().get_transaction().commit()
    ),
    "rollback of the connection's transaction": lambda world: (
        world.session.connection().get_transaction().rollback()
    ),
    "do_commit of the dialect": lambda world: world.engine.dialect.do_commit(handed_out(world)),
    "do_rollback of the dialect": lambda world: world.engine.dialect.do_rollback(handed_out(world)),
}
TEXTS = {
    "a commit": "commit",
    "an end": "END WORK",
    "an abort": "abort",
    "a commit and chain": "commit and chain",
    "a rollback and chain": "rollback and chain",
    "a new transaction": "begin",
    "a commit behind a comment": "-- done\ncommit",
    "a commit behind a comment of two lines": "/* done\n it is */ commit",
    "a commit behind a nested comment": "/* done /* quite */ select 1; */ commit",
    "a commit behind a statement and a comment": "select 1; -- it is\n commit",
    "a commit behind a string": "select 'it''s; '; commit",
    "a commit behind a dollar quote": "select $a$;$a$; commit",
    "a commit behind an escaped string": r"select E'\'; select 1; --'; commit",
    "a commit behind a name": 'select 1 as "--"; commit',
    "a rollback behind a comment": "/**/rollback",
    "a nested comment": "/* ; /* commit */ ; rollback */ select 1",  # nobody reads where it ends
}
HARMLESS = {
    "a block": "do $$ begin perform 1; end $$",
    "a block with a tag and a comment": "do $body$ begin\n-- commit;\nperform 1;\nend; $body$",
    "a string": "select 'a;\ncommit;'",
    "an escaped string": r"select E'\'; commit; --'",
    "a dollar quote": "select $$; commit; rollback; $$",
    "a name": 'select 1 as ";commit;"',
    "a comment": "-- commit\nselect 1",
    "a comment behind a semicolon": "select 1; -- commit\n",
    "a semicolon in a comment": "/* ; commit ; rollback */ select 1",
    "a case": "select case when true\nthen 1\nend",
    "a savepoint": "savepoint a; select 1; rollback to savepoint a; release savepoint a",
    "a function with a block": (
        "create or replace function pg_temp.one() returns int language plpgsql"
        " as $$ begin return 1; end $$"
    ),
}


def uncaught(end):
    def view(world):
        world.pay(1)
        world.session.flush()
        end(world)
        world.pay(2)
        world.commit()

    return view


def swallowed(end):
    """The view goes on whatever the end raises."""

    def view(world):
        world.pay(1)
        world.session.flush()
        with contextlib.suppress(Exception):
            end(world)
        world.pay(2)
        world.commit()

    return view


def rolled_back(end):
    """What a commit past the session has committed stays, whatever is rolled back later."""

    def view(world):
        world.pay(1)
        world.session.flush()
        end(world)
        world.session.rollback()
        world.pay(2)
        world.commit()

    return view


def rejected(end):
    """The client hears that nothing was paid. SQLAlchemy warns of what the end has left."""

    def view(world):
        world.pay(1)
        world.session.flush()
        end(world)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sa.exc.SAWarning)
            try:
                world.pay(2)
                world.commit()
            except sa.exc.InvalidRequestError:
                world.session.rollback()
                return {"error": "nothing was paid"}, 422
        return None

    return view


def failing(end):
    """Without us the rows of a commit past the session stay, and each retry doubles them."""

    def view(world):
        world.pay(1)
        world.session.flush()
        end(world)
        raise OSError("as asked")

    return view


def last(end):
    """In place of the session's commit."""

    def view(world):
        world.pay(1)
        world.session.flush()
        end(world)

    return view


def in_nested(end):
    def view(world):
        world.pay(1)
        with world.session.begin_nested():
            world.pay(2)
            world.session.flush()
            end(world)
        world.commit()

    return view


def sends(text):
    return lambda world: world.session.execute(sa.text(text.replace(":", r"\:")))


def sends_raw(text):
    return lambda world: world.session.connection().exec_driver_sql(text)


def around_our_savepoint(name):
    """A savepoint by text, of the name that ours has: a rollback would go back to the view's own."""

    def view(world):
        world.pay(1)
        world.session.flush()
        world.sql(f"savepoint {name}")
        world.pay(2)
        world.session.flush()
        world.session.rollback()
        return {"error": "nothing was paid"}, 422

    return view


WAYS = (uncaught, swallowed, rolled_back, rejected, failing, last, in_nested)
for way in WAYS:
    name = way.__name__.replace("_", " ")
    for what, end in OF_THE_DRIVER.items():
        if way is not swallowed or "rollback" not in what:  # a view that swallows that goes on
            of_the_driver.add(f"{what}, {name}", way(end))
    for what, end in OF_SQLALCHEMY.items():
        family = of_the_driver if "dialect" in what else ours
        family.add(f"{what}, {name}", way(end))
for what in ("commit of the driver's connection", "rollback of the driver's connection"):
    named.add(f"{what}, uncaught", uncaught(OF_THE_DRIVER[what]))
of_the_driver.add(
    "commit of the pool's connection, failing, in a transaction that the driver had begun",
    failing(OF_THE_DRIVER["commit of the pool's connection"]),
    before=lambda world: world.sql("select count(*) from account"),
)
named.add(
    "the driver's commit, and it is rolled back",
    rolled_back(OF_THE_DRIVER["commit of the driver's connection"]),
)
for name in ("idempotency_first", '"idempotency_first"', "Idempotency_First", "sa_savepoint_1"):
    ours.add(f"a savepoint {name} as text", around_our_savepoint(name))
for way in (swallowed, rolled_back, failing):
    ours.add(f"a commit, {way.__name__.replace('_', ' ')}", way(sends("commit")))
for what, text in TEXTS.items():
    ours.add(what, uncaught(sends(text)))
    ours.add(f"{what}, in the driver's syntax", uncaught(sends_raw(text)))
for what, text in HARMLESS.items():
    harmless.add(what, uncaught(sends(text)))
ours.add(
    "an SQL function with a body that ends",
    uncaught(sends("create or replace function pg_temp.one() returns int begin atomic select 1; end")),
)
for way in (uncaught, swallowed, failing, last):
    unseen.add(f"a commit through a raw cursor, {way.__name__}", way(by_raw_cursor))


def in_pipeline(world):
    with handed_out(world).driver_connection.pipeline():
        for _ in range(2):
            world.sql("insert into audit (text) values ('in a pipeline')")
            world.commit()


def in_pipeline_caught(world):
    with contextlib.suppress(Exception):
        in_pipeline(world)
    world.session.rollback()
    world.commit()


@kept()
def a_connection_kept_over_the_commit(world):
    connection = world.session.connection()
    world.commit()
    try:
        connection.execute(sa.insert(world.Payment.__table__).values(amount=1))
    except sa.exc.ResourceClosedError:
        world.note("closed")


for view in (in_pipeline, in_pipeline_caught):
    in_a_pipeline.add(view.__name__, view)


@ours.in_every_store()
def test_a_commit_past_the_session_is_refused_or_as_without_us(hold, case, store):
    hold(case, store)


@of_the_driver.in_every_store()
def test_the_drivers_own_commit_is_refused_or_as_without_us(hold, case, store):
    hold(case, store)


@named.in_every_store()
def test_the_drivers_own_commit_is_refused_by_name_if_nothing_catches_it(hold, case, store):
    hold(case, store)


@kept.in_every_store()
def test_a_kept_connection_is_the_operations(hold, case, store):
    hold(case, store)


@PSYCOPG
@in_a_pipeline.in_every_store()
def test_a_pipeline_of_psycopgs_around_a_commit_is_refused_by_name(hold, case, store):
    hold(case, store)


@harmless.in_every_store()
def test_a_text_that_only_mentions_a_commit_is_as_without_us(hold, case, store):
    hold(case, store)


@unseen.in_every_store()
def test_nothing_is_committed_after_a_commit_that_no_hook_sees(hold, case, store):
    hold(case, store)
