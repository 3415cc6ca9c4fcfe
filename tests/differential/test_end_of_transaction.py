"""What ends with a transaction ends with the view's own ``commit()``; what fails there fails there.

Settings, and what is temporary: ``tests.differential.tables``.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError

from flask_idempotency import current_operation
from flask_idempotency.core.errors import sqlstate
from tests.differential.harness import EQUAL_OR_REFUSED, ByDesign, Family, NothingKept
from tests.differential.schemas import (
    deferred_constraints,
    schema_per_tenant,
)
from tests.differential.sentences import DEFERRED, TWICE
from tests.drivers import EACH

family = Family()


@family(setup=schema_per_tenant)
def a_translate_map_of_one_statement(world):
    options = {"schema_translate_map": {None: "tenant_a"}}
    world.session.execute(
        sa.insert(world.Payment.__table__).values(amount=1), execution_options=options
    )
    world.session.execute(sa.insert(world.Payment.__table__).values(amount=2))
    world.commit()


@family()
def an_option_of_the_connection_until_the_commit(world):
    world.session.connection(execution_options={"stream_results": True})
    world.note(world.session.connection().get_execution_options().get("stream_results"))
    world.commit()
    world.note(world.session.connection().get_execution_options().get("stream_results"))
    world.pay(1)
    world.commit()


# A cursor with hold that was there before the view.


def holds_a_cursor(world):
    if not world.sql("select count(*) from pg_cursors where name <> ''"):
        world.sql("declare kept cursor with hold for select name from account order by 1")
    world.commit()


def reads_the_held_cursor(world, response):
    world.session.rollback()
    world.note(world.sql("fetch absolute 1 from kept"))
    world.sql("close kept")
    world.commit()


def pays_beside_a_cursor(world):
    world.sql("declare rows cursor for select * from account")
    world.note(world.sql("fetch 1 from rows") is not None)
    world.pay(1)
    world.commit()


for view in (pays_beside_a_cursor, lambda world: world.pay(1) and world.commit()):
    family.add(
        f"a cursor with hold opened before the view, {view.__name__.strip('<>').replace('_', ' ')}",
        view,
        before=holds_a_cursor,
        after_request=reads_the_held_cursor,
    )


def reads_and_holds_a_cursor(world):
    holds_a_cursor(world)
    world.sql("select 1")


family.add(
    "a cursor with hold opened before the view, and a read",
    pays_beside_a_cursor,
    before=reads_and_holds_a_cursor,
    after_request=reads_the_held_cursor,
)
# Constraints that are asked at the commit.


def two_of_one_number(world):
    world.pay(1)
    for _ in range(2):
        world.sql("insert into invoice (number) values (1)")


def line_of_nothing(world):
    world.pay(1)
    world.sql("insert into line (invoice_id) values (999999)")


def books_out_of_balance(world):
    world.session.query(world.Account).filter_by(name="alice").one().balance -= 10


def caught(write):
    """The application's own way to a 409."""

    def view(world):
        write(world)
        try:
            world.commit()
        except DBAPIError:
            world.session.rollback()
            return {"error": "taken"}, 409
        return None

    return view


def not_caught(write):
    def view(world):
        write(world)
        world.commit()

    return view


def caught_then_repaired(write):
    def view(world):
        with world.catching(DBAPIError):
            write(world)
            world.commit()
        world.session.rollback()
        world.pay(2)
        world.commit()

    return view


def caught_nested(write):
    """A nested transaction asks nothing; the commit does."""

    def view(world):
        with world.catching(DBAPIError), world.session.begin_nested():
            write(world)
        with world.catching(DBAPIError):
            world.commit()
        world.session.rollback()
        world.pay(2)
        world.commit()

    return view


def flushed_only(write):
    def view(world):
        write(world)
        world.session.flush()

    return view


for write in (two_of_one_number, line_of_nothing, books_out_of_balance):
    what = write.__name__.replace("_", " ")
    deferred = {"setup": deferred_constraints}
    family.add(f"{what}, caught", caught(write), status=409, **deferred)
    family.add(f"{what}, not caught", not_caught(write), status=500, **deferred)
    family.add(f"{what}, caught and gone on", caught_then_repaired(write), **deferred)
    family.add(f"{what}, nested", caught_nested(write), **deferred)
    family.add(f"{what}, never committed", flushed_only(write), expect=EQUAL_OR_REFUSED, **deferred)


@family(setup=deferred_constraints)
def an_order_that_is_right_at_the_commit_only(world):
    world.sql("insert into invoice (number) values (1), (2)")
    world.sql("update invoice set number = 3 - number")
    world.sql("insert into line (invoice_id) values (1000000)")
    world.sql("insert into invoice (id, number) values (1000000, 7)")
    world.pay(1)
    world.commit()
    world.sql("delete from line")
    world.sql("delete from invoice")
    world.commit()


@family(setup=deferred_constraints, status=409)
def the_second_commit_fails(world):
    world.pay(1)
    world.commit()
    two_of_one_number(world)
    try:
        world.commit()
    except IntegrityError:
        world.session.rollback()
        return {"error": "taken"}, 409
    return None


@family(setup=deferred_constraints)
def constraints_are_deferred_again_after_a_commit(world):
    for base in (0, 10):
        world.sql("insert into invoice (number) values (:a), (:b)", a=base + 1, b=base + 2)
        world.sql(
            "update invoice set number = :sum - number where number > :a", sum=2 * base + 3, a=base
        )
        world.commit()
    world.sql("delete from invoice")
    world.pay(1)
    world.commit()


def positions(world):
    """Two lines change places, which an immediate constraint does not allow row by row."""
    world.sql("insert into line (position) values (1), (1)")
    world.sql("update line set position = 2 where id = (select min(id) from line)")


@family(setup=deferred_constraints)
def constraints_set_deferred_until_the_commit(world):
    world.sql("set constraints all deferred")
    positions(world)
    world.pay(1)
    world.commit()
    world.note(world.sql("select count(*) from line"))


def constraints_set_deferred_and_then_another_write(world):
    constraints_set_deferred_until_the_commit(world)
    with world.catching(DBAPIError):
        positions(world)
    world.session.rollback()
    world.pay(1)
    world.commit()


def only_deferrable(world):
    """Constraints that wait only if they are told to."""
    deferred_constraints(world)
    world.admin_run("drop trigger books on account")
    world.admin_run("alter table invoice drop constraint one_number")
    world.admin_run("alter table line drop constraint of_invoice")


def equal_but_for_the_notes(outcome):
    return [line for line in outcome.differences if ", notes" not in line]


@family(setup=only_deferrable, events=False, expect=ByDesign(DEFERRED, equal_but_for_the_notes))
def constraints_set_deferred_where_none_is_by_definition(world):
    constraints_set_deferred_and_then_another_write(world)


@family(setup=only_deferrable, status=409, expect=NothingKept(500))
def a_constraint_set_deferred_that_fails_where_none_is_by_definition(world):
    """The view would have caught it at its commit."""
    world.sql("set constraints all deferred")
    world.sql("insert into line (position) values (1), (1)")
    world.pay(1)
    try:
        world.commit()
    except IntegrityError:
        world.session.rollback()
        return {}, 409
    return {}, 201


def only_deferred(world):
    """Constraints that are asked at the commit, and no others."""
    deferred_constraints(world)
    world.admin_run("alter table line drop constraint one_position")


@family(setup=only_deferred)
def constraints_are_deferred_again_where_all_are_by_definition(world):
    constraints_are_deferred_again_after_a_commit(world)


def a_trigger_that_writes(world):
    """A row for each payment, written at the commit."""
    world.admin_run(
        "create table journal (amount int);"
        "create function book() returns trigger language plpgsql as $$ begin"
        " insert into journal values (new.amount); return null; end $$;"
        "create constraint trigger booked after insert on payment deferrable initially deferred"
        " for each row execute function book()"
    )


@family(setup=a_trigger_that_writes)
def a_deferred_trigger_that_writes(world):
    """What it wrote is read after the operation: see "The same, with a difference" in the docs."""
    for amount in (1, 2):
        world.pay(amount)
        world.commit()


@family(setup=deferred_constraints)
def constraints_set_in_a_nested_transaction_that_is_rolled_back(world):
    nested = world.session.begin_nested()
    world.sql("set constraints all immediate")
    nested.rollback()
    with world.catching(DBAPIError):
        two_of_one_number(world)
        world.session.flush()
        world.note("still deferred")
    world.session.rollback()
    world.pay(1)
    world.commit()


@family(setup=deferred_constraints, atomic=False, status=None)
def a_deferred_constraint_in_an_atomic_step(world):
    def write():
        two_of_one_number(world)
        try:
            world.commit()
        except IntegrityError:
            world.session.rollback()
            return 409
        return 201

    if world.protected:
        return {}, current_operation.step("write", write, atomic=True)
    return {}, write()


# Conflicts.


def conflict(world, times):
    """Somebody changes the row between the view's read and its write."""
    account = world.session.query(world.Account).filter_by(name="alice").one()
    if world.here.setdefault("conflicts", 0) < times:
        world.here["conflicts"] += 1
        world.admin_run("update account set balance = balance - 1 where name = 'alice'")
    account.balance -= 10
    world.pay(10)
    world.commit()


def with_retries(world):
    """The retry loop that the manual of PostgreSQL asks for."""
    for _ in range(3):
        try:
            conflict(world, 1)
        except DBAPIError as error:
            world.note(sqlstate(error.orig))
            world.session.rollback()
        else:
            return {"tried": True}, 201
    return {"error": "busy"}, 409


def with_a_refusal(world):
    try:
        conflict(world, 1)
    except DBAPIError:
        world.session.rollback()
        return {"error": "busy"}, 409
    return None


def without_retries(world):
    conflict(world, 1)


def conflict_then_done(outcome):
    """503 for the first try; nothing is kept; the retry of the same key runs again, and succeeds."""
    steps, found = outcome.protected.steps, []
    first, again = steps[0].reply, steps[1].reply
    if first.status != 503 or "transaction-conflict" not in first.body:
        found.append(f"key 1: {first}")
    if steps[0].rows["payment"]:
        found.append(f"key 1: rows {steps[0].rows}")
    if again.status != 201 or again.replayed or len(steps[1].rows["payment"]) != 1:
        found.append(f"key 1 again: {again}, rows {steps[1].rows}")
    if steps[2].reply.status != 201 or not steps[3].reply.replayed:
        found.append(f"key 2: {steps[2].reply}, {steps[3].reply}")
    return found


for level in ("REPEATABLE READ", "SERIALIZABLE"):
    by_design = {
        "engine_options": {"isolation_level": level},
        "expect": ByDesign(TWICE, conflict_then_done),
    }
    family.add(f"a retry loop in the view at {level}", with_retries, **by_design)
    family.add(f"a conflict that the view answers at {level}", with_a_refusal, status=409, **by_design)
    family.add(
        f"a conflict that the view lets out at {level}", without_retries, status=500, **by_design
    )
family.add("a retry loop in the view at READ COMMITTED", with_retries)
family.add(
    "a retry loop without a conflict at SERIALIZABLE",
    lambda world: conflict(world, 0),
    engine_options={"isolation_level": "SERIALIZABLE"},
)


@family(engine_options={"isolation_level": "REPEATABLE READ"}, expect=EQUAL_OR_REFUSED)
def a_second_transaction_at_repeatable_read_sees_what_others_did(world):
    """The operation's snapshot stays; a view that would notice cannot be imitated."""
    account = world.session.query(world.Account).filter_by(name="bob").one()
    world.note(account.balance >= 0)
    world.pay(1)
    world.commit()
    world.pay(2)
    world.commit()


@EACH
@family.in_every_store()
def test_what_ends_with_a_transaction_ends_with_the_views_commit(hold, case, store):
    hold(case, store)
