"""The view's own session, joined to the operation: everything works as it does without us."""

from __future__ import annotations

import time

import pytest
import sqlalchemy as sa
from flask import after_this_request, g, request
from sqlalchemy.exc import DBAPIError, IntegrityError

from flask_idempotency import current_operation, idempotent
from flask_idempotency.core.errors import sqlstate
from tests.integration.views import pay_once, protect


def pid(connection):
    return connection.scalar(sa.text("select pg_backend_pid()"))


def test_view_and_record_share_one_backend(world, view):
    seen = []

    def pay():
        session = world.db.session
        seen.append((pid(session), pid(current_operation.connection)))
        holders = session.execute(
            sa.text(
                "select pid from pg_locks where relation = 'idempotency_record'::regclass"
                " and mode = 'RowShareLock'"
            )
        ).scalars()
        seen.append(list(holders))
        session.add(world.Payment(amount=1))
        session.commit()
        return {}, 201

    view(pay)
    assert world.post().status_code == 201
    (of_session, of_operation), holders = seen
    assert of_session == of_operation
    assert holders == [of_session]


def test_commit_inside_the_view_is_not_visible_outside_before_the_response(world, view):
    counts = []

    def pay():
        world.db.session.add(world.Payment(amount=1))
        world.db.session.commit()
        counts.append(world.count())
        return {}, 201

    view(pay)
    world.post()
    assert counts == [0]
    assert world.count() == 1


def test_objects_are_readable_after_commit(world, view):
    def pay():
        payment = world.Payment(amount=7)
        world.db.session.add(payment)
        world.db.session.commit()
        return {"id": payment.id, "amount": payment.amount}, 201

    view(pay)
    assert world.post().json["amount"] == 7


def test_rollback_undoes_only_what_was_not_committed(world, view):
    def pay():
        session = world.db.session
        session.add(world.Payment(amount=1))
        session.commit()
        session.add(world.Payment(amount=2))
        session.flush()
        session.rollback()
        session.add(world.Payment(amount=3))
        session.commit()
        return {}, 201

    view(pay)
    assert world.post().status_code == 201
    assert world.sql("select amount from payment order by 1") == [(1,), (3,)]


def test_begin_nested_and_an_integrity_error_handled_by_the_view(world, view):
    def pay():
        session = world.db.session
        session.add(world.Payment(amount=1, note="same"))
        session.commit()
        try:
            with session.begin_nested():
                session.add(world.Payment(amount=2, note="same"))
        except IntegrityError:
            session.add(world.Payment(amount=3, note="other"))
        session.commit()
        session.add(world.Payment(amount=4, note="same"))
        with pytest.raises(IntegrityError):
            session.commit()
        session.rollback()
        session.add(world.Payment(amount=5))
        session.commit()
        return {}, 201

    view(pay)
    assert world.post().status_code == 201
    assert world.sql("select amount from payment order by 1") == [(1,), (3,), (5,)]


def test_session_remove_inside_the_view_stays_joined(world, view):
    def pay():
        world.db.session.add(world.Payment(amount=1))
        world.db.session.commit()
        world.db.session.remove()
        world.db.session.add(world.Payment(amount=2))
        world.db.session.commit()
        assert pid(world.db.session) == pid(current_operation.connection)
        return {}, 500

    view(pay)
    world.post()
    assert world.count() == 0, "a 5xx rolls back what both sessions committed"


def test_a_session_used_before_the_view_works_and_its_objects_stay_usable(world, view):
    world.sql("insert into payment (amount) values (41)")
    pids = []

    @world.app.before_request
    def load_user():
        g.user = world.db.session.execute(sa.select(world.Payment)).scalar_one()
        pids.append(pid(world.db.session))

    def pay():
        g.user.amount += 1
        world.db.session.add(world.Payment(amount=g.user.id))
        world.db.session.commit()
        return {"amount": g.user.amount}, 201

    @world.app.after_request
    def use_user(response):
        response.headers["X-Amount"] = str(g.user.amount)
        return response

    view(pay)
    answer = world.post()
    assert answer.json == {"amount": 42}
    assert answer.headers["X-Amount"] == "42"
    assert world.count() == 2


def test_changes_not_flushed_before_the_view_go_along_into_the_operation(world, view):
    @world.app.before_request
    def add_early():
        world.db.session.add(world.Payment(amount=1))

    def pay():
        world.db.session.commit()
        return {}, 201

    view(pay)
    assert world.post().status_code == 201
    assert world.count() == 1
    world.post()
    assert world.count() == 1


def test_a_nested_application_context_joins_too(world, view):
    def pay():
        with world.app.app_context():
            world.db.session.add(world.Payment(amount=1))
            world.db.session.commit()
        return {}, 500

    view(pay)
    world.post()
    assert world.count() == 0


def test_after_request_and_teardown_may_use_the_session(world, view):
    seen = []

    def pay():
        @after_this_request
        def count(response):
            seen.append(world.db.session.scalar(sa.select(sa.func.count(world.Payment.id))))
            return response

        world.db.session.add(world.Payment(amount=1))
        world.db.session.commit()
        return {}, 201

    @world.app.teardown_request
    def count_again(_error):
        seen.append(world.db.session.scalar(sa.select(sa.func.count(world.Payment.id))))

    view(pay)
    world.post()
    assert seen == [1, 1]


def test_two_requests_do_not_share_anything_through_the_extension(world, view):
    def pay():
        world.db.session.add(world.Payment(amount=current_operation.attempt))
        world.db.session.commit()
        return {}, 201

    view(pay)
    assert [world.post(key=f"k{i}").status_code for i in range(20)] == [201] * 20
    assert world.count() == 20
    with world.app.app_context():
        assert world.db.engine.pool.checkedout() == 0


def test_core_statements_bulk_inserts_and_server_side_cursors(world, view):
    def pay():
        session, payment = world.db.session, world.Payment
        session.execute(sa.insert(payment), [{"amount": i} for i in range(50)])
        session.bulk_insert_mappings(payment, [{"amount": 1}, {"amount": 2}])
        session.commit()
        rows = session.execute(sa.select(payment.amount).execution_options(yield_per=10))
        total = sum(1 for _ in rows)
        session.commit()
        with current_operation.connection.connection.cursor() as cursor:
            cursor.executemany("insert into payment (amount) values (%s)", [(1,), (2,)])
        session.commit()
        return {"total": total}, 201

    view(pay)
    assert world.post().json == {"total": 52}
    assert world.count() == 54
    assert world.post().json == {"total": 52}


def test_listeners_of_the_application_stay_in_place(make_world):
    from flask_sqlalchemy import SQLAlchemy

    db, heard = SQLAlchemy(), []
    sa.event.listen(db.session, "before_commit", lambda session: heard.append("early"))
    world = make_world(db=db)
    sa.event.listen(db.session, "before_commit", lambda session: heard.append("late"))

    @world.app.post("/payments")
    @idempotent
    def pay():
        world.db.session.add(world.Payment(amount=1))
        world.db.session.commit()
        return {}, 201

    heard.clear()
    assert world.post().status_code == 201
    assert {"early", "late"} <= set(heard)


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_the_applications_isolation_level_and_lock_timeout_hold_in_the_view(make_world, level):
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS={"isolation_level": level})

    @world.app.before_request
    def set_timeout():
        world.db.session.execute(sa.text("set lock_timeout = '7s'"))
        world.db.session.commit()

    @world.app.post("/payments")
    @idempotent
    def pay():
        show = world.db.session.scalar
        return [
            show(sa.text("show transaction_isolation")),
            show(sa.text("show lock_timeout")),
            show(sa.text("show synchronous_commit")),
            show(sa.text("show client_connection_check_interval")),
        ]

    assert world.post().json == [level.lower(), "7s", "on", "500ms"]
    with world.app.app_context(), world.db.engine.connect() as connection:
        assert connection.scalar(sa.text("show client_connection_check_interval")) == "0"


def add_taken_note(world):
    world.db.session.add(world.Payment(amount=1, note="taken"))


def test_an_integrity_error_the_view_handles_is_stored(world):
    world.sql("insert into payment (amount, note) values (0, 'taken')")

    @world.app.post("/payments")
    @idempotent
    def pay():
        world.db.session.add(world.Payment(amount=2))
        world.db.session.commit()
        try:
            add_taken_note(world)
            world.db.session.commit()
        except IntegrityError:
            world.db.session.rollback()
            return {"taken": True}, 409
        return {}, 201

    assert world.post().status_code == 409
    world.sql("delete from payment where note = 'taken'")
    assert world.post().headers["Idempotent-Replayed"] == "true"
    assert world.sql("select amount from payment") == [(2,)]


def test_a_database_error_that_an_error_handler_handles_is_stored(world):
    world.sql("insert into payment (amount, note) values (0, 'taken')")
    world.app.register_error_handler(IntegrityError, lambda error: ({"taken": True}, 409))
    world.app.register_error_handler(DBAPIError, lambda error: ({"wrong": True}, 400))

    @world.app.post("/payments")
    @idempotent
    def pay():
        world.db.session.add(world.Payment(amount=2))
        world.db.session.commit()
        if request.json["amount"] == 5:
            add_taken_note(world)
            world.db.session.flush()
        world.db.session.execute(sa.text("select 1 / 0"))
        return {}, 201

    for key, amount, status in ("a", 5, 409), ("b", 6, 400):
        first, replay = (world.post(key=key, json={"amount": amount}) for _ in range(2))
        assert (first.status_code, replay.status_code) == (status, status)
        assert replay.headers["Idempotent-Replayed"] == "true"
    assert world.sql("select amount from payment order by id") == [(0,), (2,), (2,)]


def test_a_deferred_constraint_that_fails_at_the_commit_keeps_nothing(world):
    """The error comes as SQLAlchemy's own, as it would without us."""
    world.sql("alter table payment add constraint one unique (amount) deferrable initially deferred")
    world.sql("insert into payment (amount) values (5)")
    caught = []

    @world.app.errorhandler(IntegrityError)
    def note(error):
        caught.append(sqlstate(error.orig))
        return {}, 409

    @world.app.post("/payments")
    @idempotent
    def pay():
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        return {}, 201

    assert [world.post().status_code for _ in range(2)] == [409, 409]
    assert caught == ["23505"], "the view's own commit raised it, so its response is stored"
    world.sql("delete from payment")
    assert world.post(key="key-2").status_code == 201
    assert world.count() == 1


@pytest.mark.parametrize(("status", "left"), [(201, 1), (403, 0)])
def test_what_a_view_leaves_on_its_connection_stays_if_the_response_is_stored(make_world, status, left):
    """A temporary table is made by a statement like others; a lock of the session is by none."""
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS={"pool_size": 1, "max_overflow": 0})
    locks = []

    @world.app.post("/payments")
    @idempotent
    def pay():
        execute = world.db.session.execute
        execute(sa.text("create temp table basket as select now() as began"))
        execute(sa.text("select pg_advisory_lock(1), pg_advisory_xact_lock(2)"))
        world.db.session.commit()
        assert execute(sa.text("select began = now() from basket")).scalar_one()
        locked = "select objid::int from pg_locks where locktype = 'advisory' order by objid"
        locks.append(list(execute(sa.text(locked)).scalars()))
        return {}, status

    assert world.post().status_code == status
    assert locks == [[1, 2]]
    found = world.sql(
        "select (select count(*) from pg_class where relname = 'basket' and relpersistence = 't'),"
        " (select count(*) from pg_locks where locktype = 'advisory')"
    )
    assert found == [(left, 1)]


@pytest.mark.parametrize("rollback", [False, True])
def test_what_a_second_session_commits_is_stored_with_the_response(world, rollback):
    def pay():
        world.db.session.scalar(sa.select(sa.func.count(world.Payment.id)))
        with world.app.app_context():
            pay_once(world)
        if rollback:
            world.db.session.rollback()
        return {}, 201

    protect(world, pay)
    assert world.post().status_code == 201
    assert world.count() == 1


def add(world, amount=1, note=None):
    world.db.session.add(world.Payment(amount=amount, note=note))
    world.db.session.commit()


def test_a_function_that_names_its_setting_at_run_time_does_no_harm(world, view):
    world.sql(
        "create function choose(kind text) returns void language sql as"
        " $$ select set_config('app.' || kind, 'x', true) $$"
    )

    def pay():
        world.db.session.execute(sa.text("select choose('tenant')"))
        add(world)
        add(world)
        return {}, 201

    view(pay)
    assert world.post().status_code == 201
    assert world.count() == 2


def test_a_local_time_out_for_idleness_ends_with_the_views_commit(world, view):
    def pay():
        world.db.session.execute(sa.text("set local idle_in_transaction_session_timeout = '150ms'"))
        add(world)
        time.sleep(0.4)  # what the view does elsewhere
        add(world)
        return {}, 201

    view(pay)
    assert world.post().status_code == 201
    assert world.count() == 2


def test_a_constraint_that_became_deferrable_later_is_noticed_after_its_first_violation(world, view):
    def pay():
        try:
            add(world, amount=7)
        except sa.exc.IntegrityError:
            world.db.session.rollback()
            return {}, 409
        return {}, 201

    view(pay)
    world.app.config["PROPAGATE_EXCEPTIONS"] = False
    assert world.post(key="before").status_code == 201
    world.sql("alter table payment add constraint one unique (amount) deferrable initially deferred")
    assert world.post(key="first").status_code == 500
    assert world.post(key="first").status_code == 409
    assert world.count() == 1


def test_a_function_that_only_reads_after_the_commit_is_no_lost_work(world, view, caplog):
    def pay():
        add(world)
        world.db.session.execute(sa.text("select pg_table_is_visible('payment'::regclass)"))
        return {}, 409

    view(pay)
    assert world.post().status_code == 409
    assert world.count() == 1
    assert "did not commit" not in caplog.text
