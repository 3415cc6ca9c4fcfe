"""The view's session is on the operation's connection: what it leaves there, and what is refused.

That everything works in it as it does without us: ``tests/differential`` and ``tests/session``.
"""

from __future__ import annotations

import psycopg2
import pytest
import sqlalchemy as sa
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import sessionmaker

from flask_idempotency import ConfigurationError, NotAtomic, current_operation, idempotent
from tests.drivers import PSYCOPG2, own_cursor
from tests.integration.views import pay_once, protect
from tests.sessions import factory_of

LOCKED = (
    "select pid from pg_locks where relation = 'idempotency_record'::regclass and mode = 'RowShareLock'"
)


def test_view_and_record_share_one_backend(world, view):
    def pay():
        pid = world.db.session.scalar(sa.text("select pg_backend_pid()"))
        held = world.db.session.scalars(sa.text(LOCKED)).all()
        return [pid, *held, current_operation.connection.scalar(sa.text("select pg_backend_pid()"))]

    view(pay)
    assert len({*(pids := world.post().json)}) == 1
    assert len(pids) == 3


def test_a_client_that_goes_away_is_noticed_in_the_view_and_nowhere_else(world):
    interval = sa.text("show client_connection_check_interval")
    protect(world, lambda: [world.db.session.scalar(interval)])
    assert world.post().json == ["500ms"]
    with world.app.app_context(), world.db.engine.connect() as connection:
        assert connection.scalar(interval) == "0"


@pytest.mark.parametrize(("status", "left"), [(201, 1), (403, 0)])
def test_what_a_view_leaves_on_its_connection_stays_if_the_response_is_stored(make_world, status, left):
    """A temporary table is made by a statement like others; a lock of the session is by none."""
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS={"pool_size": 1, "max_overflow": 0})

    def pay():
        for statement in (
            "create temp table basket as select now() as began",
            "select pg_advisory_lock(1), pg_advisory_xact_lock(2)",
        ):
            world.db.session.execute(sa.text(statement))
        world.db.session.commit()
        return {}, status

    protect(world, pay)
    assert world.post().status_code == status
    found = world.sql(
        "select (select count(*) from pg_class where relname = 'basket' and relpersistence = 't'),"
        " (select count(*) from pg_locks where locktype = 'advisory')"
    )
    assert found == [(left, 1)]


def test_a_function_that_only_reads_after_the_commit_is_no_lost_work(world, view):
    def pay():
        pay_once(world)
        world.db.session.execute(sa.text("select pg_table_is_visible('payment'::regclass)"))
        return {}, 201

    view(pay)
    assert (world.post().status_code, world.count()) == (201, 1)


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

    def write(amount, by):
        by.execute(sa.insert(world.Payment).values(amount=amount))

    def pay():
        session = world.db.session
        if begins:
            session.execute(sa.select(world.Payment))
        write(1, current_operation.connection)
        write(2, session)
        getattr(session, ends)()
        write(3, current_operation.connection)
        return {}, 201

    protect(world, pay)
    assert world.post().status_code == 201
    assert [amount for (amount,) in world.sql("select amount from payment order by 1")] == rows


# Refused, or warned about, before it commits.


def fails(world):
    with pytest.raises(sa.exc.DBAPIError):
        current_operation.connection.execute(sa.text("select 1/0"))


def sends_past_every_guard(sent):
    def view(world):
        pay_once(world)
        own_cursor(world.db.session.execute(sa.text("select 1")).cursor.connection).execute(sent)

    return view


def commits(world):
    list(world.db.session.execute(sa.select(world.Payment.id).execution_options(yield_per=5)))
    pay_once(world)
    world.db.session.execute(sa.text("select 1"))
    current_operation.connection.commit()


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (fails, "rollback"),
        (commits, "ended the operation's transaction"),
        *(
            (sends_past_every_guard(sent), ".")
            for sent in ("commit", "commit; begin", "rollback; begin")
        ),
    ],
)
def test_what_a_success_cannot_commit_with_fails_it(world, view, does, said):
    view(lambda: does(world) or ({}, 201))
    with pytest.raises((NotAtomic, sa.exc.SQLAlchemyError), match=said):
        world.post()
    assert [record.state for record in world.records()] == ["in_progress"]


@PSYCOPG2
def test_a_level_chosen_on_the_drivers_connection_harms_no_later_request(world, view):
    def pay():
        pay_once(world)
        world.db.session.connection().connection.driver_connection.set_isolation_level(0)
        return {}, 201

    view(pay)
    with pytest.raises((NotAtomic, sa.exc.SQLAlchemyError, psycopg2.Error)):
        world.post()
    assert world.count() == 0
    world.sql("insert into payment (amount) values (2)")
    assert world.count() == 1


def test_the_log_says_what_is_known_of_a_connection_that_the_view_closes(world, view, caplog):
    view(lambda: world.db.session.connection().connection.driver_connection.close() or ({}, 201))
    assert world.post().status_code == 503
    (line,) = [each.getMessage() for each in caplog.records if "unavailable" in each.getMessage()]
    assert "None" not in line


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


@pytest.mark.parametrize("has_served", [False, True])
def test_a_session_that_cannot_join_is_refused_before_a_view_runs(world, view, has_served):
    class Stubborn(factory_of(world.app, world.db).class_):
        def get_bind(self, *args, **kwargs):
            return world.db.engine

    ran = []
    view(lambda: ran.append(1) or {})
    if has_served:
        world.post(key="key-0")
    factory_of(world.app, world.db).class_ = Stubborn
    with pytest.raises(ConfigurationError, match="does not join"):
        world.post()
    assert len(ran) == has_served


@pytest.mark.parametrize("has_served", [False, True])
@pytest.mark.parametrize("status", [201, 503])
def test_what_makes_the_sessions_may_be_replaced_later(make_world, has_served, status):
    world = make_world(db=SQLAlchemy())

    def pay():
        world.db.session.remove()  # so the next one is made in the view
        pay_once(world)
        return {}, status

    protect(world, pay)
    if has_served:
        world.post(key="key-0")
    before = world.count()
    with world.app.app_context():
        world.db.session.session_factory = sessionmaker(world.db.engine)
    assert [world.post().status_code for _ in range(2)] == [status] * 2
    assert world.count() == before + (status == 201)
    world.assert_clean()


def test_a_double_of_a_session_is_refused(make_world):
    world = make_world(db=SQLAlchemy(), PROPAGATE_EXCEPTIONS=True)
    world.app.add_url_rule("/payments", "pay", idempotent(dict), methods=["POST"])
    world.db.session.session_factory = object
    with pytest.raises(ConfigurationError, match="not a scoped_session over a sessionmaker"):
        world.post()


class TestInNeedOfRollback:
    """A statement of the session has failed, and nobody has rolled back when the operation ends."""

    @pytest.fixture(params=["text", "flush"])
    def failing(self, world, request):
        """A view that catches an error, and answers: the session knows of it, or only the server."""

        def fail():
            pay_once(world)
            if request.param == "flush":
                world.db.session.add(world.Payment(amount=None, note="\0"))
            with pytest.raises((sa.exc.DBAPIError, ValueError)):
                world.db.session.execute(sa.text("select 1 / 0"))
            return "failed"

        return fail

    @pytest.fixture
    def run(self, world):
        with world.app.app_context():
            yield lambda key, job, **how: world.idempotency.run(
                key, job, scope="s", name=f"job {key}", **how
            )
        world.assert_clean()

    @pytest.mark.parametrize("place", ["before it", "inside"])
    def test_the_next_operation_goes_on(self, world, run, failing, place):
        def pay():
            if place == "inside":
                world.db.session.rollback()
            pay_once(world)
            return "paid"

        assert run("a", failing) == "failed"
        if place == "before it":
            world.db.session.rollback()
        assert run("b", pay) == "paid"
        assert world.count() == 2

    def test_one_that_touches_no_database_goes_on(self, run, failing):
        run("a", failing)
        assert [run("b", lambda: "done"), run("b", lambda: "again")] == ["done", "done"]

    def test_one_that_ended_with_an_error_disturbs_no_later_one(self, world, run):
        def fail():
            world.db.session.add(world.Payment(amount=None))
            world.db.session.commit()

        with pytest.raises(sa.exc.IntegrityError):
            run("a", fail, atomic=False)
        run("b", lambda: pay_once(world), atomic=False)
        assert world.count() == 1

    @pytest.mark.parametrize("atomic", [True, False])
    def test_what_was_rolled_back_to_a_savepoint_needs_no_commit(self, world, run, atomic):
        def get_or_create():
            with pytest.raises(sa.exc.IntegrityError), world.db.session.begin_nested():
                world.db.session.add(world.Payment(amount=None))
            return "old"

        assert [run("k", get_or_create, atomic=atomic) for _ in range(2)] == ["old", "old"]
