"""Sessions and engines of the application's own: what is joined, left alone, given back, or refused."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy import orm

from flask_idempotency import RequestInProgress, idempotent
from flask_idempotency.core.errors import ConfigurationError
from tests import sessions
from tests.differential.harness import EQUAL, Either, Family, NothingKept, Refused
from tests.session.cases import (
    SOUND_OR_FAILED,
    SOUND_OR_MISTAKEN,
    SOUND_OR_REFUSED,
    commits,
    fails,
    pays,
    reads,
    rejects,
    rolls_back,
    then,
    writes,
)
from tests.sessions import Plain, present_session

family = Family(events=False)


def insert(world):
    return sa.insert(world.Audit.__table__).values(text="audited")


def audits(find, session=lambda world: world.session):
    """A row by a session that is given a bind."""
    return lambda world: (
        session(world).execute(
            insert(world), bind_arguments={"bind": bind} if (bind := find(world)) else {}
        )
        and None
    )


# AUTOCOMMIT.


def writes_by_itself(world, _error=None):
    """A connection that commits each statement."""
    engine = world.engine.execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(insert(world))


def autocommit_at_connect(world):
    """The driver's connections commit each statement, which SQLAlchemy does not know."""
    sa.event.listen(world.engine, "connect", lambda driver, _: setattr(driver, "autocommit", True))
    world.engine.dispose()


def replaced(world):
    """The application makes a session of its own after ``init_app``."""
    world.db.session = orm.scoped_session(orm.sessionmaker(bind=world.engine))


REPLACEABLE = () if sessions.usual in {"lite", "plain"} else ("postgres",)
"""Read-only in Flask-SQLAlchemy-Lite, and of the view's own where the extension is given a session."""

ARRANGED = {
    "a connection that commits by itself, in the pool before": {"prelude": writes_by_itself},
    "a connection that commits by itself, in the pool after": {
        "teardown": writes_by_itself,
        "pool": 2,
    },
    "autocommit at connect": {"setup": autocommit_at_connect, "expect": SOUND_OR_REFUSED},
    "db.session replaced after init_app": {
        "setup": replaced,
        "teardown": lambda world, _error: world.session.remove(),
        "expect": SOUND_OR_MISTAKEN,
        "stores": REPLACEABLE,
    },
}
for what, options in ARRANGED.items():
    for before in (None, reads):
        family.add(f"{what}{', and a read' if before else ''}", pays, before=before, **options)


@pytest.mark.parametrize("options", [{}, {"execution_options": {}}], ids=["engine", "execution"])
def test_an_engine_that_commits_each_statement_is_refused_at_start(options, make_world):
    options.get("execution_options", options)["isolation_level"] = "autocommit"
    with pytest.raises(ConfigurationError, match="(?i)autocommit"):
        make_world(SQLALCHEMY_ENGINE_OPTIONS=options)


# Binds that are given, and other connections.


def audits_by_itself(end):
    """The row's transaction ends at once, whatever becomes of the view."""

    def view(world):
        with world.engine.begin() as connection:
            audits(lambda _: connection)(world)
            world.session.commit()
        writes(world)
        return end(world)

    return view


for end, status in ((commits, 201), (then(rolls_back, rejects), 409), (fails, 500)):
    family.add(
        f"an audit row on a connection that was given, and {status}",
        audits_by_itself(end),
        status=status,
        pool=2,
        expect=Either((EQUAL, Refused(besides=("audit",)))),
    )


def engine(world):
    return world.engine


def strict_engine(world):
    return world.engine.execution_options(isolation_level="SERIALIZABLE")


def own(world):
    return world.session.connection()


def by_the_engine(world):
    own_by_name = world.session.connection(bind_arguments={"bind": world.engine})
    own_by_name.execute(insert(world))


for what, audit in {
    "the engine": audits(engine),
    "the session's own connection": audits(own),
    "the session's connection by the engine": by_the_engine,
}.items():
    family.add(f"{what} given as a bind", then(audit, rolls_back, audit, pays))
family.add(
    "an engine that isolates otherwise given as a bind",
    then(audits(strict_engine), pays),
    pool=2,
    expect=Refused("the engine|connection of its own"),
)


def another_session_begins(world):
    world.here["other"] = sessions.factory_of(world.app, world.db)()
    world.here["other"].execute(sa.text("select 1"))


family.add(
    "another session that had begun before the view",
    then(audits(lambda _: None, lambda world: world.here["other"]), pays),
    before=another_session_begins,
    teardown=lambda world, _error: world.here["other"].close(),
    pool=2,
    expect=Refused("connection of its own"),
)


@family(expect=SOUND_OR_FAILED, pool=2)
def a_transaction_of_what_get_bind_returns(world):
    writes(world)
    with world.session.get_bind().begin() as connection:
        connection.execute(insert(world))
    then(rolls_back, pays)(world)


# Sessions of another class on the operation's connection, which is in a savepoint of the session's: by
# default theirs is one inside. Where without us they would end the session's transaction, they do not.


def works_beside(mode, end):
    def view(world):
        writes(world)
        with orm.Session(bind=own(world), **mode) as inner:
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


beside = {"status": None, "expect": Either((EQUAL, NothingKept(500)))}
for mode in ("rollback_only", "create_savepoint"):
    for end in (bool, orm.Session.commit, orm.Session.rollback):
        view = works_beside({"join_transaction_mode": mode}, end)
        family.add(f"a session of {mode} that ends by {end.__name__}", view, **beside)
family.add("a session that commits", works_beside({}, orm.Session.commit), **beside)
family.add("a session in a mapper's listener", pays, setup=audits_in_flushes)

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
        audits(lambda _: connection, lambda _: kept)(world)
        kept.rollback()
        world.note(outer.is_active)
    kept.close()


for end, status in ((pays, 201), (then(rolls_back, rejects), 409), (fails, 500)):
    for when, before, view in (
        ("in the view", is_as_it_was, then(keeps_the_session, end)),
        ("before it", then(is_as_it_was, keeps_the_session, reads), end),
    ):
        family.add(f"a session kept {when} that ends with {status}", view, before=before, status=status)


@family.in_every_store()
def test_sessions_and_engines_are_as_without_us(hold, case, store):
    hold(case, store)


@pytest.mark.parametrize("store", ["postgres", "hybrid"], indirect=True)
def test_a_lock_is_not_taken_for_another_ones(world):
    """What an earlier lock in the same transaction left says nothing: here are three jobs in one."""
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
    @world.app.post("/payments")
    @idempotent
    def two_phases():
        session = present_session(world.db)
        session.twophase = True
        session.add(world.Payment(amount=5))
        session.commit()
        return {}, 201

    assert (world.post().status_code, world.count()) == (500, 0)
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


def test_a_duplicate_that_the_view_sends_itself_fails_with_it(tested, add_view):
    inner = []
    runs = add_view(
        tested, during=lambda: len(runs) == 1 and inner.append(tested.post(key="a").status_code)
    )
    assert tested.post(key="a").status_code == 500
    assert (runs, inner, tested.seen()) == ([1], [500], 0)
    assert tested.post(key="a").status_code == 201
    assert (runs, tested.seen()) == ([1, 2], 1)


def test_the_claim_is_outside_of_what_a_failing_view_undoes(tested, add_view):
    """The second attempt knows that it is one."""
    runs = add_view(tested, during=lambda: 1 / (len(runs) - 1))
    assert [tested.post(key="a").status_code for _ in range(3)] == [500, 201, 201]
    assert (runs, tested.seen()) == ([1, 2], 1)
