"""Threads, tasks, contexts and requests of a view's own: none of them ends or takes along an operation.

Up to Flask 3.1 a request that a view sends to its own application by the test client shares its
application context, and so ``db.session``. From 3.2 on there is nothing to share, nor to refuse.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest
import sqlalchemy as sa
from flask import copy_current_request_context

from flask_idempotency import NotAtomic, current_operation, idempotent
from tests.flask_releases import BEFORE_3_2
from tests.integration.views import pay_once, protect

KINDS = pytest.mark.parametrize("atomic", [True, False])


def test_a_thread_of_the_view_does_not_end_its_operation_nor_commit_after_it(world):
    go_on, late = threading.Event(), []

    def work():
        assert go_on.wait(10)
        try:
            pay_once(world)
        finally:  # else a later context at the same address inherits its session, as without us
            world.db.session.remove()

    with ThreadPoolExecutor(1) as pool:

        def pay():
            pool.submit(copy_current_request_context(lambda: None)).result(10)
            if current_operation.attempt == 1:
                late.append(pool.submit(copy_context().run, work))
                return {}, 504
            pay_once(world)
            return {}, 201

        protect(world, pay)
        assert world.post().status_code == 504
        go_on.set()
        assert isinstance(late[0].exception(10), NotAtomic)
        assert world.count() == 0
        assert [world.post().status_code for _ in range(2)] == [201, 201]
    assert world.count() == 1


@KINDS
def test_a_run_goes_on_when_the_request_that_began_it_has_ended(world, atomic):
    begun, ended, results = threading.Event(), threading.Event(), []

    def pay():
        world.db.session.execute(sa.insert(world.Payment).values(amount=1))
        begun.set()
        assert ended.wait(10)
        world.db.session.commit()
        return "paid"

    def handle():
        return pay() if atomic else current_operation.step("pay", pay, atomic=True)

    def run():
        with world.app.app_context():
            return world.idempotency.run("k", handle, scope="s", name="pay", atomic=atomic)

    with ThreadPoolExecutor(1) as pool:

        @world.app.post("/events")
        def deliver():
            world.db.session.scalar(sa.text("select 1"))
            results.append(pool.submit(copy_context().run, run))
            assert begun.wait(10)
            return {}, 202

        assert world.client.post("/events").status_code == 202
        ended.set()
        assert results[0].result(10) == "paid"
    assert (run(), world.count()) == ("paid", 1)
    world.assert_clean()


# A view that sends a request to its own application, for an operation that is not atomic.


def hold(world):
    world.db.session.add(world.Payment(amount=1, note="held"))


def flush(world):
    hold(world)
    world.db.session.flush()


def read(world):
    assert world.db.session.scalar(sa.select(sa.func.count(world.Payment.id))) == 0


def leave(world):
    flush(world)
    return "", 201


def payer(world, note):
    def pay():
        world.db.session.add(world.Payment(amount=1, note=note))
        world.db.session.commit()
        return "", 201

    return pay


OUTER = {"leased": idempotent(atomic=False), "plain": lambda view: view, "atomic": idempotent}


@pytest.fixture
def rows(world):
    """What the payments say, as another connection sees them."""
    world.app.config["PROPAGATE_EXCEPTIONS"] = False
    return lambda: [note for (note,) in world.sql("select note from payment order by note")]


@pytest.mark.parametrize("before", [read, hold, flush])
@pytest.mark.parametrize(
    ("outer", "atomic"), [("leased", False), ("plain", False), ("atomic", False), ("atomic", True)]
)
def test_a_request_to_its_own_application_is_refused_unless_the_view_has_only_read(
    world, rows, outer, atomic, before, caplog
):
    """Where the view is atomic, it is refused with it."""
    is_refused = outer == "atomic" or (BEFORE_3_2 and before is not read)

    def send():
        before(world)
        assert world.post("/inner").status_code == (500 if is_refused else 201)
        if not is_refused:
            assert rows() == ["inner"]
        return payer(world, "outer")()

    inner = idempotent(atomic=atomic)(payer(world, "inner"))
    world.app.add_url_rule("/inner", "inner", inner, methods=["POST"])
    world.app.add_url_rule("/outer", "outer", OUTER[outer](send), methods=["POST"])
    assert world.post("/outer").status_code == (500 if outer == "atomic" else 201)
    held = [] if before is read else ["held"]
    assert rows() == ([] if outer == "atomic" else held + ["inner"] * (not is_refused) + ["outer"])
    assert ("NotAtomic" in caplog.text) is is_refused
    assert ("request to its own application" in caplog.text) is is_refused
    assert world.post("/inner").status_code == 201
    assert "inner" in rows()
    world.assert_clean()


@pytest.mark.parametrize("outer", ["leased", "plain"])
def test_what_the_view_of_such_a_request_leaves_is_not_the_outer_ones(world, rows, outer):
    def send():
        world.post("/inner")
        return payer(world, "outer")()

    inner = idempotent(atomic=False)(lambda: leave(world))
    world.app.add_url_rule("/inner", "inner", inner, methods=["POST"])
    world.app.add_url_rule("/outer", "outer", OUTER[outer](send), methods=["POST"])
    assert world.post("/outer").status_code == 201
    assert rows() == ["outer"]
    world.assert_clean()
