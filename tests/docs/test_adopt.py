"""``docs/protect.md`` does what it says of live APIs and of keys of one's own making."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Flask, Response, request

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
        app, db, names = Flask("before"), shop.db, shop.names
        dies: list[str] = []
        app.config["SQLALCHEMY_DATABASE_URI"] = shop.app.config["SQLALCHEMY_DATABASE_URI"]
        db.init_app(app)

        def charge(key):
            if "before" in dies:
                raise Killed
            charge = names["charge_card"](request.get_json()["amount"], key)
            if "after" in dies:
                raise Killed
            return charge["id"]

        def create_order(_row):
            if dies:
                raise Killed
            return {"ordered": request.get_json()["amount"]}

        def create_charge(row):
            payment = names["Payment"](account="alice", charge=charge(f"charge-{row.id}"))
            db.session.add(payment)
            db.session.flush()
            return {"id": payment.id, "charge": payment.charge}

        def create_transfer(row):
            return {"transfer": charge(f"the provider ignores it: {row.id}")}

        work = {"orders": create_order, "charges": create_charge, "transfers": create_transfer}

        @app.post("/<kind>")
        def by_hand(kind):
            row = names["OldKey"](account_id="alice", key=request.headers["Idempotency-Key"])
            db.session.add(row)
            db.session.commit()
            row.body, row.status = json.dumps(work[kind](row)), 201
            db.session.commit()
            return Response(row.body, row.status, mimetype="application/json")

        def send(path: str, when: str = "") -> Any:
            dies[:] = [when] if when else []
            headers = {"Idempotency-Key": "key-1"}
            return app.test_client().post(path, json={"amount": 5}, headers=headers)

        yield send
        with app.app_context():
            db.engine.dispose()

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
            shop.run_command("release", listed)
        assert shop.post("/transfers").json == {"transfer": "ch_0"}
        assert len(provider.ledger) == 1

    def test_what_the_operator_writes_into_the_old_table_is_the_response(self, shop, before, provider):
        with pytest.raises(Killed):
            before("/charges", "after")
        shop.sql("UPDATE old_key SET status = 201, body = '{\"id\": 7}' WHERE status IS NULL")
        assert shop.post("/charges").json == {"id": 7}
        assert len(provider.ledger) == 1

    def test_a_client_does_not_take_for_refused_what_may_still_run(self, shop):
        @shop.app.post("/waits")
        def waits():
            raise RequestInProgress(retry_after=1)

        answer = shop.post("/waits")
        assert answer.status_code == 409
        assert not RetryPolicy().is_final(answer.status_code, answer.headers, answer.data)
