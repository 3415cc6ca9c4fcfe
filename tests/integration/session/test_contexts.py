"""Threads, tasks, contexts and requests of a view's own: none of them ends or takes along an operation.

Up to Flask 3.1 a request that a view sends to its own application by the test client shares its
application context, and so ``db.session``. From 3.2 on there is nothing to share, nor to refuse.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest
import sqlalchemy as sa
from flask import copy_current_request_context, request

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
    def test_beside_a_view_that_has_only_read_it_commits_by_itself(self, world, add, rows, outer):
        count = sa.select(sa.func.count(world.Payment.id))

        def send():
            assert world.db.session.scalar(count) == 0
            assert world.post("/inner").status_code == 201
            assert (rows(), world.db.session.scalar(count)) == (["inner"], 1)

        add("inner", idempotent(atomic=False))
        add("outer", outer, send, 503)
        assert world.post("/outer").status_code == 503
        assert rows() == ["inner", "outer"]
        world.assert_clean()

    @OUTER
    def test_what_the_inner_view_leaves_is_not_the_outer_ones(self, world, add, rows, outer):
        def leave():
            world.db.session.add(world.Payment(amount=1, note="left behind"))
            world.db.session.flush()

        add("inner", idempotent(atomic=False), leave, write=False)
        add("outer", outer, lambda: world.post("/inner"))
        assert world.post("/outer").status_code == 201
        assert rows() == ["outer"]
        world.assert_clean()

    @KINDS
    @pytest.mark.parametrize("work", [bool, pay_once])
    def test_an_atomic_view_that_sends_one_is_refused_with_it(
        self, world, add, rows, work, atomic, caplog
    ):
        def send():
            work(world)
            assert world.post("/inner").status_code == 500

        add("inner", idempotent(atomic=atomic))
        add("outer", idempotent, send)
        assert (world.post("/outer").status_code, rows()) == (500, [])
        error = caplog.records[-1].exc_info[1]
        assert isinstance(error, NotAtomic)
        assert "request to its own application" in str(error)
        assert world.post("/inner").status_code == 201
        world.assert_clean()
