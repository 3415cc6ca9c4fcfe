"""What goes past the session, a commit, a rollback or a write: refused, or as without us.

No retry doubles a row, and no write that was undone stays behind a success.
"""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import sqlalchemy as sa

from flask_idempotency import NotAtomic
from tests.differential.harness import EQUAL, ByDesign, Either, Family, Refused
from tests.drivers import PSYCOPG
from tests.integration.session.cases import (
    SOUND_OR_FAILED,
    SOUND_OR_REFUSED,
    commits,
    fails,
    pays,
    reads,
    rejects,
    rolls_back,
    sends,
    then,
    writes,
)

family = Family(events=False, status=None)


def handed_out(world):
    return world.session.connection().connection


def by_context(world):
    """A ``with`` block of psycopg2's connection commits; psycopg has one that nests."""
    driver = handed_out(world).driver_connection
    with driver if world.engine.driver == "psycopg2" else driver.transaction():
        pass


OF_THE_DRIVER = {
    "the pool's connection": handed_out,
    "the driver's connection": lambda world: handed_out(world).driver_connection,
    "a cursor's connection": lambda world: handed_out(world).cursor().connection,
}
OF_SQLALCHEMY = {
    "the connection": lambda world: world.session.connection(),
    "the connection's transaction": lambda world: world.session.connection().get_transaction(),
}
ENDS = {
    "the driver's with block": (by_context, SOUND_OR_FAILED),
    "commit as text": (sends("commit"), SOUND_OR_REFUSED),
}
for found, expect in (OF_THE_DRIVER, SOUND_OR_FAILED), (OF_SQLALCHEMY, SOUND_OR_REFUSED):
    for what, find in found.items():
        for verb in "commit", "rollback":
            end = lambda world, find=find, verb=verb: getattr(find(world), verb)()  # noqa: E731
            ENDS[f"{verb} of {what}"] = end, expect


def swallowed(end):
    """The view goes on whatever the end raises."""

    def view(world):
        with contextlib.suppress(Exception):
            end(world)

    return then(writes, view, pays)


def in_nested(end):
    def view(world):
        with world.session.begin_nested():
            writes(world)
            end(world)
        world.commit()

    return view


WAYS = {
    "uncaught": lambda end: then(writes, end, pays),
    "swallowed": swallowed,
    "rolled back": lambda end: then(writes, end, rolls_back, pays),
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
    family.add(f"{verb} of the driver's, {way}, by name", WAYS[way](end), expect=Refused())
family.add(
    "a commit in a transaction that the driver had begun",
    WAYS["failing"](ENDS["commit of the pool's connection"][0]),
    before=reads,
    expect=SOUND_OR_FAILED,
)


for name in ('"idempotency_first"', "sa_savepoint_1"):
    family.add(  # of a name that ours has: a rollback would go back to the view's own
        f"a savepoint {name} as text",
        then(writes, sends(f"savepoint {name}"), writes, rolls_back, rejects),
        expect=SOUND_OR_REFUSED,
    )


@family(expect=Refused("the view sent"))
def a_statement_that_only_the_driver_understands(world):
    world.session.connection().exec_driver_sql(b"insert into audit (text) values ('sent')")


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


# Something else than the session writes, in a unit in which nothing was sent yet.


def raw(connection, cursor=None):
    """By a cursor of the driver, which the session knows nothing of."""
    cursor = cursor or connection.connection.cursor()
    cursor.execute("insert into audit (text) values ('undone')")


def elsewhere(connection):
    """In a thread without the view's context."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(raw, connection).result(10)


def undone_by_begin_nested(world, write):
    connection = world.session.connection()
    nested = connection.begin_nested()
    write(connection)
    nested.rollback()
    pays(world)


def undone_by_a_rollback(world, write):
    write(world.session.connection())
    rolls_back(world)
    pays(world)


def kept_after_a_rollback(world, write):
    """The other way round: what the view did not undo is there."""
    world.session.begin_nested().rollback()
    write(world.session.connection())
    world.commit()


for what, write, expect in (("a raw cursor", raw, EQUAL), ("a thread", elsewhere, SOUND_OR_REFUSED)):
    for way in (undone_by_begin_nested, undone_by_a_rollback, kept_after_a_rollback):
        family.add(f"{what}, {way.__name__}", partial(way, write=write), expect=expect)


def queries(world):
    world.session.scalars(sa.select(world.Account).where(world.Account.id > 0)).all()


LISTENERS = {  # which of its arguments is the connection
    "after_begin": (lambda world: world.session(), 2),
    "before_insert": (lambda world: world.Payment, 1),
    "before_cursor_execute": (lambda world: world.engine, 0),
    "before_execute": (lambda world: world.engine, 0),
}


def in_a_listener(world, name):
    """It gets the connection behind a commit, before or after a query."""
    (find, place), said = LISTENERS[name], []
    write = lambda *found: said.append(1) or raw(found[place])  # noqa: E731
    pays(world)
    sa.event.listen(find(world), name, write)
    then(queries, writes, rolls_back)(world)
    sa.event.remove(find(world), name, write)
    world.note(bool(said))


for name in LISTENERS:
    view = partial(in_a_listener, name=name)
    family.add(f"a raw cursor in {name}, behind a commit", view, expect=EQUAL)


@family()
def a_listener_that_executes_queries_itself(world):
    said = []
    listener = lambda cursor, text, values, _context: said.append(cursor.execute(text, values)) or True  # noqa: E731
    pays(world)
    sa.event.listen(world.engine.dialect, "do_execute", listener)
    then(queries, rolls_back)(world)
    sa.event.remove(world.engine.dialect, "do_execute", listener)
    world.note(len(said))


@family()
def a_raw_cursor_kept_over_a_commit(world):
    cursor = handed_out(world).cursor()
    then(pays, queries)(world)
    raw(None, cursor)
    rolls_back(world)


# A query is sent in one message with the savepoint of its transaction.


def in_vain(world, text="1 / :a", a=0):
    with contextlib.suppress(sa.exc.DBAPIError):
        world.session.execute(sa.select(sa.text(text)), {"a": a})


def unsent(world):
    """The driver cannot bind the value, so it sends nothing."""
    with contextlib.suppress(sa.exc.SQLAlchemyError):
        world.session.execute(sa.select(world.Payment.id).where(world.Payment.amount == object()))


as_text = partial(in_vain, text="to_tsquery(:a)", a="fat cat")  # SQLSTATE 42601, once it was read
for what, view, expect in (
    ("a rollback", then(pays, in_vain, rolls_back, pays), EQUAL),
    ("another", then(pays, in_vain, commits, pays), EQUAL),
    ("nothing", then(pays, in_vain), EQUAL),
    ("a flush", then(pays, in_vain, writes), SOUND_OR_FAILED),
    ("a write, undone", then(pays, unsent, writes, rolls_back, pays), EQUAL),
    ("another, as a text", then(pays, as_text, rolls_back, pays), EQUAL),
):
    family.add(f"a failed query behind a commit, and {what}", view, expect=expect)
for what, text in ("syntax error", "1 / / :a"), ("illegible character", r"E'\xff' || :a"):
    unread = then(pays, partial(in_vain, text=text, a="a"), rolls_back, pays)
    by_name = Either((EQUAL, Refused("could not read a query")))
    family.add(f"a query with an {what} behind a commit", unread, expect=by_name)


@family.each()
def test_what_goes_past_the_session_is_refused_or_as_without_us(hold, case):
    hold(case)


in_a_pipeline = Family(events=False, expect=Refused("pipeline"))


@in_a_pipeline()
def a_commit_in_a_pipeline(world):
    with handed_out(world).driver_connection.pipeline():
        for _ in range(2):
            world.sql("insert into audit (text) values ('in a pipeline')")
            world.commit()


@in_a_pipeline()
def one_that_the_view_catches(world):
    with contextlib.suppress(NotAtomic):
        a_commit_in_a_pipeline(world)
    world.session.rollback()
    world.pay()
    world.commit()


@PSYCOPG
@in_a_pipeline.each()
def test_a_pipeline_of_psycopgs_around_a_commit_is_refused_by_name(hold, case):
    hold(case)
