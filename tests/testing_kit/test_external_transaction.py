"""``external_transaction``: the application on one connection, which the test rolls back."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from flask import g, request
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from flask_idempotency import ConfigurationError, current_operation, idempotent
from flask_idempotency.cli import cli
from flask_idempotency.testing import external_transaction
from tests.stores import BOTH


@pytest.fixture
def store(request):
    return getattr(request, "param", "postgres")


@pytest.fixture
def shop(world):
    """With a protected view that does what the test says, and one route of every other kind."""
    session, runs = world.db.session, []

    @world.app.post("/payments")
    @idempotent
    def pay():
        runs.append(current_operation.attempt)
        world.first()
        session.add(world.Payment(amount=request.json["amount"]))
        session.commit()
        world.during()
        return {"run": len(runs)}, world.status

    @world.app.post("/leased")
    @idempotent(atomic=False, on_interrupted="retry")
    def leased():
        runs.append(current_operation.attempt)
        current_operation.step("charge", lambda: runs.append("charge"))
        current_operation.step("save", save, atomic=True)
        world.during()
        return {}, 201

    def save():
        session.add(world.Payment(amount=7))

    @world.app.post("/plain")
    def plain():
        session.add(world.Payment(amount=1))
        session.commit()
        return {}, 201

    world.first = world.during = bool
    world.status, world.runs = 201, runs
    return world


@pytest.fixture
def outside(shop):
    """The recipe of SQLAlchemy's documentation, "Joining a Session into an External Transaction"."""
    with shop.app.app_context():
        engine = shop.db.engine
    with engine.connect() as connection:
        transaction = connection.begin()
        with external_transaction(shop.app, connection):
            yield connection
        transaction.rollback()
    assert shop.sql("select * from payment") == []
    assert shop.records() == []
    assert shop.sql("select * from idempotency_record_step") == []


def amounts(outside):
    return list(outside.scalars(sa.text("select amount from payment order by id")))


@BOTH
def test_writes_and_record_are_there_until_the_rollback(shop, outside, assert_replayed):
    first = shop.post()
    assert first.status_code == 201
    assert amounts(outside) == [5]
    assert outside.scalars(sa.text("select state from idempotency_record")).all() == ["completed"]
    assert_replayed(first, shop.post())
    assert shop.post(json={"amount": 6}).status_code == 422
    assert shop.post(key=None).status_code == 400
    assert shop.post(key="key-2", json={"amount": 6}).status_code == 201
    assert (shop.runs, amounts(outside)) == ([1, 1], [5, 6])
    assert [shop.post(f"/{path}", key=path).status_code for path in ("plain", "leased")] == [201, 201]


@pytest.mark.parametrize("number", [1, 2])
def test_two_tests_see_nothing_of_each_other(shop, outside, number):
    assert shop.post().json == {"run": 1}
    assert amounts(outside) == [5], number


@BOTH
def test_two_transactions_one_after_another_do_not_either(shop):
    with shop.app.app_context():
        engine = shop.db.engine
    for run in 1, 2:
        with engine.connect() as connection, connection.begin() as transaction:
            with external_transaction(shop.app, connection):
                assert shop.post().json == {"run": run}
            transaction.rollback()
    assert shop.post().json == {"run": 3}
    assert shop.count() == 1


def test_the_fixture_of_flask_sqlalchemy(shop):
    """Its engines are replaced by connections; db.session is the test's and the application's."""
    with shop.app.app_context():
        engines = shop.db.engines
        engine = engines[None]
        connection = engines[None] = engine.connect()
        transaction = connection.begin()
        with external_transaction(shop.app, connection):
            shop.db.session.add(shop.Payment(amount=3))
            shop.db.session.commit()
            assert shop.post().status_code == 201
            assert shop.post().headers["Idempotent-Replayed"] == "true"
            assert shop.db.session.scalars(sa.select(shop.Payment.amount)).all() == [3, 5]
            shop.db.session.remove()
        transaction.rollback()
        connection.close()
        engines[None] = engine
    assert (shop.count(), shop.records()) == (0, [])


@BOTH
def test_an_error_of_the_view_is_rolled_back_and_its_attempt_counts(shop, outside):
    shop.status = 500
    assert shop.post().status_code == 500
    assert amounts(outside) == []
    shop.status = 201
    assert shop.post().status_code == 201
    assert (shop.runs, amounts(outside)) == ([1, 2], [5])


def test_an_error_of_the_database_harms_nobody_else(shop, outside):
    shop.app.config["PROPAGATE_EXCEPTIONS"] = False
    shop.post(key="key-0")
    shop.during = lambda: shop.db.session.execute(sa.text("select 1 / 0"))
    assert shop.post().status_code == 500
    shop.during = bool
    assert shop.post().status_code == 201
    assert amounts(outside) == [5, 5]


def test_rollbacks_and_savepoints_of_the_view_are_its_own(shop, outside):
    def during():
        session = shop.db.session
        session.add(shop.Payment(amount=10))
        session.flush()
        session.rollback()
        session.add(shop.Payment(amount=20, note="same"))
        session.commit()
        twice = sa.insert(shop.Payment).values(amount=21, note="same")
        savepoint = session.begin_nested()
        with pytest.raises(IntegrityError):
            session.execute(twice)
        savepoint.rollback()
        session.commit()
        current_operation.connection.execute(sa.insert(shop.Payment).values(amount=30))

    shop.during = during
    assert shop.post().status_code == 201
    assert amounts(outside) == [5, 20, 30]


def test_what_a_function_before_the_view_reads_and_sets_reaches_it(shop, outside):
    tenant = sa.text("select current_setting('app.tenant', true)")

    @shop.app.before_request
    def sign_in():
        g.rows = shop.db.session.scalar(sa.text("select count(*) from payment"))
        shop.db.session.execute(sa.text("select set_config('app.tenant', 'alice', true)"))

    seen = []
    shop.first = lambda: seen.append((g.rows, shop.db.session.scalar(tenant)))
    with shop.app.app_context():
        shop.db.session.add(shop.Payment(amount=1))
        shop.db.session.commit()
    assert shop.post().status_code == 201
    assert shop.post().headers["Idempotent-Replayed"] == "true"
    assert seen == [(1, "alice")]
    assert not outside.scalar(tenant)


def test_work_that_is_left_uncommitted_before_the_view_is_refused(shop, outside):
    shop.app.before_request(
        lambda: shop.db.session.execute(sa.insert(shop.Payment).values(amount=1)) and None
    )
    shop.app.config["PROPAGATE_EXCEPTIONS"] = False
    assert shop.post().status_code == 500
    assert amounts(outside) == []


@BOTH
def test_a_leased_operation_keeps_its_steps(shop, outside):
    shop.during = lambda: 1 / 0
    shop.app.config["PROPAGATE_EXCEPTIONS"] = False
    assert shop.post("/leased").status_code == 500
    assert amounts(outside) == [7]
    shop.during = bool
    shop.post("/leased", key="key-2")
    assert shop.post("/leased", key="key-2").headers["Idempotent-Replayed"] == "true"
    assert (amounts(outside), shop.runs) == ([7, 7], [1, "charge", 1, "charge"])


def test_a_purge_deletes_what_has_expired(shop, outside):
    shop.post()
    outside.execute(sa.text("update idempotency_record set expires_at = now() - interval '1 day'"))
    result = shop.app.test_cli_runner().invoke(cli, ["purge"])
    assert result.exit_code == 0, result.output
    assert outside.scalar(sa.text("select count(*) from idempotency_record")) == 0
    assert shop.post().json == {"run": 2}


def test_settings_of_the_test_stay(shop, outside):
    show = sa.text("select current_setting('lock_timeout')")
    outside.execute(sa.text("set local lock_timeout = '7s'"))
    seen = []
    shop.during = lambda: seen.append(shop.db.session.scalar(show))
    with external_transaction(shop.app, outside):
        assert shop.post().status_code == 201
        assert shop.post("/leased").status_code == 201
    assert [*seen, outside.scalar(show)] == ["7s"] * 3


@pytest.fixture
def second(shop, outside):
    """What a test does for itself, with a connection that is none."""
    with shop.app.app_context():
        connection = shop.db.engine.connect()
    yield connection
    connection.close()


def test_what_the_test_itself_has_only_read_with_gives_way(shop, outside, second):
    second.execute(sa.select(shop.Payment))
    assert shop.post().status_code == 201
    second.rollback()
    assert amounts(outside) == [5]


def test_what_the_test_itself_has_not_committed_is_refused(shop, outside, second):
    shop.app.config["PROPAGATE_EXCEPTIONS"] = False
    second.execute(sa.insert(shop.Payment).values(amount=1))
    assert shop.post().status_code == 500
    second.commit()
    assert shop.post().status_code == 201
    assert amounts(outside) == [1, 5]


def test_another_application_is_left_alone(outside, make_world, add_view):
    other = make_world()
    add_view(other)
    assert other.post().status_code == 201
    assert other.count() == 1
    other.assert_clean()


def test_a_second_connection_is_refused(shop, outside):
    def first():
        with pytest.raises(ConfigurationError, match="has one connection"):
            shop.post("/leased", key="key-2")
        with (
            pytest.raises(ConfigurationError, match="has one connection"),
            shop.db.engine.begin() as other,
        ):
            other.execute(sa.text("select 1"))

    shop.app.testing = True
    shop.first = first
    assert shop.post().status_code == 201
    assert amounts(outside) == [5]


def test_a_connection_without_a_transaction_is_refused(shop):
    with shop.app.app_context():
        engine = shop.db.engine
    with engine.connect() as connection, pytest.raises(ConfigurationError, match="has begun"):
        external_transaction(shop.app, connection).__enter__()


def test_a_connection_may_be_of_an_engine_of_the_tests_own(shop, assert_replayed):
    engine = sa.create_engine(shop.app.config["SQLALCHEMY_DATABASE_URI"])
    with engine.connect() as connection:
        transaction = connection.begin()
        with external_transaction(shop.app, connection):
            assert_replayed(shop.post(), shop.post())
            assert amounts(connection) == [5]
        transaction.rollback()
    engine.dispose()
    assert shop.count() == 0
    assert shop.records() == []


def test_a_connection_to_another_database_is_refused(shop):
    url = sa.make_url(shop.app.config["SQLALCHEMY_DATABASE_URI"])
    engine = sa.create_engine(url.set(database="postgres"))
    with engine.begin() as connection, pytest.raises(ConfigurationError, match="with the same URL"):
        external_transaction(shop.app, connection).__enter__()
    engine.dispose()


@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_another_store_is_refused(shop):
    with shop.app.app_context():
        engine = shop.db.engine
    with engine.begin() as connection, pytest.raises(ConfigurationError, match="the stores hybrid"):
        external_transaction(shop.app, connection).__enter__()


def a_session_of_sqlalchemys(db, **options):
    db.session = Session(**options)
    db.session.remove = lambda: None  # from Flask 3.2 on, each request's own context ends with it


def a_scoped_session(db, **options):
    db.session = scoped_session(sessionmaker(**options))


def a_scoped_session_of_flask_sqlalchemys(db, **options):
    db.session = db._make_scoped_session(options)


def a_connection_among_the_engines(db, bind, **_options):
    db.engines[None] = bind


RECIPES = [
    a_session_of_sqlalchemys,
    a_scoped_session,
    a_scoped_session_of_flask_sqlalchemys,
    a_connection_among_the_engines,
]


@pytest.fixture
def recipe(shop, request):
    """SQLAlchemy's, "Joining a Session into an External Transaction", as people write it."""
    shop.app.testing = True
    with shop.app.app_context():
        engines, usual, engine = shop.db.engines, shop.db.session, shop.db.engine
        with engine.connect() as connection:
            transaction = connection.begin()
            request.param(shop.db, bind=connection, join_transaction_mode="create_savepoint")
            yield connection
            shop.db.session.close()
            transaction.rollback()
        shop.db.session, engines[None] = usual, engine


def commit_in_the_test(shop):
    shop.db.session.execute(sa.text("insert into payment (amount) values (1)"))
    shop.db.session.commit()
    assert shop.db.session.scalar(sa.text("select count(*) from payment")) == 1


@BOTH
@pytest.mark.parametrize("before", [bool, commit_in_the_test])
@pytest.mark.parametrize("recipe", RECIPES, indirect=True)
def test_the_recipe_alone_is_refused_with_what_to_write_instead(shop, recipe, before):
    before(shop)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"external_transaction\(app, conn"):
            shop.post()
    assert shop.runs == []
