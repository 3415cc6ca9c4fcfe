"""``docs/protect.md`` does what it says of live APIs and of keys of one's own making."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Flask, Response, g, request

from flask_idempotency import RequestInProgress, idempotent
from flask_idempotency.client import RetryPolicy
from flask_idempotency.web.background import observer
from tests.docs.how_to import Page
from tests.docs.pages import ROOT, apps
from tests.killed import Killed


class TestAdopt:
    @pytest.fixture
    def shop(self, page) -> Page:
        return page("protect.md", "adopt")

    def test_an_equal_order_within_the_ttl_is_the_first_one(self, shop):
        answers = [shop.post("/orders", key=None) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [201, 201]
        assert "Idempotent-Replayed" in answers[1].headers
        assert "Idempotent-Replayed" not in shop.post("/orders", {"amount": 6}, key=None).headers

    def test_the_lines_of_the_log_are_those_of_such_requests(self, shop, caplog, monkeypatch):
        monkeypatch.setattr(observer, "PATIENCE_SECONDS", 10.0)
        statuses = iter([201, 201, 201, 201, 201, 409, 201])
        view = idempotent(enforce=False)(lambda: (request.get_data(), next(statuses)))
        shop.app.add_url_rule("/payments", "create_payment", view, methods=["POST"])
        with caplog.at_level("INFO", "flask_idempotency"):
            for key, amount in [(None, 1), (1, 1), (1, 1), (1, 2), (2, 1), (2, 1), ("bad key", 1)]:
                headers = {} if key is None else {"key": str(key)}
                shop.post("/payments", {"amount": amount}, **{"key": None, **headers})
        said = [f"{record.levelname} {record.getMessage()}" for record in caplog.records]
        text = (ROOT / "docs/protect.md").read_text(encoding="utf-8")
        shown = re.findall(r"(?m)^(?:INFO|WARNING) operation create_payment .*$", text)
        assert [_plain(line) for line in said] == [_plain(line) for line in shown]


def _plain(line):
    return re.sub(r"seconds [\d.]+|id [0-9a-f]{8}", "", line)


class OldCode:
    """What people write: a row for the key; then the work and the response, in one transaction."""

    def __init__(self, shop: Page) -> None:
        self.names, self.session, self.dies = shop.names, shop.db.session, ""
        self.app = Flask("before")
        self.app.config["SQLALCHEMY_DATABASE_URI"] = shop.app.config["SQLALCHEMY_DATABASE_URI"]
        shop.db.init_app(self.app)
        self.app.add_url_rule("/<work>", view_func=self.view, methods=["POST"])

    def send(self, path: str, dies: str = "") -> Any:
        self.dies = dies
        headers = {"Idempotency-Key": "key-1"}
        return self.app.test_client().post(path, json={"amount": 5}, headers=headers)

    def view(self, work: str) -> Any:
        model, key = self.names["OldKey"], request.headers["Idempotency-Key"]
        row = self.session.scalar(sa.select(model).filter_by(account_id="alice", key=key))
        if row is None:
            row = model(account_id="alice", key=key)
            self.session.add(row)
            self.session.commit()
            row.body, row.status = json.dumps(getattr(self, work)(row.id)), 201
            self.session.commit()
        elif row.status is None:
            return {"error": "it is in progress"}, 409
        return Response(row.body, row.status, mimetype="application/json")

    def orders(self, _row: int) -> Any:
        if self.dies:
            raise Killed
        return {"ordered": request.get_json()["amount"]}

    def charges(self, row: int) -> Any:
        charge = self._charge(f"charge-{row}")
        payment = self.names["Payment"](account="alice", charge=charge)
        self.session.add(payment)
        self.session.flush()
        return {"id": payment.id, "charge": charge}

    def transfers(self, row: int) -> Any:
        return {"transfer": self._charge(f"the provider ignores it: {row}")}

    def _charge(self, key: str) -> Any:
        if self.dies == "before":
            raise Killed
        charge = self.names["charge_card"](request.get_json()["amount"], key)
        if self.dies == "after":
            raise Killed
        return charge["id"]


class TestFromHandWrittenKeys:
    """What the old code did with its table, the switch, and the retries: charges are counted."""

    @pytest.fixture
    def shop(self, page, names, provider) -> Page:
        view = apps(ROOT / "docs/other-services.md")[""][0]  # it has charge_card and save_payment
        exec(compile(view.source, view.name, "exec"), names)  # noqa: S102
        return page("protect.md", "hand-written")

    @pytest.fixture
    def before(self, shop) -> Iterator[Callable[..., Any]]:
        """Sends a request to the old code, whose worker may be killed before or after the charge."""
        old = OldCode(shop)
        yield old.send
        with old.app.app_context():
            shop.db.engine.dispose()

    @pytest.mark.parametrize("path", ["/orders", "/charges", "/transfers"])
    def test_an_old_key_gets_its_old_response(self, shop, before, provider, path):
        first, retry = before(path), shop.post(path)
        assert (retry.status_code, retry.data) == (201, first.data)
        assert retry.headers["Idempotent-Replayed"] == "true"
        assert len(provider.ledger) == (0 if path == "/orders" else 1)

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_a_charge_that_was_cut_off_is_made_once(self, shop, before, provider, when):
        with pytest.raises(Killed):
            before("/charges", when)
        answers = [shop.post("/charges") for _ in range(2)]
        assert [answer.json for answer in answers] == [{"charge": "ch_0", "id": 1}] * 2
        assert answers[1].headers["Idempotent-Replayed"] == "true"
        assert (provider.ledger, shop.count("payment")) == (["charge-1"], 1)

    def test_it_is_made_once_even_if_a_worker_of_the_new_code_dies_too(
        self, shop, before, provider, monkeypatch
    ):
        with pytest.raises(Killed):
            before("/charges", "after")
        with monkeypatch.context() as patched:
            patched.setitem(shop.names, "save_payment", lambda _charge: (_ for _ in ()).throw(Killed))
            with pytest.raises(Killed):
                shop.post("/charges")
        shop.sql("UPDATE idempotency_record SET lease_expires_at = clock_timestamp()")
        assert shop.post("/charges").json == {"charge": "ch_0", "id": 1}
        assert (provider.ledger, shop.count("payment")) == (["charge-1"], 1)

    @pytest.mark.parametrize("path", ["/orders", "/charges", "/transfers"])
    def test_a_new_key_is_protected(self, shop, provider, path):
        first, retry = shop.post(path), shop.post(path)
        assert (first.status_code, retry.data) == (201, first.data)
        assert "Idempotent-Replayed" in retry.headers
        assert len(provider.ledger) == (0 if path == "/orders" else 1)

    def test_an_order_that_was_cut_off_runs(self, shop, before):
        with pytest.raises(Killed):
            before("/orders", "before")
        assert shop.post("/orders").json == {"ordered": 5}

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_where_nobody_knows_an_operator_decides(self, shop, before, provider, when):
        provider.deduplicates = False
        with pytest.raises(Killed):
            before("/transfers", when)
        for _ in range(2):
            assert shop.post("/transfers").json["type"].endswith("operation-interrupted")
        assert len(provider.ledger) == (when == "after")
        listed = shop.run_command("list", "--state", "interrupted").splitlines()[1].split()[0]
        if when == "after":
            found = '{"transfer": "ch_0"}'
            what = "--status", "201", "--body", found, "--why", "found there", "--yes"
            shop.run_command("resolve", listed, *what)
        else:
            shop.run_command("release", listed, "--why", "the provider knows nothing of it")
        assert shop.post("/transfers").json == {"transfer": "ch_0"}
        assert len(provider.ledger) == 1

    def test_where_the_provider_does_not_answer_an_operator_decides_too(self, shop, provider):
        provider.deduplicates, provider.loses = False, 1
        for _ in range(2):
            assert shop.post("/transfers").json["type"].endswith("operation-interrupted")
        assert len(provider.ledger) == 1

    def test_what_the_operator_writes_into_the_old_table_is_the_response(self, shop, before, provider):
        with pytest.raises(Killed):
            before("/charges", "after")
        shop.sql("UPDATE old_key SET status = 201, body = '{\"id\": 7}' WHERE status IS NULL")
        assert shop.post("/charges").json == {"id": 7}
        assert len(provider.ledger) == 1

    def test_a_release_in_between_runs_beside_the_old_code(self, shop, before):
        def wait_for_the_old_code(view):
            @wraps(view)
            def wrapper():
                if g.cut_off:
                    raise RequestInProgress(retry_after=1)
                return view()

            return wrapper

        @shop.app.post("/between")
        @shop.names["old_keys_first"]
        @wait_for_the_old_code
        @idempotent
        def between():
            row = {"account_id": "alice", "key": request.headers["Idempotency-Key"]}
            new = shop.names["OldKey"](**row, status=201, body='{"ordered": 5}')
            shop.db.session.add(new)
            shop.db.session.commit()
            return {"ordered": 5}, 201

        with pytest.raises(Killed):
            before("/orders", "before")  # as if it still ran
        answer = shop.post("/between")
        assert answer.status_code == 409
        assert not RetryPolicy().is_final(answer.status_code, answer.headers, answer.data)
        shop.sql("DELETE FROM old_key")
        assert shop.post("/between").status_code == 201
        assert before("/orders").json == {"ordered": 5}
        assert shop.count("old_key") == 1
