"""What listeners of the application hear of SQLAlchemy, and what they can stop."""

from __future__ import annotations

import sqlalchemy as sa
from flask import g

from tests.differential.harness import EQUAL, EQUAL_OR_REFUSED, ByDesign, Family, NothingKept
from tests.differential.sentences import ROLLED_BACK
from tests.sessions import factory_of

family = Family()


class Veto(Exception):
    """What a listener does not allow."""


def session_vetoes(world):
    @sa.event.listens_for(factory_of(world.app, world.db), "before_commit")
    def stop(session):
        if g.get("veto"):
            raise Veto("not today")


def fails_after_the_commit(world):
    @sa.event.listens_for(factory_of(world.app, world.db), "after_commit")
    def stop(session):
        if g.get("veto"):
            raise Veto("too late")


def vetoed(world):
    g.veto = True
    world.pay(1)
    world.commit()


def vetoed_and_answered(world):
    g.veto = True
    world.pay(1)
    try:
        world.commit()
    except Veto:
        world.session.rollback()
        return {"error": "veto"}, 409
    return None


def vetoed_and_done_later(world):
    g.veto = True
    world.pay(1)
    with world.catching(Veto):
        world.commit()
    world.session.rollback()
    g.veto = False
    world.pay(2)
    world.commit()


def vetoed_the_second_time(world):
    world.pay(1)
    world.commit()
    g.veto = True
    world.pay(2)
    with world.catching(Veto):
        world.commit()
    world.session.rollback()
    g.veto = False


def commit_after(world, response):
    world.commit()


def flushed_under_a_veto(world):
    g.veto = True
    world.pay(1)
    world.session.flush()


for arranged in (session_vetoes,):
    what = arranged.__name__.replace("_", " ")
    family.add(f"{what}, and nobody answers", vetoed, setup=arranged, status=500)
    family.add(f"{what}, and the view answers", vetoed_and_answered, setup=arranged, status=409)
    family.add(f"{what}, and the view goes on", vetoed_and_done_later, setup=arranged)
    family.add(f"{what} the second commit", vetoed_the_second_time, setup=arranged)
    family.add(
        f"{what} a commit above the view",
        flushed_under_a_veto,
        setup=arranged,
        status=500,
        after_request=commit_after,
        events=False,
    )
family.add(
    "an error after the commit",
    vetoed,
    setup=fails_after_the_commit,
    status=500,
    expect=ByDesign(
        ROLLED_BACK,
        NothingKept().problems,
    ),
)


def outbox_of_the_session(world):
    @sa.event.listens_for(factory_of(world.app, world.db), "before_commit")
    def write(session):
        if g.pop("outbox", False):
            session.add(world.Audit(text="outbox"))


def with_an_outbox(world):
    g.outbox = True
    world.pay(1)
    world.commit()


def with_an_outbox_and_an_error(world):
    with_an_outbox(world)
    raise RuntimeError("no")


def with_an_outbox_that_is_rolled_back(world):
    g.outbox = True
    world.pay(1)
    world.session.flush()
    world.session.rollback()
    g.outbox = False
    world.pay(2)
    world.commit()


def with_an_outbox_and_two_commits(world):
    with_an_outbox(world)
    with_an_outbox(world)


for arranged in (outbox_of_the_session,):
    what = arranged.__name__.replace("_", " ")
    family.add(f"an {what}", with_an_outbox, setup=arranged)
    family.add(f"an {what} of two commits", with_an_outbox_and_two_commits, setup=arranged)
    family.add(f"an {what} and a rollback", with_an_outbox_that_is_rolled_back, setup=arranged)
    family.add(
        f"an {what} before an error",
        with_an_outbox_and_an_error,
        setup=arranged,
        status=500,
        expect=ByDesign(
            ROLLED_BACK,
            NothingKept().problems,
        ),
    )


# Everything that is heard.

SESSION_EVENTS = (
    "after_begin",
    "before_flush",
    "after_flush",
    "before_commit",
    "after_commit",
    "after_rollback",
    "after_soft_rollback",
)


def hears_the_session(world):
    for event in SESSION_EVENTS:
        sa.event.listen(world.db.session, event, lambda *_, event=event: world.note(event))


def hears_statements(world):
    """All but savepoints: when they travel is nobody's business."""

    @sa.event.listens_for(world.engine, "before_cursor_execute")
    def hear(connection, cursor, statement, parameters, context, executemany):
        if "SAVEPOINT" not in statement:
            world.note(f"{statement} {parameters}")


def hears_errors(world):
    @sa.event.listens_for(world.engine, "handle_error")
    def hear(context):
        world.note(type(context.original_exception).__name__)


def reaches_for_the_connection(world):
    """Its look at a transaction that has failed must not hide the error."""

    @sa.event.listens_for(world.engine, "handle_error")
    def look(context):
        world.note([context.connection.connection is None, context.connection.info is None])


def hears_rows(world):
    for event in ("before_insert", "after_insert", "before_update", "after_update", "load", "refresh"):
        sa.event.listen(world.Payment, event, lambda *_, event=event: world.note(event))


def nothing(world):
    pass


def reads(world):
    return {"count": world.session.query(world.Payment).count() * 0}, 200


def reads_and_commits(world):
    world.session.query(world.Payment).first()
    world.commit()


def two_commits(world):
    world.pay(1)
    world.commit()
    payment = world.pay(2)
    world.commit()
    world.note(payment.amount)


def a_rollback(world):
    world.pay(1)
    world.session.flush()
    world.session.rollback()
    world.pay(2)
    world.commit()


def nested(world):
    world.pay(1)
    with world.session.begin_nested():
        world.pay(2)
    inner = world.session.begin_nested()
    world.pay(3)
    world.session.flush()
    inner.rollback()
    world.commit()


def an_error_that_is_caught(world):
    world.pay(1)
    world.commit()
    world.session.add(world.Account(name="alice", balance=1))
    with world.catching():
        world.commit()
    world.session.rollback()
    world.pay(2)
    world.commit()


def an_error(world):
    world.pay(1)
    world.session.flush()
    raise RuntimeError("no")


def uncommitted(world):
    world.pay(1)
    world.session.flush()


def a_refusal(world):
    uncommitted(world)
    return {}, 422


VIEWS = {
    nothing: 201,
    reads: 200,
    reads_and_commits: 201,
    two_commits: 201,
    a_rollback: 201,
    nested: 201,
    an_error_that_is_caught: 201,
    uncommitted: 201,
    a_refusal: 422,
    an_error: 500,
}
for arranged in (hears_the_session, hears_statements, hears_errors, hears_rows):
    what = arranged.__name__.replace("_", " ")
    for view, status in VIEWS.items():
        if arranged in {hears_errors, hears_rows} and view not in {nested, an_error_that_is_caught}:
            continue
        name = view.__name__.replace("_", " ")
        expect = EQUAL_OR_REFUSED if view is uncommitted else EQUAL
        family.add(f"{what}, {name}", view, setup=arranged, status=status, expect=expect)
    for view in (nothing, two_commits) if arranged not in {hears_errors, hears_rows} else ():
        name = view.__name__.replace("_", " ")
        family.add(
            f"{what}, {name}, in the first request of all",
            view,
            setup=arranged,
            cold=True,
        )


family.add(
    "who reaches for a failed connection", an_error_that_is_caught, setup=reaches_for_the_connection
)


@family.in_every_store()
def test_listeners_hear_the_application_and_nothing_else(hold, case, store):
    hold(case, store)
