"""Who commits what the view wrote: a decorator, an ``after_request`` function, a unit of work.

And who rolls it back, or fails, up there. What a view leaves uncommitted and nobody commits is undone.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import sqlalchemy as sa
from flask import after_this_request, g, jsonify, make_response
from sqlalchemy.exc import IntegrityError

from tests.differential.harness import (
    EQUAL,
    EQUAL_OR_REFUSED,
    ByDesign,
    Either,
    Equal,
    Family,
    NothingKept,
    Refused,
)
from tests.differential.schemas import deferred_constraints
from tests.differential.sentences import KEPT, ROLLED_BACK

family = Family()


def flushed(world):
    world.pay(1)
    world.session.flush()


def pending(world):
    world.pay(1)


def by_core(world):
    world.session.execute(sa.insert(world.Payment.__table__).values(amount=1))


def in_a_nested_transaction(world):
    with world.session.begin_nested():
        world.pay(1)


def partly_committed(world):
    world.pay(1)
    world.commit()
    world.pay(2)
    world.session.flush()


def committed(world):
    world.pay(1)
    world.commit()


def with_a_taken_note(world):
    """Not flushed yet: it is the commit above that fails."""
    world.pay(1)
    world.session.flush()
    world.pay(2, "taken")


def take_a_note(world):
    world.admin_run("insert into payment (amount, note) values (0, 'taken')")


VIEWS = (flushed, pending, by_core, in_a_nested_transaction, partly_committed, committed)


# Above.


def commit_after(world, response):
    world.commit()


def commit_in_teardown(world, error):
    world.commit()


def commit_after_success(world, response):
    if response.status_code < 400:
        world.commit()
    else:
        world.session.rollback()


def decorator(world, call):
    response = call()
    world.commit()
    return response


def unit_of_work(world, call):
    with world.session.begin():
        return call()


def transactional(world, call):
    try:
        response = call()
        world.commit()
    except Exception:
        world.session.rollback()
        raise
    return response


def name(function):
    return function.__name__.replace("_", " ")


for view in VIEWS:
    family.add(
        f"a view that wrote {name(view)}, after_request commits",
        view,
        after_request=commit_after,
    )
    family.add(f"a view that wrote {name(view)}, a decorator commits", view, above=decorator)
    expect = EQUAL if view is committed else Refused("nobody committed")
    family.add(f"a view that wrote {name(view)}, and nobody commits", view, expect=expect)
for view in (flushed, pending, committed):
    family.add(f"a view that wrote {name(view)}, a transactional decorator", view, above=transactional)
for view in (flushed, pending, committed):
    family.add(
        f"a view that wrote {name(view)}, teardown_request commits",
        view,
        teardown=commit_in_teardown,
        expect=EQUAL_OR_REFUSED,
    )
for view in (flushed, pending, in_a_nested_transaction):
    family.add(
        f"a view that wrote {name(view)}, inside with session.begin()",
        view,
        above=unit_of_work,
    )
family.add("a view that commits inside with session.begin()", committed, above=unit_of_work)


def early_commit(world):
    """Registered before the extension, whose functions would then not be the last to run."""

    @world.app.after_request
    def commit(response):
        world.commit()
        return response


def blueprint_commit(world):
    world.app.after_request_funcs.setdefault(None, []).append(
        lambda response: world.commit() or response
    )


def teardown_of_the_context(world):
    @world.app.teardown_appcontext
    def commit(_error):
        if world.here.get("commits"):
            world.commit()


family.add("a function registered before the extension commits", flushed, early=early_commit)
family.add("a function registered last commits", flushed, setup=blueprint_commit)


@family(setup=teardown_of_the_context, expect=EQUAL_OR_REFUSED)
def teardown_appcontext_commits(world):
    world.here["commits"] = True
    flushed(world)


@family()
def after_this_request_commits(world):
    @after_this_request
    def commit(response):
        world.commit()
        return response

    flushed(world)


@family(setup=deferred_constraints, status=500)
def after_this_request_fails(world):
    @after_this_request
    def commit(_response):
        world.session.rollback()
        raise RuntimeError("no")

    flushed(world)


def open_a_unit(world):
    world.session.begin()


def count_before(world):
    g.before = world.session.query(world.Payment).count()


family.add(
    "a unit of work begun before the view, committed after it",
    pending,
    before=open_a_unit,
    after_request=commit_after,
)
family.add(
    "a read before the view, and a commit after it",
    flushed,
    before=count_before,
    after_request=commit_after,
)


def add_before(world):
    world.audit("before")


def audit_after(world, response):
    """An audit row for each request, also for a replay."""
    world.audit(f"answered {response.status_code}")
    world.commit()


def audit_after_a_savepoint(world, response):
    """What is undone of this is no work of the view."""
    with suppress(LookupError), world.session.begin_nested():
        world.audit("undone")
        world.session.flush()
        raise LookupError
    world.commit()


def audit_of_the_view(world, response):
    if world.view_ran:
        world.audit("the view ran")
        world.commit()


family.add(
    "an object added before the view, a commit after it",
    flushed,
    before=add_before,
    after_request=commit_after,
)
for view in (flushed, committed):
    family.add(
        f"a view that wrote {name(view)}, and an audit row for each request",
        view,
        after_request=audit_after,
    )
    family.add(
        f"a view that wrote {name(view)}, and an audit row for each run",
        view,
        after_request=audit_of_the_view,
    )


family.add(
    "a view that wrote flushed, and a savepoint that is rolled back before the commit above",
    flushed,
    after_request=audit_after_a_savepoint,
)


@family(after_request=commit_after)
def a_write_by_the_drivers_cursor_that_is_committed_above(world):
    with world.session.connection().connection.cursor() as cursor:
        cursor.execute("insert into audit (text) values ('by the driver')")


family.add(
    "a tenant set before a view that only reads, and asked for above it",
    lambda world: world.note(world.session.query(world.Payment).count()),
    before=lambda world: world.sql("set local app.tenant = 'a'"),
    after_request=lambda world, _response: world.show("app.tenant"),
)


@family(status=409)
def a_refusal_after_a_statement_that_failed(world):
    """Nobody has rolled back: all that the view did is undone."""
    flushed(world)
    with world.catching():
        world.sql("select 1 / 0")
    return {"error": "no"}, 409


@family(status=500, seed=take_a_note, after_request=commit_after, events=False)
def a_flush_that_failed_and_a_commit_above(world):
    """Which asks for a rollback first."""
    with_a_taken_note(world)
    with world.catching():
        world.session.flush()


@family(status=409, after_request=commit_after)
def a_refusal_of_the_view_with_a_row_committed_above(world):
    world.audit("refused")
    return {"error": "no"}, 409


@family(status=409, after_request=commit_after_success)
def a_refusal_of_the_view_rolled_back_above(world):
    flushed(world)
    return {"error": "no"}, 409


@dataclass(frozen=True)
class EqualAnswers:
    """Equal, but that a retry may run again what answered without a commit."""

    def problems(self, outcome):
        found = [
            line for line in outcome.differences if ", replayed" not in line and "heard" not in line
        ]
        return [line for line in found if not line.startswith("records")]


def rollback_after(world, response):
    world.session.rollback()


def remove_after(world, response):
    world.session.remove()


def read_after(world, response):
    response.headers["X-Seen"] = str(world.session.query(world.Payment).count())
    if world.view_ran:
        world.note(g.payment.amount)


for view in (flushed, committed):
    for above in (rollback_after, remove_after):
        family.add(
            f"a view that wrote {name(view)}, {name(above)}",
            view,
            after_request=above,
            expect=EQUAL if view is committed else Either((EQUAL, EqualAnswers(), Refused())),
        )


@family(after_request=read_after)
def after_request_reads_what_the_view_committed(world):
    g.payment = world.pay(3)
    world.commit()


def read_in_teardown(world, error):
    world.note(world.session.query(world.Payment).count())


@family(teardown=read_in_teardown)
def teardown_reads_what_the_view_committed(world):
    committed(world)


@family(after_request=read_after, expect=EQUAL_OR_REFUSED)
def after_request_reads_what_the_view_flushed(world):
    g.payment = world.pay(3)
    world.session.flush()


# Errors above.


class Over(Exception):
    """A budget is."""


def budget(world, call):
    """A transactional decorator that finds something wrong after the view."""
    response = call()
    if world.view_ran:
        world.session.rollback()
        raise Over
    return response


def handled_above(world, call):
    try:
        with world.session.begin():
            return call()
    except Over:
        return jsonify(error="over"), 422


def handled_over(world):
    @world.app.errorhandler(Over)
    def answer(_error):
        return {"error": "over"}, 422


def over(world):
    flushed(world)
    raise Over


def fail_after(world, response):
    if world.view_ran:
        raise RuntimeError("no")


for view in (flushed, pending):
    family.add(
        f"a view that wrote {name(view)}, a decorator raises after it", view, above=budget, status=500
    )
    family.add(
        f"a view that wrote {name(view)}, after_request raises",
        view,
        after_request=fail_after,
        status=500,
    )
family.add("a view that raises inside a transactional decorator", over, above=transactional, status=500)
family.add("a view that raises inside with session.begin()", over, above=unit_of_work, status=500)
family.add(
    "an error that a decorator turns into an answer",
    over,
    above=handled_above,
    status=422,
    expect=EqualAnswers(),
)
family.add(
    "an error that a handler turns into an answer below a decorator",
    over,
    above=transactional,
    setup=handled_over,
    status=422,
    expect=EqualAnswers(),
)

for above in (
    {"above": decorator},
    {"above": unit_of_work},
    {"above": transactional},
    {"after_request": commit_after},
):
    where = name(*above.values())
    family.add(
        f"a unique note that is taken, found by {where}",
        with_a_taken_note,
        events=False,
        seed=take_a_note,
        status=500,
        **above,
    )


def commit_or_conflict(world, response):
    try:
        world.commit()
    except IntegrityError:
        world.session.rollback()
        return make_response({"error": "taken"}, 409)
    return response


@dataclass(frozen=True)
class RowsAndRecordsAgree:
    """There are as many payments as there are keys that replay a 201."""

    def problems(self, outcome):
        found = []
        for first, again in zip(*[iter(outcome.protected.steps)] * 2, strict=True):
            if (first.reply.status == 201) != (again.reply.status == 201):
                found.append(f"{first.label}: answered {first.reply}, and again {again.reply}")
        kept = sum(step.reply.status == 201 for step in outcome.protected.steps[1::2])
        before = len(outcome.protected.rows["payment"])
        paid = len(outcome.protected.steps[-1].rows["payment"]) - before
        if paid != kept:
            found.append(f"{paid} payments, and {kept} keys that replay a 201")
        return found


family.add(
    "a conflict that after_request answers",
    with_a_taken_note,
    seed=take_a_note,
    after_request=commit_or_conflict,
    status=409,
    expect=Either((RowsAndRecordsAgree(), Refused())),
)


def invoice_twice(world):
    """Two invoices of one number, which is found at the commit."""
    for _ in range(2):
        world.sql("insert into invoice (number) values (1)")


for above in ({"above": decorator}, {"above": unit_of_work}, {"after_request": commit_after}):
    where = name(*above.values())
    family.add(
        f"a deferred unique number that is taken, found by {where}",
        invoice_twice,
        events=False,
        setup=deferred_constraints,
        status=500,
        **above,
    )


GONE = ByDesign(ROLLED_BACK, NothingKept().problems)


def kept_all_the_same(outcome):
    """One payment for each key: the first answer failed above the view, the retry gets the view's."""
    steps = outcome.protected.steps
    found = [] if steps[0].reply.status == steps[2].reply.status == 500 else ["no error at all"]
    if [len(step.rows["payment"]) for step in steps] != [1, 1, 2, 2]:
        found.append(f"rows {[step.rows['payment'] for step in steps]}")
    if not (steps[1].reply.replayed and steps[3].reply.replayed):
        found.append(f"retries {steps[1].reply}, {steps[3].reply}")
    return found


GONE_OR_KEPT = Either((GONE, ByDesign(KEPT, kept_all_the_same)))


def failed(world):
    committed(world)
    return {"error": "no"}, 503


def unauthorized(world):
    committed(world)
    return {"error": "who"}, 401


def raised(world):
    committed(world)
    raise RuntimeError("no")


family.add(
    "a commit of the view, and then after_request raises",
    committed,
    after_request=fail_after,
    status=500,
    expect=GONE_OR_KEPT,
)
family.add(
    "a commit of the view, and then a decorator raises",
    committed,
    above=budget,
    status=500,
    expect=GONE_OR_KEPT,
)
family.add("a commit of the view, and then it answers 503", failed, status=503, expect=GONE)
family.add("a commit of the view, and then it answers 401", unauthorized, status=401, expect=GONE)
family.add("a commit of the view, and then it raises", raised, status=500, expect=GONE)


@family(status=503, after_request=commit_after, expect=GONE)
def a_503_whose_row_after_request_commits(world):
    flushed(world)
    return {"error": "no"}, 503


@family(status=403, above=decorator, expect=GONE)
def a_403_whose_row_a_decorator_commits(world):
    flushed(world)
    return {"error": "no"}, 403


# Errors that the application's own handlers answer, with work of theirs.


def audited(world):
    @world.app.errorhandler(Over)
    def answer(_error):
        world.session.rollback()
        world.audit("over")
        world.commit()
        return {"error": "over"}, 409


def committing(world):
    @world.app.errorhandler(Over)
    def answer(_error):
        world.commit()
        return {"error": "over"}, 409


family.add(
    "a handler that rolls back and writes an audit row",
    over,
    setup=audited,
    status=409,
)
family.add("a handler that commits what the view wrote", over, setup=committing, status=409)
family.add(
    "a handler's answer, and a commit above",
    over,
    setup=handled_over,
    status=422,
    after_request=commit_after,
)


@family.in_every_store()
def test_what_is_committed_above_the_view_is_there_exactly_if_the_response_is_stored(hold, case, store):
    hold(case, store)


leased = Family(atomic=False)
for view in (flushed, pending, committed):
    leased.add(
        f"a view that wrote {name(view)}, after_request commits",
        view,
        after_request=commit_after,
        expect=Equal(),
    )
    leased.add(f"a view that wrote {name(view)}, a decorator commits", view, above=decorator)
    leased.add(f"a view that wrote {name(view)}, and nobody commits", view)


@leased.in_every_store()
def test_what_is_committed_above_a_view_that_is_not_atomic_is_there(hold, case, store):
    hold(case, store)
