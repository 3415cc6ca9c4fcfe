"""PostgreSQL or the pool refuses: too long, too idle, no connection, no space on the disk."""

import pytest
import sqlalchemy as sa

from tests.integration.postgres_faults.conftest import first_time, settings
from tests.waiting import wait_until


def test_a_view_idle_for_too_long_cannot_commit_on_a_fresh_connection(make_world, add_view, retries):
    world = make_world(**settings(idle_in_transaction_session_timeout=500))

    def idle():
        session = world.db.session
        pid = session.scalar(sa.text("select pg_backend_pid()"))
        gone = "select count(*) = 0 from pg_stat_activity where pid = :pid"
        wait_until(lambda: world.sql(gone, pid=pid)[0][0], "the connection is ended")
        with pytest.raises(sa.exc.DBAPIError):
            session.execute(sa.text("select 1"))
        session.rollback()
        session.add(world.Payment(amount=666))
        with pytest.raises(sa.exc.PendingRollbackError):
            session.commit()
        session.rollback()

    runs = add_view(world, during=first_time(idle))
    retries(world, runs, world.post())


def test_without_a_free_connection_in_the_pool_nothing_runs(make_world, add_view, retries):
    pool = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 0.1}
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=pool)
    runs = add_view(world)
    with world.app.app_context(), world.db.engine.connect():
        refused = world.post()
    retries(world, runs, refused, total=1)


FULL_DISK = "raise sqlstate '53100' using message = 'no space left on device';"
TOO_LONG = "perform pg_sleep(5); return new;"
"""A COMMIT itself has no timeout in Postgres; what is sent together with it has."""


@pytest.mark.parametrize(
    ("event", "does"),
    [("insert", FULL_DISK), ("update", FULL_DISK), ("update", TOO_LONG)],
    ids=["full disk in the claim", "full disk in the last message", "too long in the last message"],
)
def test_a_message_of_ours_that_fails_keeps_neither_record_nor_writes(
    make_world, add_view, retries, event, does
):
    """A trigger stands for the disk: it fails with the code that Postgres gives."""
    world = make_world(**settings(statement_timeout=500))
    runs = add_view(world)
    world.sql(f"create function fail() returns trigger language plpgsql as $$ begin {does} end $$")
    on = f"before {event} on idempotency_record for each row execute function fail()"
    world.sql(f"create trigger fails {on}")
    failed = world.post()
    entered = len(runs)
    assert entered == (event == "update")
    world.sql("drop trigger fails on idempotency_record")
    retries(world, runs, failed, total=entered + 1)
