"""Queues in ``docs/queues.md``: tasks come again, functions are called after the commit."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from celery import signals
from celery.app.utils import find_app
from rq import SimpleWorker

from flask_idempotency import Retryable, after_commit, current_operation, idempotent
from flask_idempotency.testing import assert_idempotent_call, every_crash
from tests.docs.pages import ROOT, blocks, commands
from tests.waiting import wait_until


class TestQueues:
    PAGE = ROOT / "docs/queues.md"

    @pytest.fixture
    def modules(self, tmp_path, monkeypatch, postgres, redis_server) -> Iterator[Callable[[str], Any]]:
        """Imports a module that the page's reader writes."""
        monkeypatch.setenv("DATABASE_URL", postgres.database("docs_queues"))
        monkeypatch.setenv("REDIS_URL", redis_server.url)
        monkeypatch.syspath_prepend(str(tmp_path))
        for block in blocks(self.PAGE, "python"):
            kind, _, name = block.mark.partition(": ")
            if kind == "file":
                (tmp_path / name).write_text(block.text, encoding="utf-8")
        shop = importlib.import_module("shop")
        with shop.app.app_context():
            shop.db.create_all()
        yield importlib.import_module
        with shop.app.app_context():
            shop.db.engine.dispose()
        for name in ("shop", "celery_tasks", "rq_tasks"):
            sys.modules.pop(name, None)

    @pytest.fixture
    def reader(self, tmp_path) -> Callable[[str], str]:
        """Types a command into the reader's shell; what it printed."""
        environment = {
            **os.environ,  # with the addresses of the servers
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "no_proxy": "*",
        }

        def type_it(command: str) -> str:
            done = subprocess.run(
                ["bash", "-c", command],  # noqa: S607
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        return type_it

    def command(self, program: str) -> str:
        """The page's command that starts this program's worker."""
        [line] = [
            command
            for block in blocks(self.PAGE, "console")
            for command, _ in commands(block.text)
            if command.startswith(f"{program} ")
        ]
        return line

    @contextmanager
    def held(self, shop, key) -> Iterator[list[Any]]:
        """Another worker is at Alice's operation until the context is left; then its results."""
        running, go_on, results = threading.Event(), threading.Event(), []

        def slowly(order):
            running.set()
            assert go_on.wait(20)
            return shop.write_invoice(order)

        def other_worker():
            options = {"scope": "alice", "name": "shop.write_invoice"}
            with shop.app.app_context():
                results.append(shop.idempotency.run(key, slowly, 7, **options))

        other = threading.Thread(target=other_worker)
        other.start()
        try:
            assert running.wait(20)
            yield results
        finally:
            go_on.set()
            other.join()

    def invoices(self, shop) -> int:
        with shop.app.app_context():
            return shop.db.session.query(shop.Invoice).count()

    def test_a_celery_task_that_is_delivered_again_does_nothing_more(self, modules):
        tasks = modules("celery_tasks")
        tasks.celery.conf.update(task_always_eager=True, task_eager_propagates=True)
        results = [tasks.invoice.delay("alice", 7).get() for _ in range(3)]
        assert results == [{"invoice": 1}] * 3
        assert tasks.invoice.delay("bob", 7).get() == {"invoice": 2}
        assert self.invoices(modules("shop")) == 2

    def test_a_celery_task_beside_another_is_tried_again(self, modules):
        tasks, shop = modules("celery_tasks"), modules("shop")
        tasks.celery.conf.task_always_eager = True
        retries = []
        with ExitStack() as running:
            held = running.enter_context(self.held(shop, "order-7"))

            def retried(sender, **_rest):
                retries.append(sender)
                running.close()

            signals.task_retry.connect(retried, weak=False)
            running.callback(signals.task_retry.disconnect, retried)
            assert tasks.invoice.delay("alice", 7).get() == {"invoice": 1}
        assert held == [{"invoice": 1}]
        assert len(retries) == 1
        assert self.invoices(shop) == 1

    @pytest.mark.parametrize("module", ["celery_tasks", "rq_tasks"])
    def test_the_tasks_pass_the_test_of_consumers(self, modules, module):
        task, shop = modules(module).invoice, modules("shop")
        for order, crash in enumerate(every_crash(shop.app)):
            with crash:
                assert_idempotent_call(
                    shop.app,
                    partial(task, "alice", order),
                    effects=lambda: shop.db.session.query(shop.Invoice).count(),
                )

    def test_an_rq_job_that_is_enqueued_again_does_nothing_more(self, modules):
        tasks = modules("rq_tasks")
        jobs = [tasks.enqueue_invoice("alice", 7) for _ in range(3)]
        worker = SimpleWorker([tasks.queue], connection=tasks.queue.connection)
        worker.work(burst=True, logging_level="WARNING")
        assert [job.return_value() for job in jobs] == [{"invoice": 1}] * 3
        assert self.invoices(modules("shop")) == 1

    def test_celery_s_command_finds_the_application(self, modules, reader):
        tasks = modules("celery_tasks")
        worker = self.command("celery")
        assert worker == "celery -A celery_tasks worker"
        assert find_app("celery_tasks", imp=modules) is tasks.celery
        reader(worker.replace("worker", "report"))  # needs the application, and no broker

    def test_rq_s_command_runs_the_job_and_its_retries(self, modules, reader):
        """Without its scheduler RQ would leave a retry that has to wait where it is, for ever."""
        tasks, shop = modules("rq_tasks"), modules("shop")
        with ThreadPoolExecutor() as background:
            with self.held(shop, "order-7") as held:
                job = tasks.enqueue_invoice("alice", 7)
                worker = background.submit(reader, f"{self.command('rq')} --max-jobs 2")
                wait_until(lambda: tasks.queue.scheduled_job_registry.count, "the job has failed once")
            worker.result()
        assert job.get_status(refresh=True) == "finished"
        assert (job.return_value(), held) == ({"invoice": 1}, [{"invoice": 1}])
        assert self.invoices(shop) == 1

    def test_a_function_after_the_commit_is_not_called_for_a_replay(self, page):
        shop = page("queues.md", "queues")
        for _ in range(2):
            assert shop.post("/orders").status_code == 201
        assert shop.names["sent"] == [("alice", 7)]

    @pytest.mark.parametrize(
        ("what", "calls"),
        [("rolled back", 0), ("kept failure", 0), ("step", 1), ("step in an earlier attempt", 0)],
    )
    def test_the_table_of_calls(self, page, what, calls):
        shop, called = page("queues.md", "queues"), []

        @shop.app.post("/table")
        @idempotent(atomic=what == "rolled back")
        def view():
            later = partial(after_commit, partial(called.append, True))
            if not what.startswith("step"):
                later()
                raise LookupError
            current_operation.step("a", later)
            if what != "step" and current_operation.attempt == 1:
                raise Retryable
            assert called == []
            return {}

        shop.post("/table"), shop.post("/table")
        assert len(called) == calls

    def test_the_table_of_calls_where_the_view_goes_on(self, page):
        shop, called = page("queues.md", "queues"), []

        @shop.app.post("/failed-step")
        @idempotent(atomic=False)
        def failed_step():
            with pytest.raises(ZeroDivisionError):
                current_operation.step("a", lambda: after_commit(step) or 1 / 0)
            return {}

        @shop.app.post("/own-rollback")
        @idempotent
        def own_rollback():
            after_commit(view)
            shop.db.session.rollback()
            return {}

        step, view = (partial(called.append, each) for each in ("step", "view"))
        assert shop.post("/failed-step").status_code == shop.post("/own-rollback").status_code == 200
        assert called == ["view"]

    def test_an_error_after_the_commit_changes_nothing(self, page, caplog):
        shop = page("queues.md", "queues")
        shop.names["enqueue"] = lambda *_: 1 / 0
        assert shop.post("/orders").status_code == 201
        assert "ZeroDivisionError" in caplog.text

    def test_the_outbox_sends_at_once_and_what_was_left(self, page):
        shop = page("queues.md", "queues")
        for key in "ab":
            assert shop.post("/purchases", key=key).status_code == 201
        assert shop.names["sent"] == [("alice", 1), ("alice", 2)]
        assert shop.count("outgoing") == 0
        send, shop.names["send_outgoing"] = shop.names["send_outgoing"], lambda: None
        shop.post("/purchases", key="c")  # the process dies before the nudge
        assert shop.count("outgoing") == 1
        send()
        assert shop.names["sent"][2:] == [("alice", 3)]
        assert shop.count("outgoing") == 0
