"""The differences that are there on purpose, each with its sentence in the guarantees."""

from __future__ import annotations

from select import select

import sqlalchemy as sa

from tests.differential.harness import ByDesign, Family
from tests.differential.sentences import CLOCK, NOTIFIED, NOTIFIED_ONCE, SNAPSHOT, UNSEEN

family = Family(pool=2)


def same_but_for_the_notes(*expected):
    """The check of a difference that only the view's notes show: what they are with us."""

    def check(outcome):
        found = [line for line in outcome.differences if ", notes" not in line]
        protected = [step.notes for step in outcome.protected.steps[::2]]
        if protected != [expected, expected]:
            found.append(f"notes {protected}, not {expected}")
        if expected in [step.notes for step in outcome.plain.steps[::2]]:
            found.append("no difference at all")
        return found

    return check


def in_two_transactions(expression):
    def view(world):
        first = world.sql(f"select {expression}")
        world.pay(1)
        world.commit()
        world.note(world.sql(f"select {expression}") == first)
        world.pay(2)
        world.commit()

    return view


for expression in ("now()", "txid_current()", "pg_current_xact_id()"):
    family.add(
        f"{expression} in two transactions",
        in_two_transactions(expression),
        expect=ByDesign(CLOCK, same_but_for_the_notes("True")),
    )
family.add("clock_timestamp() in two transactions", in_two_transactions("clock_timestamp()"))


@family(expect=ByDesign(UNSEEN, same_but_for_the_notes("0")))
def what_another_connection_sees_after_the_commit(world):
    world.pay(1)
    world.commit()
    with world.engine.connect() as connection:
        query = sa.text("select least(count(*), 1) from payment where amount = 1 and id = :id")
        last = world.sql("select max(id) from payment")
        world.note(connection.scalar(query, {"id": last}))


@family(expect=ByDesign(NOTIFIED, same_but_for_the_notes("[]")))
def what_a_listener_hears_after_the_commit(world):
    with world.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        driver = connection.connection.driver_connection
        connection.execute(sa.text("listen paid"))
        world.sql("notify paid, 'yes'")
        world.pay(1)
        world.commit()
        if not world.protected:
            arrived(driver, 1)
        connection.execute(sa.text("unlisten *"))
        world.note([notice.payload for notice in driver.notifies])
        driver.notifies.clear()


def arrived(driver, number):
    """Wait until so many notifications are there."""
    while len(driver.notifies) < number and select([driver], [], [], 10)[0]:
        driver.poll()
    return [notice.payload for notice in driver.notifies]


def a_listener_outside(world):
    """What arrives, in all: read when the next request comes."""
    world.admin_run("listen paid")
    world.admin.notifies.clear()


@family(prelude=a_listener_outside)
def what_a_listener_hears_after_the_request(world):
    world.note(arrived(world.admin, world.here.get("runs", 0)))
    world.here["runs"] = world.here.get("runs", 0) + 1
    world.sql("notify paid, 'yes'")
    world.pay(1)
    world.commit()


def heard_outside(world):
    """What a listener has heard since the last request, to the end: notifications keep their order."""
    world.admin_run("notify paid, 'end'")
    heard = []
    while heard[-1:] != ["end"]:
        heard = arrived(world.admin, len(heard) + 1)
    world.admin.notifies.clear()
    return heard


def notifying(*payloads):
    def view(world):
        world.note(heard_outside(world))
        for payload in payloads:
            world.sql(f"notify paid, '{payload}'")
            world.pay(1)
            world.commit()

    return view


def heard_once(outcome):
    found = [line for line in outcome.differences if ", notes" not in line]
    for seen, times in ((outcome.plain, 3), (outcome.protected, 1)):
        last = seen.steps[2].notes
        if last != (str([*["paid"] * times, "end"]),):
            found.append(f"heard {last}")
    return found


family.add(
    "a notification that is sent in three transactions",
    notifying("paid", "paid", "paid"),
    prelude=a_listener_outside,
    expect=ByDesign(NOTIFIED_ONCE, heard_once),
)
family.add(
    "three notifications in three transactions",
    notifying("one", "two", "three"),
    prelude=a_listener_outside,
)


@family(
    engine_options={"isolation_level": "REPEATABLE READ"},
    expect=ByDesign(SNAPSHOT, same_but_for_the_notes("0")),
)
def what_a_second_transaction_sees_at_repeatable_read(world):
    before = world.sql("select balance from account where name = 'alice'")
    world.commit()
    world.admin_run("update account set balance = balance - 1 where name = 'alice'")
    world.note(before - world.sql("select balance from account where name = 'alice'"))
    world.pay(1)
    world.commit()


@family.in_every_store()
def test_a_difference_by_design_is_this_one_and_is_written_down(hold, case, store):
    hold(case, store)
