"""``step(..., atomic=True)``: a step whose writes commit with it."""

from contextlib import closing, contextmanager, suppress

import psycopg2
import pytest

from flask_idempotency import NotAtomic, Retryable, current_operation, idempotent
from flask_idempotency.core.errors import StepError
from tests.databases import plain_dsn
from tests.web.leased.records import steps


@contextmanager
def renewal(world):
    """A connection with a renewal of the lease that is not committed yet."""
    database = plain_dsn(world.app.config["SQLALCHEMY_DATABASE_URI"])
    with closing(psycopg2.connect(database)) as connection:
        connection.cursor().execute(
            "update idempotency_record set lease_expires_at = lease_expires_at + interval '1 s'"
        )
        yield connection


def commit_once_waited_for(connection, world):
    world.wait_until_blocked()
    connection.commit()


class TestInATransaction:
    """``step(..., atomic=True)``."""

    def test_its_writes_commit_with_it(self, world, add_json):
        def pay():
            world.db.session.add(world.Payment(amount=5))
            world.db.session.commit()
            assert world.count() == 0, "it is committed with the step, not before"
            assert current_operation.connection.in_transaction()
            return {"paid": 5}

        def view():
            result = current_operation.step("pay", pay, atomic=True)
            assert (world.count(), steps(world)) == (1, [("pay", 1)])
            if current_operation.attempt == 1:
                raise Retryable
            return result

        add_json(view)
        assert world.post().status_code == 503
        assert world.post().json == {"paid": 5}
        assert world.count() == 1

    def test_if_it_fails_nothing_of_it_is_there(self, world, add_json):
        def pay():
            world.db.session.add(world.Payment(amount=5))
            world.db.session.commit()
            raise LookupError

        def view():
            with pytest.raises(LookupError):
                current_operation.step("pay", pay, atomic=True)
            return {}

        add_json(view)
        assert world.post().status_code == 201
        assert (world.count(), steps(world)) == (0, [])

    def test_a_result_that_is_not_json_undoes_it(self, world, add_json):
        def pay():
            world.db.session.add(world.Payment(amount=5))
            world.db.session.commit()
            return object()

        def view():
            with pytest.raises(StepError):
                current_operation.step("pay", pay, atomic=True)
            return {}

        add_json(view)
        assert world.post().status_code == 201
        assert (world.count(), steps(world)) == (0, [])

    @pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
    def test_a_renewal_that_is_in_its_way_is_waited_for(self, make_world, background, level):
        world = make_world(SQLALCHEMY_ENGINE_OPTIONS={"isolation_level": level})

        @world.app.post("/payments")
        @idempotent(atomic=False)
        def pay():
            with renewal(world) as connection:
                background(commit_once_waited_for, connection, world)
                return {"paid": current_operation.step("pay", lambda: 5, atomic=True)}, 201

        assert world.post().json == {"paid": 5}

    def test_a_row_that_others_hold_is_waited_for_a_moment_only(self, world, add_json):
        def view():
            with renewal(world):
                current_operation.step("pay", lambda: pytest.fail("it ran"), atomic=True)

        add_json(view)
        assert world.post().status_code == 503

    def test_it_may_not_leave_the_transaction(self, world, add_json):
        def pay():
            world.db.session.execute(world.db.text("COMMIT"))

        def view():
            with pytest.raises(NotAtomic):
                current_operation.step("pay", pay, atomic=True)
            return {}

        add_json(view)
        assert world.post().status_code == 201
        assert steps(world) == []

    @pytest.mark.parametrize("flushed", [True, False])
    def test_work_that_is_not_committed_before_it_is_refused(self, world, add_json, flushed):
        def view():
            world.db.session.add(world.Payment(amount=5))
            if flushed:
                world.db.session.flush()
            with pytest.raises(NotAtomic, match="commit"):
                current_operation.step("pay", dict, atomic=True)
            world.db.session.commit()
            return current_operation.step("pay", dict, atomic=True)

        add_json(view)
        assert world.post().status_code == 201
        assert (world.count(), steps(world)) == (1, [("pay", 1)])

    def test_an_object_that_was_set_to_what_it_was_is_not_in_its_way(self, world, add_json):
        def view():
            payment = world.Payment(amount=5)
            world.db.session.add(payment)
            world.db.session.commit()
            payment.amount = payment.amount
            return current_operation.step("pay", dict, atomic=True)

        add_json(view)
        assert world.post().status_code == 201

    def test_what_it_has_not_committed_is_committed_with_it(self, world, add_json):
        def pay():
            world.db.session.add(world.Payment(amount=5))
            return {"paid": 5}

        add_json(lambda: current_operation.step("pay", pay, atomic=True))
        assert world.post().status_code == 201
        assert (world.count(), steps(world)) == (1, [("pay", 1)])

    def test_what_it_has_rolled_back_is_not(self, world, add_json):
        def pay():
            world.db.session.add(world.Payment(amount=5))
            world.db.session.rollback()

        add_json(lambda: current_operation.step("pay", pay, atomic=True))
        assert world.post().status_code == 201
        assert (world.count(), steps(world)) == (0, [("pay", 1)])


class TestNesting:
    """A step inside a step, which would wait for the record that the outer one holds."""

    @pytest.mark.parametrize("outer", [False, True])
    @pytest.mark.parametrize("inner", [False, True])
    def test_a_step_inside_a_step_is_refused(self, world, add_json, outer, inner):
        def nest():
            with pytest.raises(StepError, match="step 'inner' was called inside step 'outer'"):
                current_operation.step("inner", dict, atomic=inner)
            return 1

        def view():
            current_operation.step("outer", nest, atomic=outer)
            return current_operation.step("inner", dict, atomic=inner)

        add_json(view)
        assert world.post().status_code == 201
        assert [name for name, _ in steps(world)] == ["outer", "inner"]

    def test_extend_inside_a_step(self, world, add_json):
        def view():
            current_operation.step("plain", current_operation.extend, 30)

        add_json(view)
        assert world.post().status_code == 201

    def test_another_operation_inside_a_step_has_steps_of_its_own(self, app, world, add_json):
        @app.post("/inner")
        @idempotent(atomic=False)
        def inner():
            return {"inner": current_operation.step("inner", lambda: 1)}

        def call():
            return (
                app.test_client()
                .post("/inner", headers={"Idempotency-Key": "inner", "X-User": "alice"})
                .json
            )

        add_json(lambda: current_operation.step("outer", call))
        assert world.post().json == {"inner": 1}


def test_what_a_failed_step_changed_is_not_remembered_by_the_next_one(world):
    def spend(fails):
        account.amount -= 10
        world.db.session.flush()
        if fails:
            raise LookupError

    @world.app.post("/payments")
    @idempotent(atomic=False)
    def view():
        with suppress(LookupError):
            current_operation.step("first", spend, True, atomic=True)
        current_operation.step("second", spend, False, atomic=True)
        return {}

    with world.app.app_context():
        world.db.session.add(world.Payment(id=1, amount=100))
        world.db.session.commit()

    @world.app.before_request
    def load():
        nonlocal account
        account = world.db.session.get(world.Payment, 1)

    account = None
    assert world.post().status_code == 200
    assert world.sql("select amount from payment") == [(90,)]
