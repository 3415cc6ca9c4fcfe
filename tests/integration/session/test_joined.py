"""The view's session is on the operation's connection: what it leaves there, and what is refused.

That everything works in it as it does without us: ``tests/differential``, and the files beside it.
"""

from contextlib import suppress

import pytest
import sqlalchemy as sa

from flask_idempotency import ConfigurationError, NotAtomic, current_operation
from tests.drivers import has_own_cursors, own_cursor
from tests.integration.views import pay_once, protect
from tests.sessions import factory_of


def test_a_client_that_goes_away_is_noticed_in_the_view_and_nowhere_else(world):
    interval = sa.text("show client_connection_check_interval")
    protect(world, lambda: [world.db.session.scalar(interval)])
    assert world.post().json == ["500ms"]
    with world.app.app_context(), world.db.engine.connect() as connection:
        assert connection.scalar(interval) == "0"


POSTGRES = ("postgres", "psycopg2"), ("postgres", "psycopg")


@pytest.mark.parametrize(("store", "driver"), [*POSTGRES, ("sql", "psycopg2")], indirect=True)
@pytest.mark.parametrize(
    ("begins", "ends", "rows"),
    [
        (False, "rollback", [1, 3]),
        (True, "rollback", [3]),
        (True, "close", [3]),
        (True, "commit", [1, 2, 3]),
    ],
)
def test_the_operations_connection_is_in_the_sessions_transaction_if_there_is_one(
    make_world, store, tmp_path, begins, ends, rows
):
    here = {"SQLALCHEMY_DATABASE_URI": f"sqlite:///{tmp_path}/shop.db"} if store == "sql" else {}
    world = make_world(**here)

    def pay():
        session, own = world.db.session, current_operation.connection
        if begins:
            session.execute(sa.select(world.Payment))
        for amount, by in (1, own), (2, session):
            by.execute(sa.insert(world.Payment).values(amount=amount))
        getattr(session, ends)()
        current_operation.connection.execute(sa.insert(world.Payment).values(amount=3))
        return {}, 201

    protect(world, pay)
    assert world.post().status_code == 201
    assert [amount for (amount,) in world.sql("select amount from payment order by 1")] == rows


# How it comes back to the pool, and how its commits wait for the disk.


@pytest.mark.parametrize("status", [201, 500])
def test_a_connection_comes_back_as_it_went_and_its_savepoints_work(make_world, status):
    options = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 2}
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=options)
    session, add = world.db.session, lambda amount: session.add(world.Payment(amount=amount))

    def pay():
        pay_once(world)
        list(session.execute(sa.select(world.Payment.id).execution_options(yield_per=5)))
        session.begin_nested()
        return {}, status

    protect(world, pay)
    assert world.post().status_code == status
    with world.app.app_context():
        driver = session.execute(sa.text("select 1")).cursor.connection
        assert not driver.autocommit
        assert has_own_cursors(driver)
        add(2)
        with session.begin_nested() as savepoint:
            add(3)
            session.flush()
            savepoint.rollback()
        session.commit()
        add(4)
        session.flush()
        session.rollback()
    assert world.sql("select amount from payment where amount > 1") == [(2,)]


WAITS = "select current_setting('synchronous_commit')"


@pytest.mark.parametrize(
    ("server", "options", "reads", "claim", "end"),
    [
        ("on", {}, False, "off", "on"),
        ("on", {}, True, "off", "on"),
        ("on", {"atomic": False}, False, "on", "on"),
        ("off", {}, False, "off", "on"),
    ],
    ids=["on its own connection", "in the session's", "with a lease", "an asynchronous server"],
)
def test_a_response_waits_for_the_disk_and_only_a_claim_that_is_all_there_is(
    world, server, options, reads, claim, end
):
    """That of an atomic operation is lost only together with what the view commits after it."""
    database = world.sql("select current_database()")[0][0]
    world.sql(f"alter database {database} set synchronous_commit = {server}")
    world.sql("create table commits (what text, how text)")
    world.sql(
        "create function note() returns trigger language plpgsql as $$ begin"
        f" insert into commits values (tg_op, ({WAITS})); return null; end $$"
    )
    world.sql(
        "create constraint trigger note after insert or update on idempotency_record"
        " deferrable initially deferred for each row execute function note()"
    )
    with world.app.app_context():
        world.db.engine.dispose()
    if reads:
        world.app.before_request(lambda: world.db.session.execute(sa.text("select 1")) and None)
    protect(world, list, **options)
    assert world.post().status_code == 200
    assert world.sql("select * from commits") == [("INSERT", claim), ("UPDATE", end)]
    assert world.sql(WAITS) == [(server,)]


# Refused, or warned about, before it commits.


def fails(_world):
    with pytest.raises(sa.exc.DBAPIError):
        current_operation.connection.execute(sa.text("select 1/0"))


def sends_past_every_guard(world, sent="commit; begin"):
    pay_once(world)
    own_cursor(world.db.session.execute(sa.text("select 1")).cursor.connection).execute(sent)


def rolls_back_past_every_guard(world):
    sends_past_every_guard(world, "rollback; begin")


def commits(world):
    list(world.db.session.execute(sa.select(world.Payment.id).execution_options(yield_per=5)))
    pay_once(world)
    world.db.session.execute(sa.text("select 1"))
    current_operation.connection.commit()


def commits_by_the_driver(_world):
    """By the connection that the operation gives: its driver's own, which no session has used."""
    connection = current_operation.connection
    connection.execute(sa.text("insert into payment (amount) values (1)"))
    connection.connection.driver_connection.commit()


ENDS = [fails, commits, sends_past_every_guard, rolls_back_past_every_guard, commits_by_the_driver]


@pytest.mark.parametrize("does", ENDS)
def test_what_a_success_cannot_commit_with_fails_it(world, view, does):
    view(lambda: does(world) or ({}, 201))
    said = {fails: "rollback", commits: "ended the operation's transaction"}.get(does, ".")
    with pytest.raises(Exception, match=said):  # the driver's own, too
        world.post()
    assert [record.state for record in world.records()] == ["in_progress"]
    assert does is sends_past_every_guard or world.count() == 0


@pytest.mark.parametrize("status", [201, 403])
def test_catching_a_refusal_in_the_view_does_not_help_whatever_it_responds(world, view, status):
    def pay():
        with suppress(NotAtomic):
            world.db.session.execute(sa.text("commit"))
        return {}, status

    view(pay)
    with pytest.raises(NotAtomic):
        world.post()


def test_a_raw_connection_is_warned_about_once(world, view, driver, caplog):
    def pay():
        with world.db.engine.begin() as connection:
            connection.execute(sa.select(world.Payment))
            if current_operation.key == "key-1":
                assert "connection of its own" not in caplog.text
            connection.execute(sa.insert(world.Payment).values(amount=1))
        return {}, 201

    view(pay, name=f"raw-{world.store}-{driver}")
    assert world.post().status_code == world.post(key="key-2").status_code == 201
    assert caplog.text.count("connection of its own") == 1


# What makes the sessions.


def test_a_session_that_cannot_join_is_refused_before_a_view_runs(world, view, monkeypatch):
    class Stubborn(factory_of(world.app, world.db).class_):
        def get_bind(self, *args, **kwargs):
            return world.db.engine

    ran = []
    view(lambda: ran.append(1) or {})
    monkeypatch.setattr(factory_of(world.app, world.db), "class_", Stubborn)
    with pytest.raises(ConfigurationError, match="does not join"):
        world.post()
    assert ran == []


# A statement of the session has failed, and nobody has rolled back when the operation ends.


@pytest.mark.parametrize("atomic", [True, False])
def test_the_next_operation_goes_on(world, atomic):
    """Whether the session knows of the error or only the server, or it was undone in a savepoint."""

    def run(key, job, **how):
        return world.idempotency.run(key, job, scope="s", name=f"job {key}", **how)

    def fail(note):
        pay_once(world)
        if note:
            world.db.session.add(world.Payment(amount=None, note=note))
        # A query flushes before it is sent: text alone does so only since SQLAlchemy 2.1.
        send = world.db.session.query if note else world.db.session.execute
        with pytest.raises((sa.exc.DBAPIError, ValueError)):
            send(sa.text("(select 1 / 0)")).all()
        return "failed"

    def fail_to_commit():
        world.db.session.add(world.Payment(amount=None))
        world.db.session.commit()

    def get_or_create():
        with pytest.raises(sa.exc.IntegrityError), world.db.session.begin_nested():
            world.db.session.add(world.Payment(amount=None))
        return "old"

    with world.app.app_context():
        for key, note in ("in a flush", "\0"), ("in a statement", ""):
            assert run(key, lambda note=note: fail(note)) == "failed"
        with pytest.raises(sa.exc.IntegrityError):
            run("in a commit", fail_to_commit, atomic=atomic)
        assert [run("nested", get_or_create, atomic=atomic) for _ in range(2)] == ["old", "old"]
        assert run("pays", lambda: pay_once(world) or "paid", atomic=atomic) == "paid"
    assert world.count() == 3
    world.assert_clean()
