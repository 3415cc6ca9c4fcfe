"""Locks: what a commit would free is held to the end of the operation.

What is free after ``rollback()``, as without us: ``tests.differential.tables``.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from tests.differential.harness import ByDesign, Family
from tests.differential.sentences import HELD

family = Family(pool=2)


def elsewhere(world, statement):
    """Run a statement on another connection of the engine, committed."""
    with world.engine.begin() as connection:
        result = connection.execute(sa.text(statement))
        return result.scalar() if result.returns_rows else None


def debit(world):
    world.session.query(world.Account).filter_by(name="alice").one().balance -= 10
    world.session.flush()


def read_for_update(world):
    world.session.query(world.Account).filter_by(name="alice").with_for_update().one()


def update_as_text(world):
    world.sql("update account set balance = balance - 10 where name = 'alice'")


@family()
def an_advisory_lock_rolled_back(world):
    world.sql("select pg_advisory_xact_lock(3)")
    world.note(elsewhere(world, "select pg_try_advisory_xact_lock(3)"))
    world.session.rollback()
    world.note(elsewhere(world, "select pg_try_advisory_xact_lock(3)"))
    world.pay(1)
    world.commit()


@family()
def a_lock_that_somebody_else_holds(world):
    """The lock time-out of the application strikes in both, and the view goes on."""
    world.pay(1)
    world.session.flush()
    world.sql("set local lock_timeout = '30ms'")
    with world.engine.begin() as connection:
        connection.execute(sa.text("select 1 from account where name = 'alice' for update"))
        with world.catching(DBAPIError), world.session.begin_nested():
            update_as_text(world)
    update_as_text(world)
    world.commit()


# By design: what the view committed is held until the operation ends.


def after_a_commit(lock):
    def view(world):
        world.sql("set local lock_timeout = '30ms'")
        lock(world)
        world.pay(1)
        world.commit()
        with world.catching(DBAPIError):
            world.note(
                elsewhere(world, "select balance from account where name = 'alice' for update nowait")
            )

    return view


def held(outcome):
    """Answers, rows and records are equal; the other connection found a lock."""
    found = [line for line in outcome.differences if ", notes" not in line]
    for step in outcome.protected.steps[::2]:
        if not any("55P03" in note or "False" in note for note in step.notes):
            return [*found, f"{step.label}: notes {step.notes}"]
    return found


def advisory_after_a_commit(world):
    world.sql("select pg_advisory_xact_lock(3)")
    world.pay(1)
    world.commit()
    world.note(elsewhere(world, "select pg_try_advisory_xact_lock(3)"))


for lock in (debit, read_for_update, update_as_text):
    family.add(
        f"{lock.__name__.replace('_', ' ')}, committed, and then wanted elsewhere",
        after_a_commit(lock),
        expect=ByDesign(HELD, held),
        events=False,
    )
family.add(
    "an advisory lock committed, and then wanted elsewhere",
    advisory_after_a_commit,
    expect=ByDesign(HELD, held),
    events=False,
)


@family.in_every_store()
def test_what_is_rolled_back_is_free_for_other_connections(hold, case, store):
    hold(case, store)
