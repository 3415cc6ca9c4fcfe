"""The same on SQLite, and for views that are not atomic: a short list each."""

from __future__ import annotations

import sqlalchemy as sa
from flask import g
from sqlalchemy.exc import IntegrityError

from flask_idempotency import current_operation
from tests import sessions
from tests.differential.harness import EQUAL_OR_REFUSED, ByDesign, Either, Family, NothingKept, Refused
from tests.differential.sentences import ROLLED_BACK

family = Family(stores=("sql",))


@family()
def a_commit(world):
    payment = world.pay(3)
    world.commit()
    return {"amount": payment.amount}, 201


@family(status=200)
def a_read(world):
    return {"accounts": world.session.query(world.Account).count()}, 200


@family()
def two_commits_and_a_rollback(world):
    world.pay(1)
    world.commit()
    world.pay(2)
    world.session.flush()
    world.session.rollback()
    world.pay(3)
    world.commit()


@family()
def nested_transactions(world):
    world.pay(1)
    with world.session.begin_nested():
        world.pay(2)
    nested = world.session.begin_nested()
    world.pay(3)
    world.session.flush()
    nested.rollback()
    with world.catching(), world.session.begin_nested():
        world.pay(4)
        raise RuntimeError("no")
    world.commit()


@family(status=409)
def a_conflict_that_is_answered(world):
    world.pay(1)
    world.commit()
    world.session.add(world.Account(name="alice", balance=1))
    try:
        world.commit()
    except IntegrityError:
        world.session.rollback()
        return {"error": "taken"}, 409
    return None


@family(status=500)
def an_error(world):
    world.pay(1)
    world.session.flush()
    raise RuntimeError("no")


@family(expect=EQUAL_OR_REFUSED)
def work_that_nobody_commits(world):
    world.pay(1)
    world.session.flush()


@family()
def a_value_that_cannot_be_bound(world):
    world.pay(1)
    world.session.flush()
    with world.catching(), world.session.begin_nested():
        world.pay(2)
        world.session.flush()
        world.pay(3, "a\ud800b")
        world.session.flush()
    world.pay(4)
    world.commit()


@family()
def a_value_that_cannot_be_bound_after_a_nested_rollback(world):
    nested = world.session.begin_nested()
    world.pay(1)
    world.session.flush()
    nested.rollback()
    with world.catching():
        world.sql("insert into audit (text) values (:value)", value=object())
    world.session.rollback()
    world.pay(2)
    world.commit()


@family()
def a_statement_that_does_not_parse(world):
    world.pay(1)
    world.commit()
    with world.catching():
        world.sql("selekt 1")
    world.session.rollback()
    world.pay(2)
    world.commit()


def committed(world):
    world.pay(1)
    world.commit()


def flushed(world):
    world.pay(1)
    world.session.flush()


def failed(world):
    committed(world)
    return {"error": "no"}, 503


def commit_after(world, response):
    world.commit()


def decorator(world, call):
    response = call()
    world.commit()
    return response


def unit_of_work(world, call):
    with world.session.begin():
        return call()


def fails(world, call):
    response = call()
    if world.view_ran:
        world.session.rollback()
        raise RuntimeError("no")
    return response


family.add(
    "a commit that is followed by a 503",
    failed,
    status=503,
    expect=ByDesign(ROLLED_BACK, NothingKept().problems),
)
family.add("a commit in after_request", flushed, after_request=commit_after)
family.add("a commit in a decorator", flushed, above=decorator)
family.add("a unit of work above the view", flushed, above=unit_of_work)
family.add("an error in a decorator", flushed, above=fails, status=500)


def load(world):
    g.user = world.session.query(world.Account).filter_by(name="alice").one()


def change(world):
    load(world)
    g.user.balance -= 10


def write(world):
    world.audit("before")
    world.session.flush()


@family(before=load)
def an_object_read_before_the_view(world):
    g.user.balance -= 10
    world.commit()
    return {"balance": g.user.balance}, 201


family.add("a change not flushed before the view", committed, before=change)
family.add("a write before the view", committed, before=write, expect=Refused("before"))


# A plain session is the thread's, in whatever context.
BESIDE = EQUAL_OR_REFUSED if sessions.usual == "plain" else Refused("session")


def helper_reads(world):
    with world.app.app_context():
        world.note(world.session.query(world.Account).count())


@family(pool=2)
def a_helper_after_a_read(world):
    world.note(world.session.query(world.Account).count())
    helper_reads(world)
    committed(world)


@family(pool=2)
def a_helper_after_a_commit(world):
    committed(world)
    helper_reads(world)
    committed(world)


@family(pool=2, expect=BESIDE)
def a_helper_after_uncommitted_work_of_core(world):
    world.session.execute(sa.insert(world.Payment.__table__).values(amount=1))
    helper_reads(world)
    world.commit()


# A plain session's work on SQLite is there although the helper's context has removed the session: the
# driver sends no BEGIN before a savepoint, so the release commits.
@family(pool=2, expect=BESIDE, stores=() if sessions.usual == "plain" else ("sql",))
def a_helper_after_a_nested_transaction_that_was_kept(world):
    with world.session.begin_nested():
        world.pay(1)
    helper_reads(world)
    world.commit()


@family(expect=Either((Refused("begins or ends|ended"), NothingKept(500))), status=None)
def commit_as_text(world):
    world.pay(1)
    world.session.flush()
    world.sql("commit")


@family.in_every_store()
def test_on_sqlite_the_session_is_as_without_us(hold, case, store):
    hold(case, store)


leased = Family(atomic=False, stores=("postgres", "sql"))


def step(world, name, function):
    """A step of the operation; in the plain application a call."""
    return current_operation.step(name, function, atomic=True) if world.protected else function()


leased.add("a commit", a_commit)
leased.add("a read", a_read, status=200)
leased.add("two commits and a rollback", two_commits_and_a_rollback)
leased.add("nested transactions", nested_transactions)
leased.add("a conflict that is answered", a_conflict_that_is_answered, status=409)
leased.add("work that nobody commits", work_that_nobody_commits)
leased.add("an error, whose answer is kept", an_error, status=500)
leased.add("a commit that is followed by a 503, which is kept", failed, status=503)
leased.add("a commit in after_request", flushed, after_request=commit_after)
leased.add("an object read before the view", an_object_read_before_the_view, before=load)
leased.add("a value that cannot be bound", a_value_that_cannot_be_bound)


@leased()
def an_atomic_step(world):
    def pay():
        world.pay(1)
        world.commit()
        return 1

    return {"step": step(world, "pay", pay)}, 201


@leased()
def an_atomic_step_that_says_nothing_of_a_commit(world):
    def pay():
        world.pay(1)
        if not world.protected:
            world.commit()

    return {"step": step(world, "pay", pay)}, 201


@leased(status=409, events=False)
def an_atomic_step_that_fails(world):
    def pay():
        world.pay(1)
        world.session.flush()
        raise RuntimeError("no")

    with world.catching(RuntimeError):
        step(world, "pay", pay)
    world.session.rollback()
    return {"error": "no"}, 409


@leased()
def an_atomic_step_between_commits(world):
    world.pay(1)
    world.commit()

    def pay():
        world.pay(2)
        world.commit()
        return 2

    step(world, "pay", pay)
    world.pay(3)
    world.commit()


@leased.in_every_store()
def test_in_a_view_that_is_not_atomic_the_session_is_as_without_us(hold, case, store):
    hold(case, store)
