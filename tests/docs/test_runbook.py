"""Each symptom of ``docs/runbook.md`` is produced; its log and its commands' outputs are the page's."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import sqlalchemy as sa

import servers
from flask_idempotency import current_operation, idempotent
from flask_idempotency.cli import cli
from flask_idempotency.integrations.prometheus import RecordsCollector
from tests.docs.how_to import outputs
from tests.docs.pages import ROOT, Block, blocks, looks_like
from tests.killed import Killed
from tests.waiting import PATIENCE_SECONDS

PAGE = ROOT / "docs/runbook.md"
SECTIONS = re.findall(r"(?m)^\(([a-z-]+)\)=\n## ", PAGE.read_text(encoding="utf-8"))


class Shop:
    """An application in trouble: one method for each symptom, by the name of its section."""

    def __init__(self, make_world: Any, urls: tuple[str, str], stack: ExitStack) -> None:
        self.database, self.lock = (stack.enter_context(servers.FaultProxy(url)) for url in urls)
        self.make_world, self.stack = make_world, stack
        self.in_view: Callable[[], object] = lambda: None
        self.world = self.make()

    def make(self, **config: Any) -> Any:
        config |= {"SQLALCHEMY_DATABASE_URI": self.database.url, "IDEMPOTENCY_REDIS_URL": self.lock.url}
        world = self.make_world(init={"scope": None}, PROPAGATE_EXCEPTIONS=False, **config)
        for path, options in (
            ("create_payment", {}),
            ("create_refund", {}),
            ("send_parcel", {"atomic": False}),
            ("send_letter", {"atomic": False}),
            ("send_invoice", {"atomic": False, "max_attempts": 2, "on_interrupted": "retry"}),
        ):
            view = idempotent(**options)(getattr(self, path))
            world.app.add_url_rule(f"/{path}", path, view, methods=["POST"])
        return world

    def create_payment(self) -> Any:
        self.in_view()
        return {"id": 1}, 201

    def create_refund(self) -> Any:
        self.world.db.session.execute(sa.text("COMMIT"))

    def send_parcel(self, ends: type[BaseException] = Killed) -> Any:
        current_operation.step("stamp", lambda: {"number": 17})
        raise ends

    def send_letter(self) -> Any:
        self.send_parcel(LookupError)

    def send_invoice(self) -> Any:
        raise Killed

    def post(self, path: str, key: str, status: int, amount: int = 5) -> None:
        answer = self.world.post(f"/{path}", key, json={"amount": amount})
        assert answer.status_code == status, answer.text

    def die(self, path: str, key: str) -> None:
        with pytest.raises(Killed):
            self.post(path, key, 0)
        self.world.sql("UPDATE idempotency_record SET lease_expires_at = created_at")  # time goes by

    def away(self, server: servers.FaultProxy) -> None:
        server.refuse()
        server.cut()

    def operations_interrupted(self) -> None:
        self.die("send_parcel", "parcel-1")
        self.post("send_parcel", "parcel-1", 409)

    def operations_failed(self) -> None:
        self.post("send_letter", "letter-1", 500)

    def attempts_used_up(self) -> None:
        for _ in range(2):
            self.die("send_invoice", "invoice-1")
        self.post("send_invoice", "invoice-1", 409)

    def store_failing(self) -> None:
        limit = sa.text("set local idle_in_transaction_session_timeout = '50ms'")
        self.in_view = lambda: (self.world.db.session.execute(limit), time.sleep(0.5))
        self.post("create_payment", "p2", 503)
        self.in_view = lambda: None
        self.away(self.database)
        self.post("create_payment", "p1", 503)

    def running_unprotected(self) -> None:
        self.world = self.make(IDEMPOTENCY_ON_STORE_ERROR="allow")
        self.away(self.database)
        self.post("create_payment", "p1", 201)

    def pool_exhausted(self) -> None:
        pool = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 0}
        self.world = self.make(SQLALCHEMY_ENGINE_OPTIONS=pool)
        with self.world.app.app_context(), self.world.db.engine.connect():
            self.post("create_payment", "p1", 503)

    def redis_paused(self) -> None:
        self.away(self.lock)
        self.post("create_payment", "p1", 201)

    def table_missing(self) -> None:
        self.world.sql("DROP TABLE idempotency_record")
        self.post("create_payment", "p1", 500)

    def retry_storm(self) -> None:
        runs, go_on = threading.Event(), threading.Event()
        self.in_view = lambda: (runs.set(), go_on.wait(PATIENCE_SECONDS))
        first = threading.Thread(target=self.post, args=("create_payment", "m1", 201))
        self.stack.callback(first.join)
        self.stack.callback(go_on.set)
        first.start()
        assert runs.wait(PATIENCE_SECONDS)
        self.post("create_payment", "m1", 409)

    def keys_reused(self) -> None:
        self.post("create_payment", "m1", 201)
        self.post("create_payment", "m1", 422, amount=6)

    def view_not_atomic(self) -> None:
        self.post("create_refund", "n1", 500)

    def views_failing(self) -> None:
        self.in_view = lambda: 1 / 0
        self.post("create_payment", "p1", 500)

    def trail(self) -> None:
        self.operations_interrupted()
        why = ["--why", "the carrier knows nothing of it", "--by", "ann"]
        self.world.app.test_cli_runner().invoke(cli, ["release", "6d9ad3db", *why])

    def many_takeovers(self) -> None:
        self.views_failing()
        self.in_view = lambda: None
        self.post("create_payment", "p1", 201)

    def records_unknown(self) -> None:
        collector = RecordsCollector(self.world.app)
        self.away(self.database)
        list(collector.collect())

    def records_unreadable(self) -> None:
        self.post("create_payment", "s2", 201)
        self.world = self.make(IDEMPOTENCY_ENCRYPTION_KEYS=["A" * 43])
        self.post("create_payment", "s1", 201)
        self.world = self.make(IDEMPOTENCY_ENCRYPTION_KEYS=["B" * 43])
        self.post("create_payment", "s1", 500)
        self.post("create_payment", "s2", 500)
        self.world.sql("UPDATE idempotency_record SET status = 99")
        self.post("create_payment", "s1", 500)

    def purge_behind(self) -> None:
        self.post("create_payment", "e1", 201)
        self.world.sql("UPDATE idempotency_record SET expires_at = created_at")


@pytest.fixture
def shop(postgres: Any, redis_server: Any, make_world: Any, caplog: Any) -> Iterator[Shop]:
    caplog.set_level("DEBUG", "flask_idempotency")
    caplog.handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    with ExitStack() as stack:
        yield Shop(make_world, (postgres.database("docs_runbook"), redis_server.url), stack)


def blocks_of(section: str) -> list[Block]:
    """The blocks between a section's label and the next heading."""
    text = PAGE.read_text(encoding="utf-8") + "\n## "
    first = text.index("## ", text.index(f"({section})="))
    begin, end = (text.count("\n", 0, place) for place in (first, text.index("\n## ", first)))
    return [block for block in blocks(PAGE, "text", "console") if begin < block.line < end]


@pytest.mark.parametrize("section", [*filter(blocks_of, SECTIONS)])
def test_a_symptom_looks_as_the_page_shows_it(section, shop, caplog):
    getattr(shop, section.replace("-", "_"))()
    logged = caplog.text.splitlines()
    for block in blocks_of(section):
        if block.language == "text":
            for line in block.text.splitlines():
                assert any(looks_like(each, line) for each in logged), f"{line}\n{caplog.text}"
        if block.language == "console":
            list(outputs(shop.world.app, block))
