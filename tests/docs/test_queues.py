"""Queues in ``docs/queues.md``: tasks come again, functions are called after the commit."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
from celery import signals

from flask_idempotency.testing import assert_idempotent_call, every_crash
from tests.docs.pages import ROOT, blocks, commands
from tests.docs.test_tutorials import Shell, write_file
from tests.waiting import wait_until

PAGE = ROOT / "docs/queues.md"


@pytest.fixture
def modules(tmp_path, monkeypatch, postgres, redis_server) -> Iterator[Callable[[str], Any]]:
    """Imports a module that the page's reader writes."""
    monkeypatch.setenv("DATABASE_URL", postgres.database("docs_queues"))
    monkeypatch.setenv("REDIS_URL", redis_server.url)
    monkeypatch.syspath_prepend(str(tmp_path))
    for block in blocks(PAGE, "python"):
        write_file(block, tmp_path)
    shop = importlib.import_module("shop")
    with shop.app.app_context():
        shop.db.create_all()
    yield importlib.import_module
    with shop.app.app_context():
        shop.db.engine.dispose()
    for name in ("shop", "celery_tasks", "rq_tasks"):
        sys.modules.pop(name, None)


@contextmanager
def held(shop) -> Iterator[None]:
    """Another worker is at Alice's operation until the context is left. It has the same result."""
    running, go_on = threading.Event(), threading.Event()

    def slowly(order):
        running.set()
        assert go_on.wait(20)
        return shop.write_invoice(order)

    def other_worker():
        options = {"scope": "alice", "name": "shop.write_invoice"}
        with shop.app.app_context():
            return shop.idempotency.run("order-7", slowly, 7, **options)

    with ThreadPoolExecutor() as pool:
        other = pool.submit(other_worker)
        try:
            assert running.wait(20)
            yield
        finally:
            go_on.set()
        assert other.result() == {"invoice": 1}


def invoices(shop) -> int:
    with shop.app.app_context():
        return shop.db.session.query(shop.Invoice).count()


def test_a_celery_task_beside_another_is_tried_again(modules):
    tasks, shop, retries = modules("celery_tasks"), modules("shop"), []
    tasks.celery.conf.task_always_eager = True
    with ExitStack() as running:
        running.enter_context(held(shop))

        def retried(sender, **_rest):
            retries.append(sender)
            running.close()

        signals.task_retry.connect(retried, weak=False)
        running.callback(signals.task_retry.disconnect, retried)
        assert tasks.invoice.delay("alice", 7).get() == {"invoice": 1}
    assert (len(retries), invoices(shop)) == (1, 1)


@pytest.mark.parametrize("module", ["celery_tasks", "rq_tasks"])
def test_the_tasks_pass_the_test_of_consumers(modules, module):
    task, shop = modules(module).invoice, modules("shop")
    for order, crash in enumerate(every_crash(shop.app)):
        with crash:
            assert_idempotent_call(
                shop.app, partial(task, "alice", order), effects=partial(invoices, shop)
            )


def test_rq_s_command_runs_the_job_and_its_retries(modules, tmp_path):
    """Without its scheduler RQ would leave a retry that has to wait where it is, for ever."""
    tasks, shop = modules("rq_tasks"), modules("shop")
    typed = [line for block in blocks(PAGE, "console") for line, _ in commands(block.text)]
    [command] = [line for line in typed if line.startswith("rq ")]
    servers = {name: os.environ[name] for name in ("DATABASE_URL", "REDIS_URL")}
    reader = Shell(tmp_path, port="0", **servers)
    with ThreadPoolExecutor() as background:
        with held(shop):
            job = tasks.enqueue_invoice("alice", 7)
            worker = background.submit(reader.type, f"{command} --max-jobs 2")
            wait_until(lambda: tasks.queue.scheduled_job_registry.count, "the job has failed once")
        worker.result()
    assert job.get_status(refresh=True) == "finished"
    assert (job.return_value(), invoices(shop)) == ({"invoice": 1}, 1)


def test_after_the_commit_a_function_and_the_outbox_send_once_and_what_was_left(page):
    shop = page("queues.md", "queues")
    assert [shop.post("/orders").status_code for _ in range(2)] == [201, 201]
    assert shop.names["sent"] == [("alice", 7)]
    for key in "ab":
        assert shop.post("/purchases", key=key).status_code == 201
    assert shop.names["sent"][1:] == [("alice", 1), ("alice", 2)]
    send, shop.names["send_outgoing"] = shop.names["send_outgoing"], lambda: None
    shop.post("/purchases", key="c")  # the process dies before the nudge
    assert shop.count("outgoing") == 1
    send()
    assert shop.names["sent"][3:] == [("alice", 3)]
    assert shop.count("outgoing") == 0
