"""The database gives a transaction up, or cannot be reached: 503, and the same key works later."""

import logging

import pytest
import sqlalchemy as sa

import servers
from flask_idempotency import Retryable, current_operation, idempotent
from tests.log import ours


@pytest.fixture
def proxy(postgres):
    """Its ``lose()`` loses the database, until it accepts again."""
    with servers.FaultProxy(postgres.database("lost")) as proxy:
        proxy.lose = lambda: (proxy.refuse(), proxy.cut())
        yield proxy


def asking(world, stop):
    def ask():
        return world.db.session.scalar(sa.text("select 1"))

    return lambda: [ask(), stop(), ask()]


def at_a_commit_above(world, stop):
    protected = idempotent(lambda: (world.db.session.add(world.Payment(amount=5)), "")[1])
    return lambda: (protected(), world.db.session.commit(), stop())[0]


def release():
    raise Retryable


leased = idempotent(atomic=False)
LOST = {
    "before": lambda world, stop: (stop(), idempotent(dict))[1],
    "at a statement of the view": lambda world, stop: idempotent(asking(world, stop)),
    "at the commit": lambda world, stop: idempotent(lambda: (stop(), "")[1]),
    "at a commit above the view": at_a_commit_above,
    "before a lease": lambda world, stop: (stop(), leased(dict))[1],
    "in a step": lambda world, stop: leased(lambda: current_operation.step("charge", stop)),
    "in an atomic step": lambda world, stop: leased(
        lambda: current_operation.step("charge", asking(world, stop), atomic=True)
    ),
    "at the end of a lease": lambda world, stop: leased(lambda: (stop(), "")[1]),
    "at a release": lambda world, stop: leased(lambda: (stop(), release())),
    "in run": lambda world, stop: lambda: world.idempotency.run("k", stop, scope="a", name="job"),
}


@pytest.mark.parametrize("lost", LOST)
def test_a_lost_database_is_told_once_whenever_it_is_lost(
    make_world, proxy, assert_problem, caplog, heard, lost
):
    world = make_world(SQLALCHEMY_DATABASE_URI=proxy.url)
    view = LOST[lost](world, proxy.lose)
    world.app.add_url_rule("/payments", "pay", view, methods=["POST"])
    assert_problem(world.post(), 503, "store-unavailable", retry=True)
    (line,) = ours(caplog, logging.ERROR)
    [failure] = [event for name, event in heard if name == "store_failed"]
    [outcome] = [event for name, event in heard if name == "operation_rejected"]
    assert "the store is unavailable" in line.getMessage()
    assert failure.error is outcome.error
    assert failure.id == outcome.id == line.id
    name = "job" if lost == "in run" else "pay"
    assert failure.operation == outcome.operation == line.operation == name
    assert line.error == "StoreUnavailable"
    if lost.startswith("before"):
        proxy.accept()
        assert [world.post().status_code for _ in range(2)] == [200, 200]


def test_a_lost_database_may_be_allowed_to_leave_views_unprotected(make_world, proxy, caplog, heard):
    world = make_world(SQLALCHEMY_DATABASE_URI=proxy.url, IDEMPOTENCY_ON_STORE_ERROR="allow")
    inner, protected = idempotent(lambda: ({}, 202)), []

    @world.app.post("/mails")
    @idempotent
    def send_mail():
        protected.append(bool(current_operation))
        return inner()

    proxy.lose()
    assert [world.post("/mails", key="canary").status_code for _ in range(2)] == [202, 202]
    assert protected == [False, False]
    found = {(name, event.operation, event.problem) for name, event in heard}
    assert ("operation_unprotected", "send_mail", "store-unavailable") in found
    assert "store_failed" in {name for name, _, _ in found}
    assert "operation send_mail unprotected" in caplog.text
    assert "canary" not in caplog.text


@pytest.mark.parametrize("asks", [False, True], ids=["at the commit", "in a query, caught"])
def test_a_serialization_failure_is_a_conflict(make_world, assert_problem, asks):
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
            if asks:
                with pytest.raises(sa.exc.DBAPIError):
                    world.db.session.scalars(sa.select(world.Payment)).all()
                world.db.session.rollback()
        return {}, 201

    assert_problem(world.post(), 503, "transaction-conflict", retry=True)
    assert world.post().status_code == 201
    assert world.sql("select amount from payment order by id") == [(0,), (1,)]
