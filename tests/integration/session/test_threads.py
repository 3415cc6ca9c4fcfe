"""Threads, tasks and contexts beside the view: none of them ends or takes along its operation."""

from __future__ import annotations

import asyncio
import threading

import pytest
from flask import copy_current_request_context, request

from flask_idempotency import current_operation
from tests.flask_releases import BEFORE_3_2
from tests.integration.views import pay_once, protect


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
    assert world.post().status_code == 201
    assert world.count() == 1


@pytest.mark.parametrize("push", ["app_context", "test_request_context"])
def test_a_session_of_a_context_that_the_view_pushes_is_the_views(world, view, push):
    """But not that of another request's context from Flask 3.2 on: that shares nothing."""
    alone = 0 if BEFORE_3_2 or push == "app_context" else 1

    def pay():
        with getattr(world.app, push)():
            world.db.session.add(world.Payment(amount=1))
            world.db.session.commit()
        return {}, 201 if request.json["amount"] else 500

    view(pay)
    assert world.post(json={"amount": 0}).status_code == 500
    assert world.count() == alone
    assert [world.post(key="key-2").status_code for _ in range(2)] == [201, 201]
    assert world.count() == alone + 1
