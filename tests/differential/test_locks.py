"""Locks: free after ``rollback()``, as without us; what a commit would free is held to the end."""

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


def debit_elsewhere(world):
    elsewhere(world, "update account set balance = balance - 1 where name = 'alice'")


def debit(world):
    world.session.query(world.Account).filter_by(name="alice").one().balance -= 10
    world.session.flush()


def read_for_update(world):
    world.session.query(world.Account).filter_by(name="alice").with_for_update().one()


def lock_the_table(world):
    world.sql("lock table account in exclusive mode")


def update_as_text(world):
    world.sql("update account set balance = balance - 10 where name = 'alice'")


def delete(world):
    world.session.delete(world.session.query(world.Account).filter_by(name="alice").one())
    world.session.flush()


LOCKS = (debit, read_for_update, lock_the_table, update_as_text, delete)


def rolled_back(lock):
    def view(world):
        lock(world)
        world.session.rollback()
        debit_elsewhere(world)
        world.pay(1)
        world.commit()

    return view


def rolled_back_nested(lock):
    def view(world):
        world.pay(1)
        nested = world.session.begin_nested()
        lock(world)
        nested.rollback()
        debit_elsewhere(world)
        world.commit()

    return view


for lock in LOCKS:
    what = lock.__name__.replace("_", " ")
    family.add(f"{what}, rolled back", rolled_back(lock))
    family.add(f"{what}, rolled back in a nested transaction", rolled_back_nested(lock))


@family()
def a_row_locked_in_a_nested_transaction_that_failed(world):
    world.pay(1)
    with world.catching(), world.session.begin_nested():
        debit(world)
        raise RuntimeError("no")
    debit_elsewhere(world)
    world.commit()


@family()
def a_row_locked_when_a_statement_failed(world):
    debit(world)
    with world.catching(DBAPIError):
        world.sql("insert into account (name, balance) values ('bob', 1)")
    world.session.rollback()
    debit_elsewhere(world)
    world.pay(1)
    world.commit()


@family()
def a_row_locked_when_a_value_could_not_be_bound(world):
    debit(world)
    with world.catching(ValueError):
        world.audit("a\0b")
        world.session.flush()
    world.session.rollback()
    debit_elsewhere(world)
    world.pay(1)
    world.commit()


@family()
def a_row_locked_and_the_session_closed(world):
    debit(world)
    world.session.close()
    debit_elsewhere(world)
    world.pay(1)
    world.commit()


@family()
def a_row_locked_and_the_session_removed(world):
    debit(world)
    world.session.remove()
    debit_elsewhere(world)
    world.pay(1)
    world.commit()


@family()
def a_row_locked_in_a_helper_that_does_not_commit(world):
    with world.app.app_context():
        debit(world)
    debit_elsewhere(world)
    world.pay(1)
    world.commit()


@family()
def two_nested_transactions_of_which_the_outer_is_rolled_back(world):
    outer = world.session.begin_nested()
    with world.session.begin_nested():
        debit(world)
    outer.rollback()
    debit_elsewhere(world)
    world.pay(1)
    world.commit()


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
