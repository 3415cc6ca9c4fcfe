"""``step(..., atomic=True)``: a step whose writes commit with it."""

from contextlib import closing, contextmanager, nullcontext, suppress

import psycopg2
import pytest
import sqlalchemy as sa

from flask_idempotency import NotAtomic, current_operation, idempotent
from flask_idempotency.core.errors import StepError
from tests.databases import plain_dsn
from tests.drivers import EACH
from tests.web.leased.records import steps


def connected(world):
    return closing(psycopg2.connect(plain_dsn(world.app.config["SQLALCHEMY_DATABASE_URI"])))


@contextmanager
def renewal(world):
    """A connection with a renewal of the lease that is not committed yet."""
    with connected(world) as connection:
        connection.cursor().execute(
            "update idempotency_record set lease_expires_at = lease_expires_at + interval '1 s'"
        )
        yield connection


def atomic_step(name, *args):
    return current_operation.step(name, *args, atomic=True)


def pay(world):
    world.db.session.add(world.Payment(amount=5))


def fails_in_sql(world):
    """PostgreSQL makes a rollback of the commit that follows, and says nothing."""
    with suppress(sa.exc.DBAPIError):
        world.db.session.execute(sa.text("select 1/0"))


def commits(world):
    world.db.session.commit()


ENDS = {
    "left to it": ([bool], None, 1),
    "a commit": ([commits], None, 1),
    "rolled back": ([lambda world: world.db.session.rollback()], None, 0),
    "an error": ([commits, lambda _: {}["x"]], LookupError, 0),
    "no JSON": ([lambda _: object()], StepError, 0),
    "a COMMIT": ([commits, lambda world: world.db.session.execute(sa.text("COMMIT"))], NotAtomic, 0),
    "a failed statement": ([fails_in_sql], NotAtomic, 0),
    "a failed statement, and a commit": ([fails_in_sql, commits], NotAtomic, 0),
}


@EACH
@pytest.mark.parametrize("end", ENDS)
def test_what_it_wrote_commits_with_it_or_not_at_all(world, add, end):
    does, error, rows = ENDS[end]

    def save():
        pay(world)
        world.db.session.flush()
        result = [each(world) for each in does][-1]
        assert current_operation.connection.in_transaction()
        assert world.count() == 0, "it is committed with the step, not before"
        return result

    def view():
        with pytest.raises(error) if error else nullcontext():
            atomic_step("pay", save)
        assert (world.count(), steps(world)) == (rows, [] if error else [("pay", 1)])
        return {}

    add(view)
    assert world.post().status_code == 201
    assert (world.count(), steps(world)) == (rows, [] if error else [("pay", 1)])


@pytest.mark.parametrize("level", ["READ COMMITTED", "SERIALIZABLE"])
def test_a_renewal_that_is_in_its_way_is_waited_for(make_world, background, level):
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS={"isolation_level": level})

    @world.app.post("/payments")
    @idempotent(atomic=False)
    def view():
        with renewal(world) as connection:
            if current_operation.key == "waits":
                background(lambda: (world.wait_until_blocked(), connection.commit()))
            return {"paid": atomic_step("pay", lambda: 5)}, 201

    assert world.post(key="waits").json == {"paid": 5}
    assert world.post(key="in-vain").status_code == 503


@pytest.mark.parametrize("flushed", [True, False])
def test_work_that_is_not_committed_before_it_is_refused(world, add, flushed):
    def view():
        pay(world)
        if flushed:
            world.db.session.flush()
        with pytest.raises(NotAtomic, match="commit"):
            atomic_step("pay", dict)
        world.db.session.commit()
        return atomic_step("pay", dict)

    add(view)
    assert world.post().status_code == 201
    assert (world.count(), steps(world)) == (1, [("pay", 1)])


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_steps_do_not_nest(world, add, outer, inner):
    """The inner one would wait for the record that the outer one holds."""

    def nest():
        with pytest.raises(StepError, match="step 'inner' was called inside step 'outer'"):
            current_operation.step("inner", dict, atomic=inner)
        if not outer:
            current_operation.extend(30)
        return 1

    def view():
        current_operation.step("outer", nest, atomic=outer)
        return current_operation.step("inner", dict, atomic=inner)

    add(view)
    assert world.post().status_code == 201
    assert [name for name, _ in steps(world)] == ["outer", "inner"]


PASSING = {
    "a lock's time-out": ["set local lock_timeout = '50ms'", "lock table idempotency_record"],
    "a full disk": ["do $$ begin raise exception 'full' using errcode = '53100'; end $$"],
}


@EACH
@pytest.mark.parametrize("statements", PASSING.values(), ids=PASSING)
def test_an_error_that_may_pass_leaves_the_operation_interrupted(
    world, add, assert_problem, statements
):
    """It was rolled back, so nothing speaks against another attempt: the charge is recorded."""
    charges = []

    def save():
        pay(world)
        world.db.session.flush()
        if current_operation.attempt == 1:
            with connected(world) as other:
                other.cursor().execute("lock table idempotency_record in row share mode")
                for each in statements:
                    world.db.session.execute(sa.text(each))
        world.db.session.commit()

    def view():
        current_operation.step("charge", lambda: charges.append(1))
        atomic_step("save", save)
        return {}

    add(view, on_interrupted="retry")
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    assert steps(world) == [("charge", 1)]
    assert world.post().status_code == 201
    assert (charges, world.count()) == ([1], 1)


def test_a_step_leaves_a_transaction_that_has_only_read_open(world, add):
    def view():
        with world.db.session.begin():
            world.db.session.execute(sa.text("set local app.tenant = 'a'"))
            charged = current_operation.step("charge", lambda: "charged")
            pay(world)
            current_operation.extend(60)
            return [charged, world.db.session.scalar(sa.text("select current_setting('app.tenant')"))]

    runs = add(view)
    assert [world.post().json for _ in range(2)] == [["charged", "a"]] * 2
    assert (world.count(), runs, steps(world)) == (1, [1], [("charge", 1)])
