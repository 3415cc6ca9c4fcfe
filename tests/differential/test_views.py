"""Views that are no program: what differs by design, what stands above, and other connections."""

from __future__ import annotations

from select import select

import sqlalchemy as sa
from psycopg2 import extensions

from flask_idempotency import current_operation
from tests.differential.harness import EQUAL, ByDesign, Either, Family, NothingKept, Refused
from tests.differential.sentences import CLOCK, DEFERRED, HELD, NOTIFIED, SNAPSHOT, UNSEEN
from tests.drivers import EACH

family, leased = Family(pool=2), Family(atomic=False)


def pay(world):
    world.pay(1)
    world.commit()


def but_for_the_notes(*expected):
    """The check of a difference that only the view's notes show: what they are with us."""

    def check(outcome):
        seen = [step.notes for step in outcome.protected.steps[::2]]
        found = [line for line in outcome.differences if ", notes" not in line]
        found += [f"notes {notes}, not {expected}" for notes in seen if notes != expected]
        return found + ["no difference at all"] * (outcome.plain.steps[0].notes == expected)

    return check


# By design: one transaction, which ends after the view


@family(expect=ByDesign(CLOCK, but_for_the_notes("True", "True", "False")))
def clocks_in_two_transactions(world):
    clocks = ("now()", "txid_current()", "clock_timestamp()")
    first = [world.sql(f"select {clock}") for clock in clocks]
    pay(world)
    for clock, value in zip(clocks, first, strict=True):
        world.note(world.sql(f"select {clock}") == value)
    pay(world)


@family(expect=ByDesign(UNSEEN, but_for_the_notes("0")))
def what_another_connection_sees_after_the_commit(world):
    pay(world)
    last = world.sql("select max(id) from payment")
    with world.engine.connect() as connection:
        query = sa.text("select count(*) from payment where id = :id")
        world.note(connection.scalar(query, {"id": last}))


@family(expect=ByDesign(HELD, but_for_the_notes("None", "False")))
def locks_that_are_wanted_elsewhere_after_the_commit(world):
    world.session.query(world.Account).filter_by(name="alice").with_for_update().one()
    world.sql("select pg_advisory_xact_lock(3)")
    pay(world)
    row = "select balance from account where name = 'alice' for update skip locked"
    for wanted in (row, "select pg_try_advisory_xact_lock(3)"):
        with world.engine.begin() as connection:
            world.note(connection.scalar(sa.text(wanted)))


@family()
def a_row_that_is_locked_and_left(world):
    world.session.query(world.Account).filter_by(name="alice").with_for_update().one()


@family(
    engine_options={"isolation_level": "REPEATABLE READ"},
    expect=ByDesign(SNAPSHOT, but_for_the_notes("0")),
)
def what_a_second_transaction_sees_at_repeatable_read(world):
    before = world.sql("select balance from account where name = 'alice'")
    world.commit()
    world.admin_run("update account set balance = balance - 1 where name = 'alice'")
    world.note(before - world.sql("select balance from account where name = 'alice'"))
    pay(world)


def listens(world):
    world.admin_run("listen paid")


def heard(world):
    """What a listener has heard since the last request, to the end: notifications keep their order."""
    world.admin_run("notify paid, 'end'")
    while [notice.payload for notice in world.admin.notifies][-1:] != ["end"]:
        assert select([world.admin], [], [], 10)[0]
        world.admin.poll()
    found = [notice.payload for notice in world.admin.notifies]
    world.admin.notifies.clear()
    return found


def heard_later(outcome):
    first, second = (step.notes for step in outcome.protected.steps[::2])
    is_later = (first, second) == (("['end']",) * 2, ("['one', 'two', 'end']", "['end']"))
    found = [line for line in outcome.differences if ", notes" not in line]
    return found + [f"{first}, {second}"] * (not is_later)


@family(setup=listens, expect=ByDesign(NOTIFIED, heard_later))
def notifications_of_three_transactions(world):
    """Two of them equal: that one arrives once."""
    world.note(heard(world))
    for payload in ("one", "one", "two"):
        world.sql(f"notify paid, '{payload}'")
        pay(world)
    world.note(heard(world))


def only_deferrable(world):
    """Constraints that wait only if they are told to."""
    world.admin_run("create table line (position int unique deferrable initially immediate)")


@family(setup=only_deferrable, status=409, expect=ByDesign(DEFERRED, NothingKept(500).problems))
def a_constraint_that_only_the_view_defers(world):
    """The view would have caught it at its commit."""
    world.sql("set constraints all deferred")
    world.sql("insert into line (position) values (1), (1)")
    with world.catching():
        pay(world)
    world.session.rollback()
    return {}, 409


# Connections and cursors of the application's own kinds


class Commenting(extensions.cursor):
    """Says in each statement where it comes from."""

    def execute(self, query, vars=None):  # noqa: A002
        query = query.decode() if isinstance(query, bytes) else query
        return super().execute(f"/* app=shop */ {query}", vars)


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
    pay(world)


family.add(
    "a cursor that puts a comment in front",
    everything,
    engine_options={"connect_args": {"cursor_factory": Commenting}},
)
LOST = Either((EQUAL, Refused(), NothingKept(503)))


def then_pays(end):
    def view(world):
        world.pay(1)
        world.session.flush()
        with world.catching():
            end(world.session)
        world.session.rollback()
        pay(world)

    return view


TERMINATE = sa.text("select pg_terminate_backend(pg_backend_pid())")
for what, end in {
    "the session is invalidated": lambda session: session().invalidate(),
    "its connection is invalidated": lambda session: session.connection().invalidate(),
    "its connection is detached": lambda session: session.connection().detach(),
    "its connection is closed": lambda session: session.connection().close(),
    "the server ends it": lambda session: session.execute(TERMINATE),
}.items():
    family.add(f"{what}, and the view goes on", then_pays(end), expect=LOST, status=None)


@leased()
def atomic_steps(world):
    """The second leaves its commit to the operation."""
    step = current_operation.step if world.protected else lambda _name, call, **_: call()
    step("pay", lambda: pay(world), atomic=True)
    step("more", lambda: world.pay(2) and None, atomic=True)
    if not world.protected:
        world.commit()


leased.add("a commit, and another above", everything, after_request=lambda world, _: world.commit())
leased.add("a write before the view", pay, before=lambda world: world.audit("before"))


@EACH
@family.each()
def test_a_view_is_as_without_us_or_differs_by_design(hold, case, driver):
    if driver == "psycopg2" or "factory" not in str(case.engine_options):  # psycopg has none of those
        hold(case)


@leased.each()
def test_a_view_that_is_not_atomic_is_as_without_us(hold, case):
    hold(case)
