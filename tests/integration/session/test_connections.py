"""The view's connection and its cursors: before the view, in it, and how it comes back to the pool."""

import pytest
import sqlalchemy as sa

from tests.drivers import has_own_cursors
from tests.integration.views import pay_once, protect

ONE_CONNECTION = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 2}


@pytest.mark.parametrize("status", [201, 500])
def test_a_connection_comes_back_as_it_went_and_its_savepoints_work(make_world, status):
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=ONE_CONNECTION)
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


NOTE = "select current_setting('synchronous_commit')"


def note_commits(world, when):
    """Note how each write of a record waits for the disk."""
    world.sql("create table commits (how text)")
    world.sql(
        "create function note() returns trigger language plpgsql as $$"
        f" begin insert into commits {NOTE}; return null; end $$"
    )
    world.sql(f"create {when} for each row execute function note()")


def test_a_server_that_commits_asynchronously_does_not_do_so_with_a_response(world):
    database = world.sql("select current_database()")[0][0]
    world.sql(f"alter database {database} set synchronous_commit = off")
    with world.app.app_context():
        world.db.engine.dispose()
    deferred = "on idempotency_record deferrable initially deferred"
    note_commits(world, f"constraint trigger note after update {deferred}")
    protect(world, list)
    assert world.post().status_code == 200
    assert world.sql("select how from commits") == [("on",)]
    assert world.sql(NOTE) == [("off",)]


@pytest.mark.parametrize(
    ("options", "reads", "waits"),
    [({}, False, "off"), ({}, True, "off"), ({"atomic": False}, False, "on")],
    ids=["on a connection of its own", "in the session's transaction", "with a lease"],
)
def test_only_a_claim_that_is_all_there_is_waits_for_the_disk(world, options, reads, waits):
    """That of an atomic operation is lost only together with what the view commits after it."""
    note_commits(world, "trigger note after insert on idempotency_record")
    if reads:
        world.app.before_request(lambda: world.db.session.execute(sa.text("select 1")) and None)
    protect(world, list, **options)
    assert world.post().status_code == 200
    assert world.sql("select how from commits") == [(waits,)]
