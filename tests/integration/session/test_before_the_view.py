"""What a request did in its session before the view stays: it commits with the view, or is undone."""

from contextlib import nullcontext, suppress

import pytest
import sqlalchemy as sa
from flask import g
from psycopg2 import extensions

from tests.differential.harness import EQUAL, Family, NothingKept, Refused
from tests.differential.schemas import TENANT, deferred_constraints, row_level_security
from tests.integration.session.cases import (
    asks,
    fails,
    pays,
    reads,
    rejects,
    rolls_back,
    sends,
    then,
    writes,
)
from tests.integration.views import pay_once, protect
from tests.sessions import factory_of
from tests.stores import BOTH

family = Family(events=False)

# What came before, and how the view sees that it is there.


def changes_the_user(world):
    world.session.query(world.Account).filter_by(name="alice").one().balance += 7


changes_and_flushes = then(changes_the_user, lambda world: world.session.flush())
shows_the_user = asks("select balance from account where name = 'alice'")
chooses_tenant = sends("select set_config('app.tenant', 'a', true)", f"set local role {TENANT}")


def shows_tenant(world):
    world.show("app.tenant", "role")


BEFORE = {
    "an update": (changes_and_flushes, shows_the_user, {}),
    "a local tenant and role": (chooses_tenant, shows_tenant, {"setup": row_level_security}),
    "an advisory lock": (
        sends("select pg_advisory_xact_lock(7)"),
        lambda world: world.note(world.admin_run("select pg_try_advisory_xact_lock(7)")),
        {},
    ),
    "a cursor": (
        sends("declare names cursor for select name from account order by 1"),
        asks("fetch next from names"),
        {},
    ),
    "a deferred constraint": (
        sends("set constraints one_position deferred"),
        sends("insert into line (position) values (1), (1)", "update line set position = id + 1"),
        {"setup": deferred_constraints},
    ),
}
ENDS = {
    "pays": (pays, 201, EQUAL),
    "fails": (then(writes, fails), 500, EQUAL),
    "fails late": (then(pays, fails), 500, NothingKept()),  # an operation is undone as a whole
    "rejects": (then(writes, rejects), 409, EQUAL),
    "forbids": (then(pays, lambda _: ({"error": "no"}, 403)), 403, NothingKept()),
}


def commits_above(look):
    """Commit what the request did before the view; on a replay all of it is still there."""

    def after_request(world, response):
        if not world.view_ran:
            look(world)
        world.commit()

    return after_request


for what, (before, look, options) in BEFORE.items():
    for name, (end, status, expect) in ENDS.items():
        case = {"before": before, "status": status, **options}
        family.add(f"{what}, and the view {name}", then(look, end), expect=expect, **case)
        if name in ("pays", "rejects"):
            above = commits_above(look)
            family.add(f"{what}, {name}, a commit above", then(look, end), after_request=above, **case)

family.add("a write that is flushed, and an idle view", lambda _: None, before=writes)
family.add(
    "a write that is not flushed, and an idle view",
    lambda _: None,
    before=lambda world: world.pay(7),
    expect=Refused("nobody committed"),
)

# To roll the first unit back is to roll back what was before it.


def rolls_back_beside_another_session(world):
    """What that one has committed inside stays, although ours goes back behind what was before."""
    with factory_of(world.app, world.db)() as other:
        other.add(world.Audit(text="audited"))
        other.commit()
    world.session.rollback()


undoes = then(shows_the_user, writes, rolls_back, shows_the_user, pays)
family.add("an update, and the view rolls back", undoes, before=changes_and_flushes)
family.add("a read, and another session", rolls_back_beside_another_session, before=reads, pool=2)

# What is refused, by name.

ISOLATION = Refused("(?i)isolation|repeatable read|serializable")
READ_ONLY = Refused("(?i)read[ -_]?only")
FAILED = Refused("(?i)fail|abort")
NESTED = Refused("(?i)nested|savepoint")


def strict(world):
    world.admin_run(
        "do $$ begin execute format('alter database %I set default_transaction_isolation ="
        " ''serializable''', current_database()); end $$"
    )
    world.engine.dispose()


as_text = sends("set transaction isolation level repeatable read", "select 1")
family.add("a strict level as text", pays, before=as_text, expect=ISOLATION)
family.add("a strict level of the database's", pays, before=reads, setup=strict, expect=ISOLATION)
family.add("a strict level of the database's, nothing before", pays, setup=strict)
read_only = sends("select 1", "set transaction read only")
family.add("read only as text", pays, before=read_only, status=500, expect=READ_ONLY)
family.add("read only as text, a view that reads", reads, before=read_only, expect=READ_ONLY)


def fails_before(world):
    with world.catching():
        world.sql("select 1 / 0")


def opens_nested(find):
    def before(world):
        g.nested = find(world).begin_nested()
        world.note(world.sql("select count(*) from account"))

    return before


def nested_above(world, call):
    with world.session.begin_nested():
        world.audit()
        world.session.flush()
        return call()


family.add("a failed statement", pays, before=fails_before, status=500, expect=FAILED)
family.add("a failed statement, rolled back", pays, before=then(fails_before, rolls_back))
family.add("a decorator with begin_nested", writes, above=nested_above, expect=NESTED)
for what, find in {
    "the session": lambda world: world.session,
    "the connection": lambda world: world.session.connection(),
}.items():
    before = opens_nested(find)
    family.add(f"begin_nested of {what} left open", pays, before=before, expect=NESTED, status=None)


@family.each()
def test_what_was_done_before_the_view_commits_with_it_or_is_undone(hold, case):
    hold(case)


PROBLEMS = {
    "key-reused": (422, {"json": {"amount": 6}}),
    "key-required": (400, {"key": None}),
    "request-in-progress": (409, {"path": "/busy", "key": "busy"}),
}


@BOTH
@pytest.mark.parametrize("problem", PROBLEMS)
def test_on_a_problem_the_transaction_is_left_as_it_was(
    problem, world, add_view, gate, background, assert_problem
):
    session, found = world.db.session, []

    @world.app.before_request
    def see():
        session.execute(sa.text("select set_config('app.tenant', 'a', true)"))
        session.add(world.Payment(amount=0))
        session.flush()
        session.execute(sa.text("declare one cursor for select 1"))

    @world.app.after_request
    def commit(response):
        if response.status_code != 201:
            tenant = session.scalar(sa.text("select current_setting('app.tenant', true)"))
            found.append((tenant, session.scalar(sa.text("fetch next from one"))))
        session.commit()
        return response

    runs = add_view(world)
    add_view(world, "/busy", during=gate, endpoint="busy")
    assert world.post().status_code == 201
    first = background(world.post, "/busy", "busy")
    gate.wait_until_reached()
    status, sent = PROBLEMS[problem]
    assert_problem(world.post(**sent), status, problem, retry=status == 409)
    gate.open()
    assert first.result().status_code == 201
    assert found == [("a", 1)]
    amounts = world.sql("select amount, count(*) from payment group by 1 order by 1")
    assert amounts == [(0, 3), (5, 2)]
    assert runs == [1]
    world.assert_clean()


@pytest.mark.parametrize("driver", ["psycopg2"], indirect=True)  # psycopg takes no class of connections
@pytest.mark.parametrize("catches", [False, True])
def test_who_takes_the_record_while_all_is_rolled_back_has_it(make_world, assert_problem, catches):
    """A rollback of what came before the view frees the row for a moment: another attempt gets it."""
    taking = []

    class Connection(extensions.connection):
        def rollback(self):
            super().rollback()
            if taking:
                world.sql(taking.pop())

    options = {"connect_args": {"connection_factory": Connection}}
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=options)
    world.app.before_request(lambda: world.db.session.execute(sa.text("select 1")) and None)

    def pay():
        taking.append("update idempotency_record set owner = 'another'")
        with suppress(Exception) if catches else nullcontext():
            world.db.session.rollback()
        pay_once(world)
        return {}, 201

    protect(world, pay)
    assert_problem(world.post(), 409, "request-in-progress", retry=True)
    assert (taking, world.count()) == ([], 0)
    assert [record.owner for record in world.records()] == ["another"]
