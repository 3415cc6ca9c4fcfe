"""Steps: each runs once, whatever happens between them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress

import psycopg2
import pytest
import sqlalchemy as sa

import servers
from flask_idempotency import NotAtomic, Retryable, StoreUnavailable, current_operation, idempotent
from flask_idempotency.core.errors import StepError
from tests.conftest import PATIENCE_SECONDS
from tests.databases import plain_dsn
from tests.drivers import EACH
from tests.web.leased.records import end_lease, forge, results, steps

SEALED = {"IDEMPOTENCY_ENCRYPTION_KEYS": [b"k" * 32]}
SMALL_POOL = {"SQLALCHEMY_ENGINE_OPTIONS": {"pool_size": 1, "max_overflow": 0, "pool_timeout": 2}}


@pytest.fixture
def provider():
    """Charges, and notes the amounts; is there for the test, not behind a network."""

    def charge(amount, *, key=None, result=None):
        charge.amounts.append(amount)
        return {"id": len(charge.amounts), "key": key} if result is None else result

    charge.amounts = []
    return charge


def step(name, *args, **kwargs):
    return current_operation.step(name, *args, **kwargs)


def retry_once():
    if current_operation.attempt == 1:
        raise Retryable


@pytest.mark.parametrize("config", [{}, SMALL_POOL, SEALED], ids=["", "one connection", "sealed"])
def test_a_finished_step_is_not_repeated(world, add, provider):
    """What it returned is the decoded JSON the first time, too."""
    returned = []

    def view():
        assert world.db.session.scalars(world.db.select(world.Payment)).all() == []
        first = step("charge", provider, 5, result=((1, 2), {3: None}))
        returned.append(first)
        retry_once()
        return [first, step("mail", provider, 0, key="k"), step("pay", dict, atomic=True)]

    add(view)
    assert world.post().status_code == 503
    decoded = [[1, 2], {"3": None}]
    assert [world.post().json for _ in range(2)] == [[decoded, {"id": 2, "key": "k"}, {}]] * 2
    assert (returned, provider.amounts) == ([decoded] * 2, [5, 0])
    assert steps(world) == [("charge", 1), ("mail", 2), ("pay", 2)]


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_the_lease_is_whole_before_a_step_calls_and_after_it(world, add):
    left = "select extract(epoch from lease_expires_at - clock_timestamp()) from idempotency_record"
    lefts = []

    def look():
        lefts.append(world.sql(left)[0][0])
        end_lease(world)

    def view():
        end_lease(world)
        step("charge", look)
        look()
        return {}

    add(view, lease=60)
    assert world.post().status_code == 201
    assert [50 < seconds <= 60 for seconds in lefts] == [True, True], lefts


@pytest.mark.parametrize("result", [object(), float("nan"), {1, 2}, b"bytes", "a" * 2**20], ids=type)
def test_what_ran_is_recorded_as_run_whatever_came_of_it(world, add, provider, result):
    errors = []

    def view():
        try:
            step("charge", provider, 5, result=result)
        except StepError as error:
            errors.append(str(error))
            raise Retryable from error
        return {}

    add(view)
    for _ in range(3):
        assert world.post().status_code == 503
        world.sql("update idempotency_record set expires_at = created_at")
    assert provider.amounts == [5]
    assert "step 'charge' was done, but its result" in errors[0]
    assert "an operator must decide about this operation" in errors[1] == errors[2]
    assert (steps(world), results(world)) == ([("charge", 1)], [None])


def test_where_there_is_no_room_for_a_result_the_step_is_not_called(world, add, provider):
    def view():
        for number in range(4):
            step(f"charge {number}", provider, number, result="a" * (2**19 - 2))

    add(view)
    assert world.post().status_code == 500
    assert provider.amounts == [0, 1]
    assert len(steps(world)) == 2


@pytest.mark.parametrize("store", ["hybrid", "sql", "redis"], indirect=True)
@pytest.mark.parametrize("same", [True, False])
def test_a_step_runs_in_one_thread_and_different_ones_run_at_once(world, add, same):
    """On each store, as each has a lock of its own. The barrier opens when each has begun or failed."""
    calls, start, everybody = [], threading.Barrier(3), threading.Barrier(3)

    def charge(number):
        calls.append(number)
        everybody.wait(PATIENCE_SECONDS)
        return number

    def work(operation, number):
        with world.app.app_context():
            start.wait(PATIENCE_SECONDS)
            try:
                return operation.step("same" if same else f"step {number}", charge, number)
            except StepError as error:
                everybody.wait(PATIENCE_SECONDS)
                return str(error)

    def view():
        operation = current_operation._get_current_object()
        with ThreadPoolExecutor(3) as pool:
            return [*pool.map(lambda number: work(operation, number), range(3))]

    add(view)
    found = world.post().json
    refused = [each for each in found if "is running in another thread" in str(each)]
    assert (len(calls), len(refused)) == ((1, 2) if same else (3, 0))
    assert sorted(each for each in found if each not in refused) == sorted(calls)


def test_a_call_that_cannot_be_a_step_is_refused_before_it_is_made(world, add, provider):
    async def charge_later():
        raise AssertionError

    def view():
        step("charge", provider, 1)
        with pytest.raises(StepError, match="two steps"):
            step("charge", provider, 2)
        for name in "", "x" * 256, "a\0b", "a\ud800b", None:
            with pytest.raises(StepError, match="1 to 255 characters"):
                step(name, provider, 3)
        with pytest.raises(StepError, match="async def"):
            step("later", charge_later)
        return {}

    add(view)
    assert world.post().status_code == 201
    assert provider.amounts == [1]


def test_what_a_step_leaves_uncommitted_or_failed_is_the_views_and_does_not_cost_its_record(
    world, add, provider
):
    def charge(amount):
        provider(amount)
        world.db.session.add(world.Payment(amount=amount))
        world.db.session.flush()
        if amount == 4:
            with pytest.raises(sa.exc.ProgrammingError):
                world.db.session.execute(sa.text("select * from nowhere"))

    def view():
        for name, amount, end in ("two", 2, "flush"), ("three", 3, "commit"), ("four", 4, "rollback"):
            step(name, charge, amount)
            current_operation.extend(100)
            getattr(world.db.session, end)()
        retry_once()
        return {}

    add(view)
    assert [world.post().status_code for _ in range(2)] == [503, 201]
    assert (provider.amounts, world.count()) == ([2, 3, 4], 2)


FORGED = ["[" * 200_000 + "]" * 200_000, "1" * 5000, "sealed:\xff", "{"]
PLAIN = "SealBroken: The stored step charge is not encrypted"
UNREADABLE = [({}, each, "RecordBroken: The stored record") for each in FORGED]


@pytest.mark.parametrize(("config", "forged", "said"), [*UNREADABLE, (SEALED, '"forged"', PLAIN)])
def test_a_result_that_somebody_else_wrote_leaves_the_operation_open(
    world, add, provider, caplog, config, forged, said
):
    """Where there are keys, a result is encrypted, and one in plain is not used."""

    def view():
        result = step("charge", provider, 5, result="canary")
        retry_once()
        return step("mail", provider, result)

    runs = add(view)
    world.post()
    assert ("canary" in results(world)[0]) == (not config)
    forge(world, forged)
    assert world.post().status_code == 500
    assert said in caplog.text
    assert [record.state for record in world.records()] == ["in_progress"]
    assert provider.amounts == [5]
    assert len(runs) == 1 or not config


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
@pytest.mark.parametrize("atomic", [True, False])
def test_a_step_that_may_be_recorded_is_looked_up_before_it_is_done_again(
    make_world, postgres, provider, atomic
):
    """The reply to its record is lost; the view swallows that, and calls it once more."""
    with servers.FaultProxy(postgres.database("lost_reply")) as proxy:
        world = make_world(SQLALCHEMY_DATABASE_URI=proxy.url)

        def charge():
            proxy.refuse()
            proxy.lose_answer(b"COMMIT" if atomic else b"steps")
            return provider(1)

        @world.app.post("/payments")
        @idempotent(atomic=False)
        def view():
            with pytest.raises(StoreUnavailable):
                step("charge", charge, atomic=atomic)
            proxy.accept()
            return step("charge", charge, atomic=atomic)

        assert world.post().status_code == 200
        assert (provider.amounts, proxy.lost) == ([1], 1)


# ``step(..., atomic=True)``: its writes commit with it.


def connected(world):
    return closing(psycopg2.connect(plain_dsn(world.app.config["SQLALCHEMY_DATABASE_URI"])))


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
            step("pay", save, atomic=True)
        assert (world.count(), steps(world)) == (rows, [] if error else [("pay", 1)])
        return {}

    add(view)
    assert world.post().status_code == 201
    assert (world.count(), steps(world)) == (rows, [] if error else [("pay", 1)])


@pytest.mark.parametrize("flushed", [True, False])
def test_work_that_is_not_committed_before_it_is_refused(world, add, flushed):
    def view():
        pay(world)
        if flushed:
            world.db.session.flush()
        with pytest.raises(NotAtomic, match="commit"):
            step("pay", dict, atomic=True)
        world.db.session.commit()
        return step("pay", dict, atomic=True)

    add(view)
    assert world.post().status_code == 201
    assert (world.count(), steps(world)) == (1, [("pay", 1)])


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_steps_do_not_nest(world, add, outer, inner):
    """The inner one would wait for the record that the outer one holds."""

    def nest():
        with pytest.raises(StepError, match="step 'inner' was called inside step 'outer'"):
            step("inner", dict, atomic=inner)
        with pytest.raises(StepError, match="inside atomic step 'outer'") if outer else nullcontext():
            current_operation.extend(30)
        return 1

    def view():
        step("outer", nest, atomic=outer)
        return step("inner", dict, atomic=inner)

    add(view)
    assert world.post().status_code == 201
    assert [name for name, _ in steps(world)] == ["outer", "inner"]


CONFLICT = """create function conflict() returns trigger language plpgsql as
  $$ begin if new.steps is not null and {} then raise exception using errcode = '40001'; end if;
  return new; end $$;
create trigger conflict before update on idempotency_record for each row execute function conflict()"""


@pytest.mark.parametrize(
    ("when", "statuses"),
    [("current_setting('transaction_isolation') = 'serializable'", [201, 201]), ("true", [503, 409])],
    ids=["read committed", "any level"],
)
def test_no_conflict_lets_a_step_run_again(world, add, provider, when, statuses):
    """No change of a lease can conflict; if one did, the step has run all the same."""
    database = world.sql("select current_database()")[0][0]
    world.sql(f"alter database {database} set default_transaction_isolation = serializable")
    world.sql(CONFLICT.format(when))
    with world.app.app_context():
        world.db.engine.dispose()
    add(lambda: step("charge", provider, 5))
    assert [world.post().status_code for _ in range(2)] == statuses
    assert provider.amounts == [5]


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
        step("charge", lambda: charges.append(1))
        step("save", save, atomic=True)
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
            charged = step("charge", lambda: "charged")
            pay(world)
            current_operation.extend(60)
            return [charged, world.db.session.scalar(sa.text("select current_setting('app.tenant')"))]

    runs = add(view)
    assert [world.post().json for _ in range(2)] == [["charged", "a"]] * 2
    assert (world.count(), runs, steps(world)) == (1, [1], [("charge", 1)])
