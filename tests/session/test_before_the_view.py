"""What a request did in its session before the view stays: it commits with the view, or is undone."""

from __future__ import annotations

import logging
import re
from select import select

import pytest
import sqlalchemy as sa
from flask import g
from psycopg2 import extensions

from flask_idempotency import idempotent
from tests.differential.harness import EQUAL, EQUAL_OR_REFUSED, Either, Family, NothingKept, Refused
from tests.differential.schemas import TENANT, deferred_constraints, row_level_security
from tests.sessions import factory_of

# What came before, and how the view sees that it is there.


def sees_the_user(world):
    user = world.session.query(world.Account).filter_by(name="alice").one()
    user.balance += 7
    world.session.flush()


def shows_the_user(world):
    world.note(world.sql("select balance from account where name = 'alice'"))


def changes_the_user_unflushed(world):
    world.session.query(world.Account).filter_by(name="alice").one().balance += 7


def writes_nested(world):
    with world.session.begin_nested():
        sees_the_user(world)


def fails_nested(world):
    sees_the_user(world)
    with world.catching(), world.session.begin_nested():
        world.sql("select 1 / 0")


def chooses_tenant(world):
    world.sql("select set_config('app.tenant', 'a', true)")
    world.sql(f"set local role {TENANT}")


def shows_tenant(world):
    world.show("app.tenant", "role")


def takes_a_number(world):
    world.here["number"] = world.sql("select nextval('account_id_seq')")


def shows_the_number(world):
    world.note(world.sql("select currval('account_id_seq')") == world.here["number"])


def listens_outside(world):
    world.admin_run("listen seen")
    world.admin.notifies.clear()


def notifies(world):
    """And note what was heard since the last request, to the end: notifications keep their order."""
    world.admin_run("notify seen, 'end'")
    heard, notices = [], world.admin.notifies
    while heard[-1:] != ["end"]:
        world.admin.poll()
        if not notices:
            assert select([world.admin], [], [], 10)[0], "no notification came"
        heard += [notices.pop(0).payload for _ in list(notices)]
    world.note(heard)
    world.sql("select pg_notify('seen', 'somebody')")


def streams(world):
    options = {"stream_results": True, "max_row_buffer": 1}
    g.rows = world.session.execute(sa.text("select generate_series(1, 500)"), execution_options=options)
    world.note(g.rows.fetchone())


def reads_the_stream(world):
    world.note(len(g.rows.all()))


def sends(*statements):
    def send(world):
        for statement in statements:
            world.sql(statement)

    return send


def asks(statement):
    return lambda world: world.note(world.sql(statement))


def asks_outside(statement):
    return lambda world: world.note(world.admin_run(statement))


def writes_what_waits(world):
    """Two lines in one place, which only the commit may find."""
    world.sql("insert into line (position) values (1), (1)")
    world.sql("update line set position = id + 1")


BEFORE = {
    "an update": (sees_the_user, shows_the_user, {}),
    "an update not flushed": (changes_the_user_unflushed, shows_the_user, {}),
    "an update in begin_nested": (writes_nested, shows_the_user, {}),
    "an update, and a failure in begin_nested": (fails_nested, shows_the_user, {}),
    "a local tenant and role": (chooses_tenant, shows_tenant, {"setup": row_level_security}),
    "an advisory lock": (
        sends("select pg_advisory_xact_lock(7)"),
        asks_outside("select pg_try_advisory_xact_lock(7)"),
        {},
    ),
    "a row lock": (
        sends("select 1 from account where name = 'alice' for update"),
        asks_outside("select name from account for update skip locked"),
        {},
    ),
    "a table lock": (
        sends("lock table audit in exclusive mode"),
        asks_outside("select mode from pg_locks where relation = 'audit'::regclass"),
        {},
    ),
    "a sequence": (takes_a_number, shows_the_number, {}),
    "a notification": (notifies, lambda world: None, {"prelude": listens_outside}),
    "a cursor": (
        sends("declare names cursor for select name from account order by 1"),
        asks("fetch next from names"),
        {},
    ),
    "a stream": (streams, reads_the_stream, {}),
    "a temporary table": (
        sends("create temporary table scratch on commit drop as select 5 as a"),
        asks("select a from scratch"),
        {},
    ),
    "a deferred constraint": (
        sends("set constraints one_position deferred"),
        writes_what_waits,
        {"setup": deferred_constraints},
    ),
}


# What becomes of the view.


def pays(world):
    world.pay(1)
    world.commit()


def pays_twice(world):
    pays(world)
    pays(world)


def fails(world):
    world.pay(1)
    world.session.flush()
    raise OSError("as asked")


def fails_late(world):
    pays(world)
    raise OSError("as asked")


def rejects(world):
    world.pay(1)
    world.session.flush()
    return {"error": "no"}, 409


def forbids(world):
    pays(world)
    return {"error": "no"}, 403


ENDS = {
    pays: (201, EQUAL),
    pays_twice: (201, EQUAL),
    fails: (500, EQUAL),
    fails_late: (500, NothingKept()),  # an operation is undone as a whole
    rejects: (409, EQUAL),
    forbids: (403, NothingKept()),
}


def looks_and(end, look):
    def view(world):
        look(world)
        return end(world)

    return view


def commits_above(look):
    """Commit what the request did before the view; on a replay all of it is still there."""

    def after_request(world, response):
        if not world.view_ran:
            look(world)
        world.commit()

    return after_request


stays, above = Family(events=False), Family(events=False)
for what, (before, look, options) in BEFORE.items():
    for end, (status, expect) in ENDS.items():
        if (before, end) == (chooses_tenant, pays_twice):
            continue  # a difference by design: test_settings
        stays.add(
            f"{what}, and the view {end.__name__.replace('_', ' ')}",
            looks_and(end, look),
            before=before,
            status=status,
            expect=expect,
            **options,
        )
    for end, status in ((pays, 201), (rejects, 409)):
        above.add(
            f"{what}, the view {end.__name__}, and a commit above it",
            looks_and(end, look),
            before=before,
            status=status,
            after_request=commits_above(look),
            **options,
        )


def adds(world):
    world.pay(7)


def adds_and_flushes(world):
    adds(world)
    world.session.flush()


for before, expect in ((adds_and_flushes, EQUAL), (adds, Refused("nobody committed"))):
    stays.add(
        f"{before.__name__}, and the view does nothing", lambda _: None, before=before, expect=expect
    )


@stays(before=adds_and_flushes)
def a_begin_nested_that_fails(world):
    fails_nested(world)
    pays(world)


@stays(before=asks("select 1"))
def a_rollback_and_after_the_commit_a_function_that_may_write(world):
    world.session.rollback()
    pays(world)
    world.sql("select txid_current_if_assigned()")


@stays.in_every_store()
def test_what_was_done_before_the_view_commits_with_it_or_is_undone(hold, case, store):
    hold(case, store)


@above.in_every_store()
def test_on_a_replay_the_transaction_is_left_as_it_was(hold, case, store):
    hold(case, store)


PROBLEMS = {
    "key-reused": {"json": {"amount": 6}},
    "key-required": {"key": None},
    "key-malformed": {"key": '"broken'},
    "request-in-progress": {"key": "busy"},
}


@pytest.mark.parametrize("store", ["postgres", "hybrid"], indirect=True)
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
    if problem == "request-in-progress":
        first = background(world.post, "/busy", "busy")
        gate.wait_until_reached()
        answer = world.post("/busy", "busy")
        assert_problem(answer, 409, problem, retry=True)
        gate.open()
        assert first.result().status_code == 201
        seen, paid = 3, 2
    else:
        answer = world.post(**PROBLEMS[problem])
        assert answer.json["type"].endswith(problem)
        seen, paid = 2, 1
    assert found == [("a", 1)]
    assert world.sql("select amount, count(*) from payment group by 1 order by 1") == [
        (0, seen),
        (5, paid),
    ]
    assert runs == [1]
    world.assert_clean()


@pytest.mark.parametrize("fails", [False, True])
def test_a_job_commits_what_its_session_held_before_or_undoes_it(fails, world):
    def job():
        world.db.session.add(world.Payment(amount=2))
        world.db.session.commit()
        if fails:
            raise OSError("as asked")

    for again in range(2):
        with world.app.app_context():
            world.db.session.add(world.Payment(amount=1))
            world.db.session.flush()
            try:
                world.idempotency.run("order-1", job, scope="s", name="job")
            except OSError:
                assert fails
            else:
                assert not fails
            if again:
                world.db.session.commit()  # a replay leaves the transaction to its owner
    amounts = [amount for (amount,) in world.sql("select amount from payment order by id")]
    assert sorted(amounts) == ([] if fails else [1, 1, 2])


# T103: to roll the first unit back is to roll back what was before it.

first_unit = Family(events=False)


def pays_flushed(world):
    world.pay(3)
    world.session.flush()


def rolls_back(world):
    pays_flushed(world)
    world.session.rollback()


def rolls_back_and_pays(world):
    shows_the_user(world)
    rolls_back(world)
    shows_the_user(world)
    pays(world)


def fails_in_the_flush(world):
    with world.catching():
        world.pay(None)
        world.session.flush()
    world.session.rollback()
    pays(world)


def closes(world):
    pays_flushed(world)
    world.session.close()
    pays(world)


def removes(world):
    pays_flushed(world)
    world.session.remove()
    pays(world)


def rolls_back_twice(world):
    rolls_back(world)
    rolls_back(world)
    pays(world)


def rolls_back_the_second_unit(world):
    pays(world)
    rolls_back(world)
    pays(world)


def rolls_back_a_nested_part(world):
    nested = world.session.begin_nested()
    pays_flushed(world)
    nested.rollback()
    pays(world)


VIEWS = (
    *(rolls_back_and_pays, fails_in_the_flush, closes, removes, rolls_back_twice),
    *(rolls_back_the_second_unit, rolls_back_a_nested_part),
)
for view in VIEWS:
    for before in (sees_the_user, writes_nested):
        name = f"{before.__name__}, {view.__name__}".replace("_", " ")
        first_unit.add(name, view, before=before)


@first_unit(before=sees_the_user, status=409)
def a_rejection_after_the_rollback(world):
    rolls_back(world)
    return {"error": "no"}, 409


@first_unit(before=sees_the_user, status=500)
def an_error_after_the_rollback(world):
    rolls_back(world)
    raise OSError("as asked")


@first_unit(before=lambda world: chooses_tenant(world) or world.pay(9), setup=row_level_security)
def a_tenant_and_a_write_rolled_back(world):
    """The setting is undone, too."""
    world.session.flush()
    world.session.rollback()
    shows_tenant(world)
    pays(world)


@first_unit(before=lambda world: sees_the_user(world) or world.sql("select pg_advisory_xact_lock(7)"))
def a_lock_and_a_write_rolled_back(world):
    """The lock is free."""
    rolls_back(world)
    world.note(world.admin_run("select pg_try_advisory_xact_lock(7)"))
    pays(world)


def another_takes_it_over(world):
    """Whoever finds the record free after a rollback takes it, as another worker would."""
    if not world.protected:
        return

    def steal(_session):
        stolen = world.admin_run(
            "update idempotency_record set attempt = attempt + 1, owner = 'somebody else'"
            " where key = (select key from idempotency_record where state = 'in_progress'"
            " for update skip locked) returning 1"
        )
        if stolen:
            world.note("taken over")

    sa.event.listen(factory_of(world.app, world.db), "after_rollback", steal)


first_unit.add(
    "another takes the record over after the rollback",
    rolls_back_and_pays,
    before=sees_the_user,
    setup=another_takes_it_over,
    expect=Either((EQUAL, NothingKept(409))),
)
for end in ("rollback to", "release"):
    first_unit.add(
        f"{end} a savepoint from before the view",
        lambda world, end=end: world.sql(f"{end} savepoint mine") or pays(world),
        before=sends("insert into audit (text) values ('before')", "savepoint mine"),
        expect=EQUAL_OR_REFUSED,
    )


@first_unit.in_every_store()
def test_to_roll_the_first_unit_back_undoes_what_was_before_the_view(hold, case, store):
    hold(case, store)


# What is refused there, by name.

refused = Family(events=False)
ISOLATION = Refused("(?i)isolation|repeatable read|serializable")
READ_ONLY = Refused("(?i)read[ -_]?only")
FAILED = Refused("(?i)fail|abort")
NESTED = Refused("(?i)nested|savepoint")


def connects(**options):
    return lambda world: world.session.connection(execution_options=options)


def strict_by_database(world):
    world.admin_run(
        "do $$ begin execute format('alter database %I set default_transaction_isolation ="
        " ''repeatable read''', current_database()); end $$"
    )
    world.engine.dispose()


reads = sends("select count(*) from account")
for level in ("REPEATABLE READ", "SERIALIZABLE"):
    engine = {"isolation_level": level}
    refused.add(
        f"{level} of the engine, and a read",
        pays,
        before=reads,
        engine_options=engine,
        expect=ISOLATION,
    )
    refused.add(f"{level} of the engine, nothing before", pays, engine_options=engine)
    refused.add(
        f"{level} of a connection that sent nothing",
        pays,
        before=connects(isolation_level=level),
        expect=Either((EQUAL, ISOLATION)),
    )
    refused.add(
        f"{level} as text",
        pays,
        before=sends(f"set transaction isolation level {level}", "select 1"),
        expect=ISOLATION,
    )
refused.add("a level of the database's", pays, before=reads, setup=strict_by_database, expect=ISOLATION)
refused.add("a level of the database's, nothing before", pays, setup=strict_by_database)
for what, before in {
    "read only as text": sends("set transaction read only"),
    "read only after a read": sends("select 1", "set transaction read only"),
    "read only by an option": connects(postgresql_readonly=True),
}.items():
    refused.add(what, pays, before=before, status=500, expect=READ_ONLY)
    refused.add(f"{what}, a view that reads", reads, before=before, expect=READ_ONLY)


def fails_before(world):
    with world.catching():
        world.sql("select 1 / 0")


def fails_in_a_flush_before(world):
    with world.catching():
        world.pay(None)
        world.session.flush()


refused.add("a failed statement", pays, before=fails_before, status=500, expect=FAILED)
refused.add("a failed flush", pays, before=fails_in_a_flush_before, status=500, expect=EQUAL_OR_REFUSED)
refused.add(
    "a failed statement, rolled back",
    pays,
    before=lambda world: fails_before(world) or world.session.rollback(),
)


def opens_nested(world):
    g.nested = world.session.begin_nested()
    world.note(world.sql("select count(*) from account"))


def opens_nested_of_the_connection(world):
    g.nested = world.session.connection().begin_nested()
    world.note(world.sql("select count(*) from account"))


def nested_above(world, call):
    with world.session.begin_nested():
        world.note(world.sql("select count(*) from account"))
        return call()


def nested_with_a_write_above(world, call):
    with world.session.begin_nested():
        world.audit()
        world.session.flush()
        return call()


for above_it in (nested_above, nested_with_a_write_above):
    refused.add(
        f"a decorator, {above_it.__name__}".replace("_", " "),
        pays_flushed,
        above=above_it,
        expect=NESTED,
    )
refused.add("begin_nested left open", pays, before=opens_nested, expect=NESTED)
refused.add(
    "begin_nested of the connection left open",
    pays,
    before=opens_nested_of_the_connection,
    expect=NESTED,
    status=None,
)


@refused.in_every_store()
def test_what_cannot_be_continued_is_refused_by_name(hold, case, store):
    hold(case, store)


def test_a_refusal_is_logged_though_a_handler_answers_for_it(world, caplog):
    @world.app.before_request
    def read_only():
        world.db.session.execute(sa.text("set transaction read only"))

    @world.app.errorhandler(Exception)
    def answer(_error):
        return {"error": "sorry"}, 500

    @world.app.post("/payments")
    @idempotent
    def pay():
        return {}, 201

    assert world.post().status_code == 500
    logged = [
        f"{record.getMessage()} {record.exc_text or ''}"
        for record in caplog.records
        if record.levelno >= logging.ERROR
    ]
    assert any(re.search("(?i)read[ -_]?only", line) for line in logged), logged
    assert world.count() == 0


@pytest.mark.parametrize("driver", ["psycopg2"], indirect=True)  # psycopg takes no class of connections
@pytest.mark.parametrize("handler", ["none", "catches"])
def test_who_takes_the_record_while_all_is_rolled_back_has_it(make_world, assert_problem, handler):
    """A rollback of what came before the view frees the row for a moment: another attempt gets it."""
    taking = []

    class Connection(extensions.connection):
        def rollback(self):
            super().rollback()
            if taking:
                world.sql(taking.pop())

    options = {"connect_args": {"connection_factory": Connection}}
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=options)

    @world.app.before_request
    def authenticate():
        world.db.session.execute(sa.text("select 1"))

    @world.app.post("/payments")
    @idempotent
    def pay():
        taking.append("update idempotency_record set owner = 'another'")
        try:
            world.db.session.rollback()
        except Exception:
            if handler == "none":
                raise
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        return {}, 201

    assert_problem(world.post(), 409, "request-in-progress", retry=True)
    assert not taking
    assert world.count() == 0
    assert [record.owner for record in world.records()] == ["another"]
