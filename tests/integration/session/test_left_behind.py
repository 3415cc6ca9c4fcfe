"""Threads that a view or run() leaves behind, on a copy of the context, cost nobody else anything."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context

import pytest
import sqlalchemy as sa

from flask_idempotency import current_operation, idempotent


@pytest.mark.parametrize("atomic", [True, False])
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

    def run(key):
        with world.app.app_context():
            return world.idempotency.run(key, handle, scope="s", name="pay", atomic=atomic)

    with ThreadPoolExecutor(1) as pool:

        @world.app.post("/events")
        def deliver():
            world.db.session.scalar(sa.text("select 1"))
            results.append(pool.submit(copy_context().run, run, "k"))
            assert begun.wait(10)
            return {}, 202

        assert world.client.post("/events").status_code == 202
        ended.set()
        assert results[0].result(10) == "paid"
    assert world.count() == 1
    assert run("k") == "paid"
    assert world.count() == 1
    world.assert_clean()


def test_a_rollback_after_the_end_reaches_nobody(make_world):
    """A thread is stopped where it is about to send, until the connection is another's."""
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS={"pool_size": 1, "max_overflow": 0})
    sending, over, late = threading.Event(), threading.Event(), set()

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

        @world.app.post("/payments")
        @idempotent
        def pay():
            world.db.session.add(world.Payment(amount=1))
            world.db.session.commit()
            world.db.session.scalar(sa.text("select 1"))
            undone.append(pool.submit(copy_context().run, undo))
            assert sending.wait(10)
            return {}, 201

        undone = []
        with suppress(sa.exc.IllegalStateChangeError):  # of the thread's session, as without us
            world.post()
        with world.app.app_context(), world.db.engine.begin() as bystander:
            bystander.execute(sa.text("insert into payment (amount) values (7)"))
            over.set()
            undone[0].exception(10)
            bystander.execute(sa.text("select 1"))
    assert (7,) in world.sql("select amount from payment")
