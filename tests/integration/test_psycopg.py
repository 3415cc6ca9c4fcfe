"""What each driver does with prepared statements, and what only psycopg 3 has.

Its ways to write: ``tests/differential/manuals.py``.
"""

import psycopg
import pytest
import sqlalchemy as sa

from servers import plain_dsn
from tests.drivers import EACH, PSYCOPG

PREPARED = "select count(*) from pg_prepared_statements where name ~ '^idempotency_'"


@pytest.fixture
def make_shop(make_world, add_view):
    """A function that makes an application with one pooled connection, on which we prepare."""

    def make(connect_args=None, during=bool, **options):
        pool = {"pool_size": 1, "max_overflow": 0, "connect_args": connect_args or {}}
        world = make_world(SQLALCHEMY_ENGINE_OPTIONS=pool)
        add_view(world, **options)
        add_view(world, "/does", endpoint="does", during=lambda: during(world), **options)
        for key in "abcdef":  # what is sent for the sixth time is prepared
            assert world.post(key=key).status_code == 201
        return world

    return make


def assert_serves(world, key):
    """Two requests, and a retry of the first."""
    answers = [world.post(key=each) for each in (key, f"{key}-next", key)]
    assert [answer.status_code for answer in answers] == [201] * 3
    assert answers[-1].headers["Idempotent-Replayed"] == "true"


@EACH
def test_a_view_that_deallocates_all_costs_no_later_request(make_shop, postgres, driver):
    deallocate = lambda world: world.db.session.execute(sa.text("deallocate all"))  # noqa: E731
    only_ours = {"prepare_threshold": 10**6} if driver == "psycopg" else None
    world = make_shop(only_ours, during=deallocate)  # psycopg 3.1 knows nothing of it
    assert world.sql(PREPARED)[0][0] > 0
    mark = len(postgres.log)
    for number in range(3):
        assert world.post("/does", key=f"does-{number}").status_code == 201
    assert_serves(world, "key")
    assert "already exists" not in postgres.log[mark:]


@PSYCOPG
def test_nothing_is_prepared_where_the_application_says_so(make_shop):
    assert make_shop(connect_args={"prepare_threshold": None}).sql(PREPARED)[0][0] == 0


@EACH
@pytest.mark.parametrize("atomic", [True, False])
def test_a_migration_under_prepared_statements_costs_no_request(make_shop, postgres, atomic):
    world = make_shop(atomic=atomic)
    for number in range(6):
        assert_serves(world, f"before-{number}")
    url = world.app.config["SQLALCHEMY_DATABASE_URI"]
    with psycopg.connect(plain_dsn(url)) as other:  # as a migration does
        other.execute("create domain bytes as bytea")
        other.execute("alter table idempotency_record alter fingerprint type bytes")
    mark = len(postgres.log)
    assert_serves(world, "key")
    assert "cached plan must not change result type" in postgres.log[mark:]
    assert "SET LOCAL can only be used" not in postgres.log[mark:]


@PSYCOPG
def test_an_interrupted_message_leaves_no_connection_in_the_pool(make_shop, monkeypatch):
    """A worker's time-out strikes anywhere."""
    world = make_shop()
    with world.app.app_context(), world.db.engine.connect() as connection:
        driver, waits = connection.connection.driver_connection, []
    original = driver.wait

    def wait(generator, *args):
        waits.append(generator)
        if len(waits) == 1:
            next(generator)
            raise SystemExit
        return original(generator, *args)

    monkeypatch.setattr(driver, "wait", wait)
    with pytest.raises(SystemExit):
        world.post(key="interrupted")
    assert driver.closed
    assert world.post(key="interrupted").status_code == 201
    world.assert_clean()
