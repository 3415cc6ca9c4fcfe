"""A commit or rollback past the session: refused, or as without us. No retry doubles a row."""

from __future__ import annotations

import contextlib
import warnings

import sqlalchemy as sa

from tests.differential.harness import EQUAL, ByDesign, Family, Refused
from tests.drivers import PSYCOPG
from tests.session.cases import (
    SOUND_OR_FAILED,
    SOUND_OR_REFUSED,
    Named,
    commits,
    fails,
    pays,
    reads,
    rejects,
    rolls_back,
    then,
    writes,
)

family = Family(events=False, status=None)
in_a_pipeline = Family(events=False, expect=Refused("pipeline"))


def handed_out(world):
    return world.session.connection().connection


def by_context(world):
    """A ``with`` block of psycopg2's connection commits; psycopg has one that nests."""
    driver = handed_out(world).driver_connection
    with driver if world.engine.driver == "psycopg2" else driver.transaction():
        pass


def innermost(world):
    """The session's own transaction on its connection, which is a savepoint in an operation."""
    connection = world.session.connection()
    return connection.get_nested_transaction() or connection.get_transaction()


OF_THE_DRIVER = {
    "the pool's connection": handed_out,
    "the driver's connection": lambda world: handed_out(world).driver_connection,
    "a cursor's connection": lambda world: handed_out(world).cursor().connection,
}
OF_SQLALCHEMY = {
    "the innermost transaction": innermost,
    "the connection": lambda world: world.session.connection(),
    "the connection's transaction": lambda world: world.session.connection().get_transaction(),
}
ENDS = {
    f"{verb} of {what}": (
        lambda world, find=find, verb=verb: getattr(find(world), verb)(),
        SOUND_OR_FAILED if what in OF_THE_DRIVER else SOUND_OR_REFUSED,
    )
    for what, find in {**OF_THE_DRIVER, **OF_SQLALCHEMY}.items()
    for verb in ("commit", "rollback")
} | {
    "the driver's with block": (by_context, SOUND_OR_FAILED),
    "do_commit of the dialect": (
        lambda world: world.engine.dialect.do_commit(handed_out(world)),
        SOUND_OR_FAILED,
    ),
    "do_rollback of the dialect": (
        lambda world: world.engine.dialect.do_rollback(handed_out(world)),
        SOUND_OR_FAILED,
    ),
    "commit as text": (lambda world: world.sql("commit"), SOUND_OR_REFUSED),
}


def pays_or_rejects(world):
    """The client hears that nothing was paid. SQLAlchemy warns of what the end has left."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sa.exc.SAWarning)
        try:
            pays(world)
        except sa.exc.InvalidRequestError:
            world.session.rollback()
            return rejects(world)
    return None


def in_nested(end):
    def view(world):
        with world.session.begin_nested():
            writes(world)
            end(world)
        world.commit()

    return view


def swallowed(end):
    """The view goes on whatever the end raises."""

    def view(world):
        with contextlib.suppress(Exception):
            end(world)

    return then(writes, view, pays)


WAYS = {
    "uncaught": lambda end: then(writes, end, pays),
    "swallowed": swallowed,
    "rolled back": lambda end: then(writes, end, rolls_back, pays),
    "rejected": lambda end: then(writes, end, pays_or_rejects),
    "failing": lambda end: then(writes, end, fails),  # without us each retry doubles the row
    "last": lambda end: then(writes, end),
    "in begin_nested": in_nested,
}
for way, make in WAYS.items():
    for what, (end, expect) in ENDS.items():
        if way != "swallowed" or "rollback" not in what:  # a view that swallows that goes on
            family.add(f"{what}, {way}", make(end), expect=expect)
for verb, way in (("commit", "uncaught"), ("rollback", "uncaught"), ("commit", "rolled back")):
    end = ENDS[f"{verb} of the driver's connection"][0]
    family.add(f"{verb} of the driver's, {way}, by name", WAYS[way](end), expect=Named("NotAtomic"))
family.add(
    "a commit in a transaction that the driver had begun",
    WAYS["failing"](ENDS["commit of the pool's connection"][0]),
    before=reads,
    expect=SOUND_OR_FAILED,
)


def by_text(text):
    return then(writes, lambda world: world.session.connection().exec_driver_sql(text), pays)


for text in (
    "END WORK",
    "rollback and chain",
    "begin",
    "/* done /* quite */ select 1; */ commit",
    "select 1; -- it is\n commit",
    r"select E'\'; select 1; --'; commit",
    "create or replace function pg_temp.one() returns int begin atomic select 1; end",
):
    family.add(repr(text), by_text(text), expect=SOUND_OR_REFUSED)
for text in (
    "do $body$ begin\n-- commit;\nperform 1;\nend; $body$",
    r"select E'\'; commit; --'",
    "/* ; commit ; rollback */ select 1",
    "savepoint a; select 1; rollback to savepoint a; release savepoint a",
):
    family.add(repr(text), by_text(text), expect=EQUAL)
for name in ("idempotency_first", '"idempotency_first"', "sa_savepoint_1"):
    family.add(  # of a name that ours has: a rollback would go back to the view's own
        f"a savepoint {name} as text",
        then(
            writes, lambda world, name=name: world.sql(f"savepoint {name}"), writes, rolls_back, rejects
        ),
        expect=SOUND_OR_REFUSED,
    )


class NothingAfterIt:
    """Every request is a 500, and of the payments only those are there that were committed past us."""

    def problems(self, outcome):
        return [
            f"{step.label}: {step.reply.status}, {step.rows['payment']}"
            for step in outcome.protected.steps
            if step.reply.status != 500
            or any('"amount": 3}' not in row for row in step.rows["payment"])
        ]


for way in ("uncaught", "swallowed", "failing", "last"):
    # No public hook sees this text: what is there is committed, and only the next statement tells.
    end = lambda world: handed_out(world).cursor().execute("commit")  # noqa: E731
    family.add(f"a commit through a raw cursor, {way}", WAYS[way](end), expect=NothingAfterIt())


@family(
    expect=ByDesign(
        "a connection kept over a commit still works",
        lambda outcome: [
            f"{step.label}: {step.notes} {step.rows['payment']}"
            for step in outcome.protected.steps
            if step.notes or not step.rows["payment"]
        ],
    ),
)
def a_connection_kept_over_the_commit(world):
    connection = world.session.connection()
    world.commit()
    try:
        connection.execute(sa.insert(world.Payment.__table__).values(amount=1))
    except sa.exc.ResourceClosedError:
        world.note("closed")


@in_a_pipeline()
def in_pipeline(world):
    with handed_out(world).driver_connection.pipeline():
        for _ in range(2):
            world.sql("insert into audit (text) values ('in a pipeline')")
            world.commit()


@in_a_pipeline()
def in_pipeline_caught(world):
    with contextlib.suppress(Exception):
        in_pipeline(world)
    then(rolls_back, commits)(world)


@family.in_every_store()
def test_a_commit_past_the_session_is_refused_or_as_without_us(hold, case, store):
    hold(case, store)


@PSYCOPG
@in_a_pipeline.in_every_store()
def test_a_pipeline_of_psycopgs_around_a_commit_is_refused_by_name(hold, case, store):
    hold(case, store)
