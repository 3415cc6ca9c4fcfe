"""The how-to pages do what they say: their views are called, and their situations are made."""

from __future__ import annotations

import hashlib
import hmac
import importlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from celery import signals
from flask import Flask, g, request
from rq import SimpleWorker
from werkzeug.serving import make_server

from flask_idempotency import OperationInterrupted, Retryable, current_operation, idempotent
from flask_idempotency.cli import cli
from tests.docs.pages import MAKE_DUE, ROOT, blocks
from tests.killed import Killed


class Page:
    """An application with the code of a page in it, whose user is Alice."""

    def __init__(self, name: str, names: dict[str, Any]) -> None:
        self.names, self.app, self.db = names, names["app"], names["db"]
        self.app.config.update(IDEMPOTENCY_PROBE_AFTER=0, PROPAGATE_EXCEPTIONS=False)
        self.app.before_request(self._sign_in)
        path = ROOT / "docs" / name
        for block in blocks(path, "python"):
            if not block.mark:
                exec(compile(block.source, str(path), "exec"), names)  # noqa: S102
        with self.app.app_context():
            self.db.create_all()

    def _sign_in(self) -> None:
        g.account_id = "alice"

    def post(self, path: str, body: Any = None, key: str | None = "key-1", **headers: str) -> Any:
        if key is not None:
            headers["Idempotency-Key"] = key
        return self.app.test_client().post(path, json=body or {"amount": 5}, headers=headers)

    def sql(self, statement: str) -> list[Any]:
        with self.app.app_context(), self.db.engine.begin() as connection:
            result = connection.execute(sa.text(statement))
            return list(result) if result.returns_rows else []

    def count(self, table: str) -> int:
        return self.sql(f"SELECT count(*) FROM {table}")[0][0]

    def run_command(self, *arguments: str) -> str:
        return self.app.test_cli_runner().invoke(cli, arguments).output


@pytest.fixture
def page(names: dict[str, Any]) -> Callable[[str], Page]:
    return lambda name: Page(name, names)


@pytest.fixture
def kill() -> Callable[[Page, str], None]:
    """Lets a function of the page die, once, before or after its work; then the lease is over."""

    def kill(shop: Page, path: str, function: str, *, after: bool) -> None:
        whole = shop.names[function]

        def dies(*args: Any) -> None:
            if after:
                whole(*args)
            raise Killed

        shop.names[function] = dies
        with pytest.raises(Killed):
            shop.post(path)
        shop.names[function] = whole
        shop.sql("UPDATE idempotency_record SET lease_expires_at = clock_timestamp()")

    return kill


class Provider:
    """A payment provider over HTTP. Its ledger has each charge that it made."""

    def __init__(self) -> None:
        self.deduplicates, self.refuses = True, 0
        self.ledger: list[str] = []
        app = Flask("provider")
        app.add_url_rule("/charges", "charge", self.charge, methods=["POST"])
        app.add_url_rule("/charges", "find", self.find)
        app.add_url_rule("/bookings", "book", lambda: ({"booked": True}, 201), methods=["POST"])
        self.server = make_server("127.0.0.1", 0, app, threaded=True)
        self.url = f"http://127.0.0.1:{self.server.port}"

    def charge(self) -> Any:
        if self.refuses:
            return {"refused": True}, self.refuses
        key = request.headers["Idempotency-Key"]
        if not (self.deduplicates and key in self.ledger):
            self.ledger.append(key)
        return {"id": f"ch_{self.ledger.index(key)}"}

    def find(self) -> Any:
        key = request.args["reference"]
        return [{"id": f"ch_{self.ledger.index(key)}"}] if key in self.ledger else []


@pytest.fixture
def provider(names) -> Iterator[Provider]:
    provider = Provider()
    thread = threading.Thread(target=provider.server.serve_forever)
    thread.start()
    names["app"].config["PROVIDER_URL"] = provider.url
    yield provider
    provider.server.shutdown()
    thread.join()
    provider.server.server_close()


class TestCallsToOtherServices:
    """``docs/other-services.md``."""

    @pytest.fixture
    def shop(self, page, provider) -> Page:
        return page("other-services.md")

    def test_a_payment_is_charged_and_saved_once(self, shop, provider):
        first, retry = shop.post("/payments"), shop.post("/payments")
        assert (first.status_code, first.json) == (201, {"charge": "ch_0", "id": 1})
        assert retry.data == first.data
        assert (len(provider.ledger), shop.count("payment")) == (1, 1)

    @pytest.mark.parametrize(("status", "kept"), [(402, 402), (400, 500)])
    def test_a_refusal_is_kept(self, shop, provider, status, kept):
        provider.refuses = status
        assert shop.post("/payments").status_code == kept
        provider.refuses = 0
        assert shop.post("/payments").status_code == kept
        assert provider.ledger == []

    @pytest.mark.parametrize("status", [429, 500, 503])
    def test_a_provider_that_is_busy_is_asked_again(self, shop, provider, status):
        provider.refuses = status
        refused = shop.post("/payments")
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
        provider.refuses = 0
        assert shop.post("/payments").status_code == 201
        assert len(provider.ledger) == 1

    @pytest.mark.parametrize("deduplicates", [True, False], ids=["with", "without"])
    @pytest.mark.parametrize(
        ("function", "after", "steps"),
        [
            ("charge_card", False, []),
            ("charge_card", True, []),
            ("save_payment", False, ["charge"]),
            ("save_payment", True, ["charge"]),  # of an atomic step: its end is not its commit
        ],
    )
    def test_the_table_of_crashes(self, shop, provider, kill, function, after, steps, deduplicates):
        provider.deduplicates = deduplicates
        kill(shop, "/payments", function, after=after)
        assert [name for (name,) in shop.sql("SELECT name FROM idempotency_record_step")] == steps
        assert shop.post("/payments").status_code == 201
        twice = function == "charge_card" and after and not deduplicates
        assert len(provider.ledger) == (2 if twice else 1)
        assert shop.count("payment") == 1

    def test_a_death_after_all_steps_repeats_none(self, shop, provider, monkeypatch):
        with monkeypatch.context() as patched:
            patched.setattr(shop.app, "make_response", lambda _result: (_ for _ in ()).throw(Killed))
            with pytest.raises(Killed):
                shop.post("/payments")
        assert shop.count("idempotency_record_step") == 2
        assert shop.post("/payments").json == {"charge": "ch_0", "id": 1}
        assert (len(provider.ledger), shop.count("payment")) == (1, 1)

    @pytest.mark.parametrize(("after", "attempts"), [(False, [2]), (True, [1])])
    def test_the_provider_is_asked_what_it_did(self, shop, provider, kill, after, attempts):
        seen = []
        charge = shop.names["charge_card"]

        def noted(*args):
            seen.append(current_operation.attempt)
            return charge(*args)

        shop.names["charge_card"] = noted
        kill(shop, "/transfers", "charge_card", after=after)
        assert shop.post("/transfers").json == {"transfer": "ch_0"}
        assert (len(provider.ledger), seen) == (1, attempts)

    def test_a_callable_that_answers_later_is_asked_again(self, shop, kill):
        asked = []
        shop.names["work"] = dict

        @shop.app.post("/later")
        @idempotent(atomic=False, on_interrupted=lambda _: asked.append(True) or ({}, 429))
        def later():
            return shop.names["work"]()

        kill(shop, "/later", "work", after=False)
        assert [shop.post("/later").status_code for _ in range(2)] == [429, 429]
        assert asked == [True, True]

    def test_a_view_that_does_not_know_leaves_the_operation_interrupted(self, shop, provider):
        real = shop.names["requests"]
        shop.names["requests"] = _Times(real, real.ReadTimeout)
        for _ in range(2):
            answer = shop.post("/bookings")
            assert (answer.status_code, answer.json["type"].split(":")[-1]) == (
                409,
                OperationInterrupted.type,
            )
        listed = shop.run_command("list", "--state", "interrupted")
        assert "create_booking" in listed
        digits = listed.splitlines()[1].split()[0]
        shop.names["requests"] = real
        assert shop.run_command("release", digits) == f"{digits}: may be run again\n"
        assert shop.post("/bookings").status_code == 201

    def test_a_view_that_knows_frees_the_key(self, shop, provider):
        real = shop.names["requests"]
        shop.names["requests"] = _Times(real, real.ConnectTimeout)
        assert shop.post("/bookings").status_code == 503
        shop.names["requests"] = real
        assert shop.post("/bookings").status_code == 201

    def test_a_step_costs_two_messages(self, shop, postgres):
        """So says the page "Life of a request"; one more reads what is recorded."""
        if not postgres.controllable:
            pytest.skip("a server that the environment names does not show its log")
        ((database,),) = shop.sql("SELECT current_database()")
        shop.sql(f"ALTER DATABASE {database} SET log_statement = 'all'")
        with shop.app.app_context():
            shop.db.engine.dispose()  # the setting is for new connections
        seen = []

        def count(name):
            before = len(postgres.log)
            current_operation.step(name, dict)
            seen.append(postgres.log[before:].count("LOG:  statement: "))

        @shop.app.post("/counted")
        @idempotent(atomic=False)
        def counted():
            count("a")
            if current_operation.attempt == 1:
                raise Retryable
            count("b")
            return {}

        assert [shop.post("/counted").status_code for _ in range(2)] == [503, 200]
        assert seen == [2, 1, 2]

    def test_an_operation_is_finished_without_its_client(self, shop, provider, kill):
        kill(shop, "/subscriptions", "charge_card", after=True)
        shop.sql(MAKE_DUE)
        assert "create_subscription" in shop.run_command("resume")
        assert shop.run_command("resume") == "nothing to resume\n"
        assert shop.post("/subscriptions").headers["Idempotent-Replayed"] == "true"
        assert len(provider.ledger) == 1

    def test_who_releases_after_the_retention_still_has_the_steps(self, shop, provider, kill):
        kill(shop, "/payments", "save_payment", after=False)
        shop.sql("UPDATE idempotency_record SET expires_at = now() - interval '1 hour'")
        digits = shop.run_command("list", "--state", "interrupted").splitlines()[1].split()[0]
        shop.run_command("release", digits)
        provider.deduplicates = False
        assert shop.post("/payments").status_code == 201
        assert len(provider.ledger) == 1


class _Times:
    """``requests``, whose ``post`` fails as a network may."""

    def __init__(self, module: Any, error: type[Exception]) -> None:
        self._module, self._error = module, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def post(self, *_args: Any, **_options: Any) -> Any:
        raise self._error


class TestSteps:
    """``docs/steps.md``."""

    @pytest.fixture
    def shop(self, page) -> Page:
        return page("steps.md")

    def test_the_finished_step_is_not_repeated(self, shop):
        provider = shop.names["provider"]
        assert shop.post("/payments").status_code == 503
        answer = shop.post("/payments")
        assert (answer.status_code, answer.json) == (201, {"id": "ch_1", "amount": 5})
        assert (len(provider.charges), len(provider.mails)) == (1, 2)
        assert len(provider.charges[0]) == 43

    def test_a_step_that_writes_commits_once(self, shop):
        assert [shop.post("/invoices").status_code for _ in range(2)] == [503, 201]
        assert shop.count("payment") == 1

    def test_a_conflict_in_a_step_gives_the_operation_back(self, shop):
        conflict = "DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$"

        @shop.app.post("/conflicts")
        @idempotent(atomic=False)
        def conflicts():
            current_operation.step("a", lambda: shop.db.session.execute(sa.text(conflict)), atomic=True)

        answers = [shop.post("/conflicts").json["type"].split(":")[-1] for _ in range(2)]
        assert answers == ["transaction-conflict", "transaction-conflict"]

    def test_a_long_step_gets_a_long_lease(self, shop):
        seen = []

        def render():
            left = "SELECT extract(epoch FROM lease_expires_at - now()) FROM idempotency_record"
            seen.append(shop.sql(left)[0][0])
            return {"pages": 1}

        shop.names["render"] = render
        assert shop.post("/reports").status_code == 201
        assert 500 < seen[0] <= 600


class TestWebhooks:
    """``docs/webhooks.md``."""

    @pytest.fixture
    def shop(self, page) -> Page:
        return page("webhooks.md")

    def send(self, shop, path, event, secret=b"from the provider's dashboard"):
        body = json.dumps(event).encode()
        signature = hmac.new(secret, body, hashlib.sha256).hexdigest()
        headers = {"X-Signature": signature, "Content-Type": "application/json"}
        return shop.app.test_client().post(path, data=body, headers=headers)

    def event(self, number=1, **more):
        return {"id": f"evt_{number}", "type": "payment.succeeded", "payment": "pay_1", **more}

    @pytest.mark.parametrize(("path", "status"), [("payments", 204), ("refunds", 200)])
    def test_an_event_is_handled_once(self, shop, path, status):
        path = f"/webhooks/{path}"
        for delivery in range(3):
            event = self.event(delivery=delivery)  # a counter, as providers have it
            assert self.send(shop, path, event).status_code == status
        assert shop.count("booking") == 1
        assert self.send(shop, path, self.event(2)).status_code == status
        assert shop.count("booking") == 2

    @pytest.mark.parametrize("path", ["payments", "refunds"])
    def test_nobody_else_can_send_one(self, shop, path):
        path = f"/webhooks/{path}"
        assert self.send(shop, path, self.event(), secret=b"guessed").status_code == 401
        assert (shop.count("idempotency_record"), shop.count("booking")) == (0, 0)
        self.send(shop, path, self.event())
        assert self.send(shop, path, self.event(), secret=b"guessed").status_code == 401

    def test_two_deliveries_at_one_moment_are_one_booking(self, shop):
        running, go_on, book = threading.Event(), threading.Event(), shop.names["book"]

        def slowly(payment):
            running.set()
            assert go_on.wait(20)
            return book(payment)

        slowly.__module__, slowly.__qualname__ = book.__module__, book.__qualname__
        shop.names["book"] = slowly
        statuses = []
        first = threading.Thread(
            target=lambda: statuses.append(self.send(shop, "/webhooks/payments", self.event()))
        )
        first.start()
        assert running.wait(20)
        second = self.send(shop, "/webhooks/payments", self.event())
        go_on.set()
        first.join()
        assert (second.status_code, statuses[0].status_code) == (409, 204)
        assert shop.count("booking") == 1

    def test_an_event_that_could_not_be_handled_is_handled_when_it_comes_again(self, shop):
        shop.sql("ALTER TABLE booking RENAME TO away")
        assert self.send(shop, "/webhooks/payments", self.event()).status_code == 500
        shop.sql("ALTER TABLE away RENAME TO booking")
        assert self.send(shop, "/webhooks/payments", self.event()).status_code == 204
        assert shop.count("booking") == 1


class TestQueues:
    """``docs/queues.md``."""

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
        running, go_on, retries = threading.Event(), threading.Event(), []

        def slowly(order):
            running.set()
            assert go_on.wait(20)
            return shop.write_invoice(order)

        def other_worker():
            options = {"scope": "alice", "name": "shop.write_invoice"}
            with shop.app.app_context():
                shop.idempotency.run("order-7", slowly, 7, **options)

        other = threading.Thread(target=other_worker)

        def retried(sender, **_rest):
            retries.append(sender)
            go_on.set()
            other.join()

        other.start()
        assert running.wait(20)
        with_retries = signals.task_retry.connect(retried, weak=False)
        try:
            assert tasks.invoice.delay("alice", 7).get() == {"invoice": 1}
        finally:
            signals.task_retry.disconnect(with_retries)
            go_on.set()
            other.join()
        assert len(retries) == 1
        assert self.invoices(shop) == 1

    def test_an_rq_job_that_is_enqueued_again_does_nothing_more(self, modules):
        tasks = modules("rq_tasks")
        jobs = [tasks.enqueue_invoice("alice", 7) for _ in range(3)]
        worker = SimpleWorker([tasks.queue], connection=tasks.queue.connection)
        worker.work(burst=True, logging_level="WARNING")
        assert [job.return_value() for job in jobs] == [{"invoice": 1}] * 3
        assert self.invoices(modules("shop")) == 1

    def test_a_function_after_the_commit_is_not_called_for_a_replay(self, page):
        shop = page("queues.md")
        for _ in range(2):
            assert shop.post("/orders").status_code == 201
        assert shop.names["sent"] == [("alice", 7)]

    @pytest.mark.parametrize(
        ("what", "calls"),
        [("rolled back", 0), ("kept failure", 0), ("step", 1), ("step in an earlier attempt", 0)],
    )
    def test_the_table_of_calls(self, page, what, calls):
        shop, called = page("queues.md"), []

        @shop.app.post("/table")
        @idempotent(atomic=what == "rolled back")
        def view():
            later = partial(shop.names["idempotency"].after_commit, called.append, True)
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

    def test_an_error_after_the_commit_changes_nothing(self, page, caplog):
        shop = page("queues.md")
        shop.names["enqueue"] = lambda *_: 1 / 0
        assert shop.post("/orders").status_code == 201
        assert "ZeroDivisionError" in caplog.text

    def test_the_outbox_sends_at_once_and_what_was_left(self, page):
        shop = page("queues.md")
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
