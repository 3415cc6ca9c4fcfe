"""The database gives a transaction up, or cannot be reached: 503, and the same key works later."""

import logging
import threading

import pytest
from prometheus_client import CollectorRegistry

import servers
from flask_idempotency import (
    Retryable,
    current_operation,
    idempotent,
    operation_rejected,
    operation_unprotected,
    store_failed,
)
from flask_idempotency.integrations.prometheus import export_metrics
from tests.log import ours

PATIENCE_SECONDS = 10


@pytest.fixture(scope="module")
def own_postgres():
    """A server that a test may stop; it runs again at the beginning of the next."""
    with servers.Postgres(fsync=False) as server:
        yield server


@pytest.fixture
def stoppable(own_postgres, make_world, store):
    def make(**config):
        own_postgres.start()
        uri = own_postgres.database(f"shop_{store}")
        return make_world(SQLALCHEMY_DATABASE_URI=uri, **config)

    return make


def test_a_stopped_database_executes_nothing(own_postgres, stoppable, add_view, assert_problem):
    world = stoppable()
    runs = add_view(world)
    assert world.post(key="before").status_code == 201
    own_postgres.stop()
    for _ in range(2):
        response = world.post(key="canary", json={"amount": "canary"})
        assert_problem(response, 503, "store-unavailable", retry=True)
    assert runs == [1]
    own_postgres.start()
    assert world.post(key="canary", json={"amount": "canary"}).status_code == 201
    assert runs == [1, 1]
    assert world.post(key="before").headers["Idempotent-Replayed"] == "true"


def test_a_stopped_database_is_counted(own_postgres, stoppable, add_view):
    world, registry = stoppable(), CollectorRegistry()
    export_metrics(world.app, registry=registry)
    add_view(world)
    own_postgres.stop()
    assert world.post().status_code == 503
    failures = [
        registry.get_sample_value("idempotency_store_failures_total", {"part": part})
        for part in ("records", "lock")
    ]
    assert failures == [1, 0]


def ask(world):
    world.db.session.scalar(world.db.text("select 1"))


def lost_before(world, stop):
    stop()
    return idempotent(lambda: "")


def lost_at_a_statement_of_the_view(world, stop):
    return idempotent(lambda: [ask(world), stop(), ask(world)])


def lost_at_the_commit(world, stop):
    return idempotent(lambda: (stop(), "")[1])


def lost_at_a_commit_above_the_view(world, stop):
    def pay():
        world.db.session.add(world.Payment(amount=5))
        return ""

    protected = idempotent(pay)

    def commit():
        response = protected()
        world.db.session.commit()
        stop()
        return response

    return commit


def lost_before_a_lease(world, stop):
    stop()
    return idempotent(atomic=False)(lambda: "")


def lost_in_a_step(world, stop):
    return idempotent(atomic=False)(lambda: current_operation.step("charge", stop))


def lost_in_an_atomic_step(world, stop):
    def charge():
        ask(world)
        stop()
        ask(world)

    return idempotent(atomic=False)(lambda: current_operation.step("charge", charge, atomic=True))


def lost_at_the_end_of_a_lease(world, stop):
    return idempotent(atomic=False)(lambda: (stop(), "")[1])


def lost_at_a_release(world, stop):
    def pay():
        stop()
        raise Retryable

    return idempotent(atomic=False)(pay)


def lost_in_run(world, stop):
    def pay():
        return world.idempotency.run("k", stop, scope="a", name="job")

    return pay


@pytest.mark.parametrize(
    "lost",
    [
        lost_before,
        lost_at_a_statement_of_the_view,
        lost_at_the_commit,
        lost_at_a_commit_above_the_view,
        lost_before_a_lease,
        lost_in_a_step,
        lost_in_an_atomic_step,
        lost_at_the_end_of_a_lease,
        lost_at_a_release,
        lost_in_run,
    ],
)
def test_a_lost_database_is_told_once_whenever_it_is_lost(
    own_postgres, stoppable, assert_problem, caplog, lost
):
    world, failures, outcomes = stoppable(), [], []
    world.app.add_url_rule("/payments", "pay", lost(world, own_postgres.stop), methods=["POST"])
    with (
        store_failed.connected_to(lambda _app, event: failures.append(event)),
        operation_rejected.connected_to(lambda _app, event: outcomes.append(event)),
    ):
        assert_problem(world.post(), 503, "store-unavailable", retry=True)
    (line,) = ours(caplog, logging.ERROR)
    (failure,), (outcome,) = failures, outcomes
    assert "the store is unavailable" in line.getMessage()
    assert failure.error is outcome.error
    name = "job" if lost is lost_in_run else "pay"
    assert failure.operation == outcome.operation == line.operation == name
    assert failure.id == outcome.id == line.id
    assert line.error == "StoreUnavailable"


def test_a_stopped_database_may_be_allowed_to_leave_views_unprotected(own_postgres, stoppable, caplog):
    world = stoppable(IDEMPOTENCY_ON_STORE_ERROR="allow")
    protected = []

    @world.app.post("/mails")
    @idempotent
    def send_mail():
        protected.append(bool(current_operation))
        return {}, 202

    own_postgres.stop()
    failures, outcomes = [], []

    def note(app, event):
        failures.append((app, event.operation, type(event.error).__name__))

    def note_outcome(app, event):
        outcomes.append((event.outcome, event.problem))

    with (
        store_failed.connected_to(note),
        operation_unprotected.connected_to(note_outcome),
        caplog.at_level(logging.ERROR, "flask_idempotency"),
    ):
        answers = [world.post("/mails", key="canary") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 202]
    assert protected == [False, False]
    assert failures == [(world.app, "send_mail", "StoreUnavailable")] * 2
    assert outcomes == [("unprotected", "store-unavailable")] * 2
    assert "operation send_mail unprotected" in caplog.text
    assert "canary" not in caplog.text


def test_a_view_left_unprotected_may_call_another_idempotent_function(own_postgres, stoppable):
    world = stoppable(IDEMPOTENCY_ON_STORE_ERROR="allow")
    inner = idempotent(lambda: ({}, 202))

    @world.app.post("/mails")
    @idempotent
    def send_mail():
        return inner()

    own_postgres.stop()
    assert world.post("/mails").status_code == 202


def test_a_connection_lost_before_the_commit_leaves_nothing(world, add_view, assert_problem):
    cuts = [True]

    def cut():
        if cuts:
            cuts.pop()
            backend = current_operation.connection.exec_driver_sql("select pg_backend_pid()")
            world.sql("select pg_terminate_backend(:pid, 5000)", pid=backend.scalar())

    runs = add_view(world, during=cut)
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    assert world.count() == 0
    assert world.post().status_code == 201
    assert runs == [1, 2]
    assert world.count() == 1


def test_a_connection_lost_in_the_view_is_told_as_such(app, world, assert_problem):
    @app.post("/payments")
    @idempotent
    def pay():
        pid = world.db.session.scalar(world.db.text("select pg_backend_pid()"))
        world.sql("select pg_terminate_backend(:pid, 5000)", pid=pid)
        world.db.session.scalar(world.db.text("select 1"))
        return {}

    assert_problem(world.post(), 503, "store-unavailable", retry=True)


def update(world, amount, row):
    world.db.session.execute(
        world.db.update(world.Payment).where(world.Payment.id == row).values(amount=amount)
    )


def test_a_serialization_failure_at_the_commit_is_a_conflict(make_world, assert_problem):
    """Write skew: both transactions count the rows, both add one; the second to commit loses."""
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS={"isolation_level": "SERIALIZABLE"})
    runs = []

    @world.app.post("/payments")
    @idempotent
    def pay():
        runs.append(current_operation.attempt)
        count = world.db.session.query(world.Payment).count()
        world.db.session.add(world.Payment(amount=count))
        world.db.session.commit()
        if len(runs) == 1:
            world.sql("insert into payment (amount) select count(*) from payment")
        return {}, 201

    assert_problem(world.post(), 503, "transaction-conflict", retry=True)
    assert world.post().status_code == 201
    assert world.sql("select amount from payment order by id") == [(0,), (1,)]


def test_a_deadlock_is_a_conflict(app, world, background, assert_problem):
    world.sql("insert into payment (id, amount) values (1, 0), (2, 0)")
    other_has_two, view_has_one = threading.Event(), threading.Event()

    @app.post("/payments")
    @idempotent
    def pay():
        world.db.session.execute(world.db.text("set local deadlock_timeout = '50ms'"))
        update(world, 5, 1)
        view_has_one.set()
        if current_operation.attempt == 1:
            assert other_has_two.wait(PATIENCE_SECONDS)
        update(world, 5, 2)
        world.db.session.commit()
        return {}, 201

    def in_the_other_order():
        with app.app_context(), world.db.engine.begin() as connection:
            connection.exec_driver_sql("set local deadlock_timeout = '1min'")  # never the victim
            connection.exec_driver_sql("update payment set amount = 9 where id = 2")
            assert view_has_one.wait(PATIENCE_SECONDS)
            other_has_two.set()
            connection.exec_driver_sql("update payment set amount = 9 where id = 1")

    other = background(in_the_other_order)
    assert_problem(world.post(), 503, "transaction-conflict", retry=True)
    other.result()
    assert world.post().status_code == 201
    assert world.sql("select amount from payment order by id") == [(5,), (5,)]


def test_a_conflict_that_an_error_handler_handles_is_still_rolled_back(app, world, assert_problem):
    """Whatever the application makes of it, the transaction is lost and may not look kept."""

    @app.errorhandler(Exception)
    def hide(error):
        return {"hidden": True}, 200

    @app.post("/payments")
    @idempotent
    def pay():
        world.db.session.execute(
            world.db.text("do $$ begin raise sqlstate '40001' using message = 'lost'; end $$")
        )
        return {}, 201

    assert_problem(world.post(), 503, "transaction-conflict", retry=True)
    assert [record.state for record in world.records()] == ["in_progress"]
