"""Sessions and engines of the application's own: what is joined, left alone, given back, or refused."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy import orm

from flask_idempotency import RequestInProgress, current_operation, idempotent
from flask_idempotency.core.errors import ConfigurationError
from tests import sessions
from tests.differential.harness import EQUAL, Either, Family, Refused
from tests.differential.verdicts import NothingKept
from tests.session.verdicts import SOUND_OR_FAILED, SOUND_OR_REFUSED, Named, Sound
from tests.sessions import Plain, present_session

family = Family(events=False)
REPLACEABLE = () if sessions.usual in {"lite", "plain"} else ("postgres",)
"""For what sets ``db.session``: read-only in Flask-SQLAlchemy-Lite, and the extension is given a
``scoped_session`` itself, so another one is a session of the view's own."""

IS_FLASKS = sessions.usual == "flask-sqlalchemy"


def pays(world):
    world.pay(1)
    world.commit()


def reads(world):
    world.sql("select count(*) from account")


# AUTOCOMMIT.


def writes_by_itself(world, _error=None):
    """A connection that commits each statement."""
    engine = world.engine.execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.insert(world.Audit.__table__).values(text="by itself"))


def autocommit_at_connect(world):
    """The driver's connections commit each statement, which SQLAlchemy does not know."""

    @sa.event.listens_for(world.engine, "connect")
    def choose(driver, _record):
        driver.autocommit = True

    world.engine.dispose()


for what, before in {"nothing": None, "a read": reads}.items():
    family.add(
        f"a connection that commits by itself, in the pool before, {what} before the view",
        pays,
        before=before,
        prelude=writes_by_itself,
    )
    family.add(
        f"a connection that commits by itself, in the pool after, {what} before the view",
        pays,
        before=before,
        teardown=writes_by_itself,
        pool=2,
    )
    family.add(
        f"autocommit at connect, {what} before the view",
        pays,
        before=before,
        setup=autocommit_at_connect,
        expect=SOUND_OR_REFUSED,
    )


@pytest.mark.parametrize("level", ["AUTOCOMMIT", "autocommit"])
@pytest.mark.parametrize("option", ["isolation_level", "execution_options"])
def test_an_engine_that_commits_each_statement_is_refused_at_start(option, level, make_world):
    given = {option: level} if option == "isolation_level" else {option: {"isolation_level": level}}
    with pytest.raises(ConfigurationError, match="(?i)autocommit"):
        make_world(SQLALCHEMY_ENGINE_OPTIONS=given)


# Another session than the one that was joined, and binds that are given.


def replaced(world):
    """The application makes a session of its own after ``init_app``."""
    world.db.session = orm.scoped_session(orm.sessionmaker(bind=world.engine))


def removes(world, error):
    world.session.remove()


for what, before in {"nothing": None, "a read": reads}.items():
    family.add(
        f"db.session replaced after init_app, {what} before",
        pays,
        before=before,
        setup=replaced,
        teardown=removes,
        expect=Either((Sound(), Refused(), Named("ConfigurationError"))),
        stores=REPLACEABLE,
    )


def audits(world, bind, session=None):
    insert = sa.insert(world.Audit.__table__).values(text="audited")
    (session or world.session).execute(insert, bind_arguments={"bind": bind} if bind else {})


def audits_by_itself(end):
    """The row's transaction ends at once, whatever becomes of the view."""

    def view(world):
        with world.engine.begin() as connection:
            audits(world, connection)
            world.session.commit()
        world.pay(1)
        world.session.flush()
        return end(world)

    return view


def fails(world):
    raise OSError("as asked")


def rejects(world):
    world.session.rollback()
    return {"error": "no"}, 409


def commits(world):
    world.commit()


for end, status in ((commits, 201), (rejects, 409), (fails, 500)):
    family.add(
        f"an audit row on a connection that was given, and the view {end.__name__}",
        audits_by_itself(end),
        status=status,
        pool=2,
        expect=Either((EQUAL, Refused(besides=("audit",)))),
    )


@family()
def the_engine_given_as_a_bind(world):
    audits(world, world.engine)
    world.session.rollback()
    audits(world, world.engine)
    pays(world)


@family(pool=2, expect=Refused("the engine"))
def an_engine_that_isolates_otherwise_given_as_a_bind(world):
    audits(world, world.engine.execution_options(isolation_level="SERIALIZABLE"))
    pays(world)


def another_session_begins(world):
    world.here["other"] = sessions.factory_of(world.app, world.db)()
    world.here["other"].execute(sa.text("select 1"))


@family(
    before=another_session_begins,
    teardown=lambda world, _error: world.here["other"].close(),
    pool=2,
    expect=Refused("connection of its own"),
)
def another_session_that_had_begun_before_the_view(world):
    audits(world, None, world.here["other"])
    world.here["other"].commit()
    pays(world)


@family()
def the_sessions_own_connection_given_as_a_bind(world):
    audits(world, world.session.connection())
    world.session.rollback()
    audits(world, world.session.connection())
    pays(world)


@family()
def the_sessions_connection_by_the_engine(world):
    """The engine is named, and means the operation's connection."""

    def writes():
        world.session.connection(bind_arguments={"bind": world.engine}).exec_driver_sql(
            "insert into audit (text) values ('by the engine')"
        )

    writes()
    world.session.rollback()
    writes()
    pays(world)


@family(expect=SOUND_OR_FAILED)
def a_connection_of_what_get_bind_returns(world):
    with world.session.get_bind().connect() as connection:
        world.note(connection.scalar(sa.text("select count(*) from account")))
    pays(world)


@family(expect=SOUND_OR_FAILED, pool=2)
def a_transaction_of_what_get_bind_returns(world):
    world.pay(1)
    world.session.flush()
    with world.session.get_bind().begin() as connection:
        connection.execute(sa.insert(world.Audit.__table__).values(text="audited"))
    world.session.rollback()
    pays(world)


# Sessions of another class on the operation's connection, which is in a savepoint of the session's: by
# default theirs is one inside. Where without us they would end the session's transaction, they do not.

on_the_connection = Family(events=False, status=None)


def works_beside(mode, end):
    def view(world):
        world.pay(1)
        world.session.flush()
        with orm.Session(bind=world.session.connection(), **mode) as inner:
            inner.add(world.Payment(amount=2))
            inner.flush()
            end(inner)
        world.commit()

    return view


def audits_in_flushes(world):
    @sa.event.listens_for(world.Payment, "before_insert")
    def audit(_mapper, connection, _payment):
        with orm.Session(bind=connection) as inner:
            inner.add(world.Audit(text="paid"))
            inner.commit()


for mode in ({}, *({"join_transaction_mode": each} for each in ("rollback_only", "create_savepoint"))):
    for end in (bool, orm.Session.commit, orm.Session.rollback):
        if mode or end is orm.Session.commit:
            on_the_connection.add(
                f"{mode or 'a session'} that ends by {end.__name__}",
                works_beside(mode, end),
                expect=Either((EQUAL, NothingKept(500))),
            )
on_the_connection.add("a session in a mapper's listener", pays, setup=audits_in_flushes)


@on_the_connection.in_every_store()
def test_another_session_on_the_connection_does_as_without_us(hold, case, store):
    hold(case, store)


# What is left on a session that lives on.


def keeps_the_session(world):
    world.here["kept"] = present_session(world.db)


def is_as_it_was(world):
    """Commit with it; then let it join a transaction, which its rollback rolls back."""
    kept = world.here.get("kept")
    if kept is None:
        return
    world.note((kept.join_transaction_mode, type(kept.get_bind()).__name__))
    kept.add(world.Audit(text="later"))
    kept.commit()
    with world.engine.connect() as connection:
        outer = connection.begin()
        audits(world, connection, kept)
        kept.rollback()
        world.note(outer.is_active)
    kept.close()


for end, status in ((pays, 201), (rejects, 409), (fails, 500)):
    family.add(
        f"a session that lives on, and the view {end.__name__}",
        lambda world, end=end: keeps_the_session(world) or end(world),
        before=is_as_it_was,
        status=status,
    )
    family.add(
        f"a session that lives on, taken before the view that {end.__name__}",
        end,
        before=lambda world: is_as_it_was(world) or keeps_the_session(world) or reads(world),
        status=status,
    )


@family.in_every_store()
def test_sessions_and_engines_are_as_without_us(hold, case, store):
    hold(case, store)


# Who holds the lock: what an earlier lock in the same transaction left says nothing.


@pytest.mark.parametrize("store", ["postgres", "hybrid"], indirect=True)
def test_a_lock_is_not_taken_for_another_ones(world):
    """A view without protection of its own runs jobs by their keys, all in its session."""
    runs, broken, session = [], {"busy"}, sessions.proxy_of(world.db)

    def job(key):
        runs.append(key)
        session.add(world.Payment(amount=5, note=key))
        session.commit()
        if key in broken:
            raise OSError("as asked")

    @world.app.post("/jobs")
    def run():
        answers = []
        for key in ("done", "busy", "done"):
            session.execute(sa.text("select set_config('idempotency.held', 'true', true)"))
            try:
                world.idempotency.run(key, job, key, scope="s", name="job")
            except (RequestInProgress, OSError) as error:
                answers.append(type(error).__name__)
            else:
                answers.append(key)
        return answers

    assert world.client.post("/jobs").json == ["done", "OSError", "done"]
    broken.clear()
    with world.app.app_context(), world.db.engine.connect() as other:
        other.execute(sa.text("select 1 from idempotency_record for update"))
        assert world.client.post("/jobs").json == ["done", "RequestInProgress", "done"]
    assert world.sql("select note from payment") == [("done",)]
    assert world.client.post("/jobs").json == ["done", "busy", "done"]
    assert runs == ["done", "busy", "busy"]
    assert world.sql("select note from payment order by id") == [("done",), ("busy",)]
    world.assert_clean()


def test_a_session_of_two_phases_is_refused(world):
    session = sessions.proxy_of(world.db)

    @world.app.post("/two-phases")
    @idempotent
    def two_phases():
        present_session(world.db).twophase = True
        session.add(world.Payment(amount=5))
        session.commit()
        return {}, 201

    assert world.post("/two-phases").status_code == 500
    assert world.sql("select count(*) from payment") == [(0,)]
    world.assert_clean()


# Several operations in the one transaction of a test.


@pytest.fixture
def tested(make_world):
    """An application under test: its session is bound to a connection that is rolled back."""
    world = make_world(db=Plain(), TESTING=True, PROPAGATE_EXCEPTIONS=False)
    with world.db.engine.connect() as connection:
        transaction = connection.begin()
        world.db.session.configure(bind=connection, join_transaction_mode="create_savepoint")
        world.seen = lambda: connection.scalar(sa.text("select count(*) from payment"))
        yield world
        world.db.session.remove()
        transaction.rollback()
        world.db.session.configure(bind=world.db.engine)
    assert world.count() == 0
    assert world.records() == []


def test_two_operations_in_a_tests_transaction_are_two(tested, add_view):
    runs = add_view(tested)
    for key in ("a", "b", "a", "b"):
        assert tested.post(key=key).status_code == 201
    assert (len(runs), tested.seen()) == (2, 2)
    assert tested.post(key="a", json={"amount": 6}).status_code == 422


def test_a_duplicate_that_the_view_sends_itself_fails_with_it(tested):
    runs, inner = [], []

    @tested.app.post("/payments")
    @idempotent
    def pay():
        runs.append(current_operation.attempt)
        tested.db.session.add(tested.Payment(amount=5))
        tested.db.session.flush()
        if len(runs) == 1:
            inner.append(tested.post(key="a").status_code)
        tested.db.session.commit()
        return {}, 201

    assert tested.post(key="a").status_code == 500
    assert (runs, inner, tested.seen()) == ([1], [500], 0)
    assert tested.post(key="a").status_code == 201
    assert (runs, tested.seen()) == ([1, 2], 1)


def test_a_duplicate_in_another_thread_meets_the_first(tested, add_view, gate, background):
    runs = add_view(tested, during=gate)
    first = background(tested.post, key="a")
    gate.wait_until_reached()
    assert tested.post(key="a").status_code == 409
    gate.open()
    assert first.result().status_code == 201
    assert (runs, tested.seen()) == ([1], 1)


def test_the_claim_is_outside_of_what_a_failing_view_undoes(tested):
    """The second attempt knows that it is one."""
    attempts = []

    @tested.app.post("/payments")
    @idempotent
    def pay():
        attempts.append(current_operation.attempt)
        tested.db.session.add(tested.Payment(amount=5))
        tested.db.session.commit()
        if len(attempts) == 1:
            raise OSError("as asked")
        return {}, 201

    assert [tested.post(key="a").status_code for _ in range(3)] == [500, 201, 201]
    assert (attempts, tested.seen()) == ([1, 2], 1)
