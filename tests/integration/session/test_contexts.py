"""Threads, tasks, contexts and requests of a view's own: none of them ends or takes along an operation.

Up to Flask 3.1 a request that a view sends to its own application by the test client shares its
application context, and so ``db.session``. From 3.2 on there is nothing to share, nor to refuse.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context

import pytest
import sqlalchemy as sa
from flask import copy_current_request_context, request

from flask_idempotency import NotAtomic, current_operation, idempotent
from tests.flask_releases import BEFORE_3_2
from tests.integration.views import pay_once, protect

KINDS = pytest.mark.parametrize("atomic", [True, False])


def test_a_thread_with_a_copy_of_the_request_context_does_not_end_the_operation(world):
    def pay():
        thread = threading.Thread(target=copy_current_request_context(lambda: None))
        thread.start()
        thread.join()
        pay_once(world)
        return {}, 201

    protect(world, pay)
    assert [world.post().status_code for _ in range(3)] == [201, 201, 201]
    assert world.count() == 1


def test_a_thread_that_outlives_its_view_cannot_commit(world):
    started, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def work():
        started.set()
        go_on.wait(10)
        try:
            pay_once(world)
        finally:
            done.set()

    async def pay():
        if current_operation.attempt == 1:
            task = asyncio.create_task(asyncio.to_thread(work))
            await asyncio.to_thread(started.wait, 10)
            task.cancel()
            return {}, 504
        pay_once(world)
        return {}, 201

    protect(world, pay)
    assert world.post().status_code == 504
    go_on.set()
    assert done.wait(10)
    assert world.count() == 0
    assert (world.post().status_code, world.count()) == (201, 1)


@pytest.mark.parametrize("push", ["app_context", "test_request_context"])
def test_a_session_of_a_context_that_the_view_pushes_is_the_views(world, view, push):
    """But not that of another request's context from Flask 3.2 on: that shares nothing."""
    alone = 0 if BEFORE_3_2 or push == "app_context" else 1

    def pay():
        with getattr(world.app, push)():
            pay_once(world)
        return {}, 201 if request.json["amount"] else 500

    view(pay)
    assert world.post(json={"amount": 0}).status_code == 500
    assert world.count() == alone
    assert [world.post(key="key-2").status_code for _ in range(2)] == [201, 201]
    assert world.count() == alone + 1


@KINDS
def test_a_run_goes_on_when_the_request_that_began_it_has_ended(world, atomic):
    begun, ended, results = threading.Event(), threading.Event(), []

    def pay():
        world.db.session.add(world.Payment(amount=1))
        world.db.session.flush()
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


def test_a_rollback_after_the_end_reaches_nobody(make_world):
    """A thread is stopped where it is about to send, until the connection is another's."""
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS={"pool_size": 1, "max_overflow": 0})
    sending, over, late, undone = threading.Event(), threading.Event(), set(), []

    def stop(*_what):
        if threading.get_ident() in late:
            sending.set()
            assert over.wait(10)

    def undo():
        late.add(threading.get_ident())
        world.db.session.rollback()

    with world.app.app_context():
        sa.event.listen(world.db.engine, "rollback_savepoint", stop)
    with ThreadPoolExecutor(1) as pool:

        def pay():
            pay_once(world)
            world.db.session.scalar(sa.text("select 1"))
            undone.append(pool.submit(copy_context().run, undo))
            assert sending.wait(10)
            return {}, 201

        protect(world, pay)
        with suppress(sa.exc.IllegalStateChangeError):  # of the thread's session, as without us
            world.post()
        with world.app.app_context(), world.db.engine.begin() as bystander:
            bystander.execute(sa.text("insert into payment (amount) values (7)"))
            over.set()
            undone[0].exception(10)
            bystander.execute(sa.text("select 1"))
    assert (7,) in world.sql("select amount from payment")


class TestInnerRequests:
    """A view that sends a request to its own application, for an operation that is not atomic."""

    OUTER = pytest.mark.parametrize(
        "outer", [idempotent(atomic=False), lambda view: view], ids=["leased", "plain"]
    )

    @pytest.fixture
    def rows(self, world):
        """The payments, as another connection sees them."""
        return lambda: [note for (note,) in world.sql("select note from payment order by note")]

    @pytest.fixture
    def add(self, world):
        """Adds a view whose errors are responses, as in production; its function commits a row."""
        world.app.config["PROPAGATE_EXCEPTIONS"] = False

        def add(name, protected, before=bool, status=201, write=True):
            def view():
                before()
                if write:
                    world.db.session.add(world.Payment(amount=1, note=name))
                    world.db.session.commit()
                return "", status

            world.app.add_url_rule(f"/{name}", name, protected(view), methods=["POST"])

        return add

    @OUTER
    @pytest.mark.parametrize("flush", [True, False], ids=["flushed", "unsaved"])
    def test_it_is_refused_where_the_outer_view_holds_changes_and_those_stay(
        self, world, add, rows, outer, flush, caplog
    ):
        def send():
            world.db.session.add(world.Payment(amount=1, note="held"))
            if flush:
                world.db.session.flush()
            assert world.post("/inner").status_code == (500 if BEFORE_3_2 else 201)

        add("inner", idempotent(atomic=False))
        add("outer", outer, send)
        assert world.post("/outer").status_code == 201
        assert rows() == (["held", "outer"] if BEFORE_3_2 else ["held", "inner", "outer"])
        assert ("request to its own application" in caplog.text) == BEFORE_3_2
        assert world.post("/inner").status_code == 201
        assert "inner" in rows()
        world.assert_clean()

    @OUTER
    @pytest.mark.parametrize("status", [201, 503])
    def test_beside_a_view_that_has_only_read_it_commits_by_itself(
        self, world, add, rows, outer, status
    ):
        count = sa.select(sa.func.count(world.Payment.id))

        def send():
            assert world.db.session.scalar(count) == 0
            assert world.post("/inner").status_code == 201
            assert (rows(), world.db.session.scalar(count)) == (["inner"], 1)

        add("inner", idempotent(atomic=False))
        add("outer", outer, send, status)
        assert world.post("/outer").status_code == status
        assert rows() == ["inner", "outer"]
        world.assert_clean()

    @OUTER
    @pytest.mark.parametrize("end", ["leaves", "raises", "reads"])
    def test_what_the_inner_view_leaves_is_not_the_outer_ones(self, world, add, rows, outer, end):
        def leave():
            if end != "reads":
                world.db.session.add(world.Payment(amount=1, note="left behind"))
                world.db.session.flush()
            if end == "raises":
                raise LookupError
            world.db.session.execute(sa.text("select pg_advisory_xact_lock(1)"))

        add("inner", idempotent(atomic=False), leave, write=False)
        add("outer", outer, lambda: replies.append(world.post("/inner").status_code))
        replies = []
        assert world.post("/outer").status_code == 201
        assert (replies, rows()) == ([500 if end == "raises" else 201], ["outer"])
        world.assert_clean()

    @KINDS
    @pytest.mark.parametrize("work", ["nothing", "reads", "commits"])
    def test_an_atomic_view_that_sends_one_is_refused_with_it(
        self, world, add, rows, work, atomic, caplog
    ):
        def send():
            if work == "reads":
                world.db.session.scalar(sa.select(sa.func.count(world.Payment.id)))
            elif work == "commits":
                pay_once(world)
            assert world.post("/inner").status_code == 500

        add("inner", idempotent(atomic=atomic))
        add("outer", idempotent, send)
        assert (world.post("/outer").status_code, rows()) == (500, [])
        error = caplog.records[-1].exc_info[1]
        assert isinstance(error, NotAtomic)
        assert "request to its own application" in str(error)
        assert world.post("/inner").status_code == 201
        world.assert_clean()
