"""``own-keys.md`` does what it says: old code, new code, and back, with retries across."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Flask, Response, g, request

from flask_idempotency import KeyMalformed, idempotent
from flask_idempotency.core.keys import parse_key
from tests.docs.how_to import Page
from tests.docs.pages import RECIPES, ROOT, apps, blocks
from tests.killed import Killed


class OldCode:
    """What people write: a row for the key; then the work and the response, in one transaction.

    A row without a status counts as freed by a job if ``frees``.
    """

    def __init__(self, shop: Page) -> None:
        self.names, self.session, self.dies = shop.names, shop.db.session, ""
        self.frees, self.done = False, list[str]()
        self.app = Flask("before")
        self.app.config["SQLALCHEMY_DATABASE_URI"] = shop.app.config["SQLALCHEMY_DATABASE_URI"]
        shop.db.init_app(self.app)
        self.app.add_url_rule("/<work>", view_func=self.view, methods=["POST"])

    def send(self, path: str, dies: str = "", key: str = "key-1") -> Any:
        self.dies = dies
        headers = {"Idempotency-Key": key}
        return self.app.test_client().post(path, json={"amount": 5}, headers=headers)

    def view(self, work: str) -> Any:
        key = request.headers["Idempotency-Key"]
        body, status = self.once("alice", key, getattr(self, work))
        return Response(body, status, mimetype="application/json")

    def once(self, account: str, key: str, work: Callable[[int], tuple[Any, int]]) -> tuple[str, int]:
        model = self.names["OldKey"]
        row = self.session.scalar(sa.select(model).filter_by(account_id=account, key=key))
        if row is None:
            row = model(account_id=account, key=key)
            self.session.add(row)
            self.session.commit()
        elif row.status is not None:
            return row.body, row.status
        elif not self.frees:
            return json.dumps({"error": "it is in progress"}), 409
        result, status = work(row.id)
        self.done.append(work.__name__)
        row.body, row.status = json.dumps(result), status
        self.session.commit()
        return row.body, row.status

    def orders(self, _row: int) -> Any:
        if self.dies:
            raise Killed
        return {"ordered": request.get_json()["amount"]}, 201

    def charges(self, row: int) -> Any:
        charge = self._charge(f"charge-{row}")
        if charge is None:
            return {"error": "declined"}, 402
        payment = self.names["Payment"](account="alice", charge=charge)
        self.session.add(payment)
        self.session.flush()
        return {"id": payment.id, "charge": charge}, 201

    def transfers(self, row: int) -> Any:
        return {"transfer": self._charge(f"the provider ignores it: {row}")}, 201

    def invoices(self, _row: int) -> Any:
        return {"invoice": 7}, 200

    def _charge(self, key: str) -> Any:
        if self.dies == "before":
            raise Killed
        charge = self.names["charge_card"](request.get_json()["amount"], key)
        if self.dies == "after":
            raise Killed
        return charge and charge["id"]


@pytest.fixture
def shop(page, names, provider) -> Page:
    view = apps(ROOT / "docs/other-services.md")[""][0]  # it has charge_card and save_payment
    exec(compile(view.source, view.name, "exec"), names)  # noqa: S102
    return page("own-keys.md")


@pytest.fixture
def old(shop) -> Iterator[OldCode]:
    old = OldCode(shop)
    yield old
    with old.app.app_context():
        shop.db.engine.dispose()


def end_leases(shop: Page) -> None:
    shop.sql("UPDATE idempotency_record SET lease_expires_at = clock_timestamp()")


@pytest.mark.usefixtures("patient_observing")
class TestBefore:
    def test_the_query_finds_the_keys_that_are_refused(self, shop):
        keys = ["k-1", "8e03978e-40d5", "{a}[b]", '"k 1, k"', "k 1", "a,b", "a;b", "a\\b", 'a"b', '"a']
        keys += ['""', '"a"b', "größe", '"größe"', "a\tb", "x" * 255, "x" * 256]
        with shop.app.app_context(), shop.db.engine.begin() as connection:
            rows = [{"account_id": "alice", "key": key} for key in keys]
            connection.execute(sa.insert(shop.names["OldKey"]), rows)
        [query] = blocks(RECIPES / "own-keys.md", "postgres")
        found = {key for _, key in shop.sql(query.text.replace(":", "\\:"))}
        assert found == set(filter(_refused, keys))

    def test_a_charge_under_such_a_key_ends(self, shop, old, provider):
        key = "order 17, größe"
        names, charge = shop.names, shop.names["create_charge"].__wrapped__.__wrapped__
        text = (RECIPES / "own-keys.md").read_text(encoding="utf-8")
        taken = 'key=lambda: request.headers.get("Idempotency-Key")'
        assert f"`@idempotent({taken})`" in text
        options = eval(f"dict({taken}, atomic=False, on_interrupted='retry')", names)  # noqa: S307
        view = names["old_keys_first"](idempotent(**options)(charge))
        shop.app.add_url_rule("/odd", "odd", view, methods=["POST"])
        with pytest.raises(Killed):
            old.send("/charges", "after", key)
        assert [shop.post("/charges", key=key).status_code for _ in range(2)] == [400, 400]
        assert [shop.post("/odd", key=key).json for _ in range(2)] == [{"charge": "ch_0", "id": 1}] * 2
        assert (provider.ledger, shop.count("payment")) == (["charge-1"], 1)


def _refused(key: str) -> bool:
    try:
        parse_key(key)
    except KeyMalformed:
        return True
    return False


class TestMove:
    """What the old code did with its table, the switch, and the retries: charges are counted."""

    @pytest.mark.parametrize("path", ["/orders", "/charges", "/transfers"])
    def test_an_old_key_gets_its_old_response(self, shop, old, provider, path):
        first, retry = old.send(path), shop.post(path)
        assert (retry.status_code, retry.data) == (201, first.data)
        assert retry.headers["Idempotent-Replayed"] == "true"
        assert len(provider.ledger) == (0 if path == "/orders" else 1)

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_a_charge_that_was_cut_off_is_made_once(self, shop, old, provider, when):
        with pytest.raises(Killed):
            old.send("/charges", when)
        answers = [shop.post("/charges") for _ in range(2)]
        assert [answer.json for answer in answers] == [{"charge": "ch_0", "id": 1}] * 2
        assert answers[1].headers["Idempotent-Replayed"] == "true"
        assert (provider.ledger, shop.count("payment")) == (["charge-1"], 1)

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_where_nobody_knows_an_operator_decides(self, shop, old, provider, when):
        provider.deduplicates = False
        with pytest.raises(Killed):
            old.send("/transfers", when)
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

    def test_a_task_of_the_old_code_is_not_done_again(self, shop, old):
        def task(order: int) -> Any:
            with shop.app.app_context():
                return shop.names["invoice"]("alice", order)

        with old.app.app_context():
            old.once("alice", "order-7", old.invoices)
        assert [task(order) for order in (7, 8, 8)] == [{"invoice": 7}, {"invoice": 8}, {"invoice": 8}]
        assert shop.count("idempotency_record") == 1
        with old.app.app_context():  # back
            assert json.loads(old.once("alice", "order-8", old.invoices)[0]) == {"invoice": 8}

    def test_a_race_with_the_old_code_is_rolled_back(self, shop, old):
        @shop.app.post("/between")
        @shop.names["old_keys_first"]
        @idempotent
        def between():
            if not g.cut_off:
                old.send("/orders")
            return shop.names["create_order"].__wrapped__.__wrapped__()

        assert shop.post("/between").status_code == 500
        assert shop.count("old_key") == 1
        assert shop.post("/between").json == {"ordered": 5}


class TestGoBack:
    """New code, back to the old one, and forth again, with a retry each time."""

    @pytest.mark.parametrize("path", ["/orders", "/charges", "/transfers"])
    def test_each_retry_gets_the_first_response(self, shop, old, provider, path):
        first = shop.post(path)
        answers = [old.send(path), shop.post(path)]
        assert [(answer.status_code, answer.data) for answer in answers] == [(201, first.data)] * 2
        assert old.done == []
        assert (len(provider.ledger), shop.count("payment")) == (path != "/orders", path == "/charges")

    def test_a_card_that_was_declined_stays_so(self, shop, old, provider):
        path = "/charges"
        provider.refuses = 402
        first = shop.post(path)
        provider.refuses = 0
        answers = [old.send(path), shop.post(path)]
        assert [(answer.status_code, answer.data) for answer in answers] == [(402, first.data)] * 2
        assert provider.ledger == []

    @pytest.mark.parametrize("dies", ["before", "after", "saving"])
    @pytest.mark.parametrize("cut_off", [False, True])
    def test_a_charge_that_was_cut_off_is_made_once(
        self, shop, old, provider, monkeypatch, dies, cut_off
    ):
        """``cut_off``: by the old code, before the new one was."""
        if cut_off:
            with pytest.raises(Killed):
                old.send("/charges", "after")
        self._cut_off(shop, monkeypatch, dies)
        assert old.send("/charges").status_code == 409
        old.frees = True
        payment = old.send("/charges").json
        assert payment["charge"] == "ch_0"
        end_leases(shop)
        assert [shop.post("/charges").json, old.send("/charges").json] == [payment] * 2
        assert (provider.ledger, shop.count("payment")) == (["charge-1"], 1)

    def test_an_order_that_was_cut_off_is_made(self, shop, old, monkeypatch):
        with monkeypatch.context() as patched:
            patched.setitem(shop.names, "end_row", _die)
            with pytest.raises(Killed):
                shop.post("/orders")
        assert shop.count("old_key") == 0
        assert [old.send("/orders").json, shop.post("/orders").json] == [{"ordered": 5}] * 2
        assert old.done == ["orders"]

    @pytest.mark.parametrize("dies", ["before", "after", "saving"])
    def test_without_old_rows_a_charge_still_sends_the_id_of_its_own(
        self, shop, provider, monkeypatch, dies
    ):
        self._cut_off(shop, monkeypatch, dies)
        shop.names["WRITE_OLD_ROWS"] = False
        end_leases(shop)
        answers = [shop.post("/charges") for _ in range(2)]
        assert [answer.status_code for answer in answers] == [201, 201]
        assert answers[0].data == answers[1].data
        assert (provider.ledger, shop.count("payment")) == (["charge-1"], 1)
        assert shop.post("/charges", key="key-2").status_code == 201
        assert shop.count("old_key") == 1

    def _cut_off(self, shop: Page, monkeypatch: pytest.MonkeyPatch, dies: str) -> None:
        charge_card = shop.names["charge_card"]

        def charge(*args: Any) -> Any:
            if dies == "after":
                charge_card(*args)
            raise Killed

        with monkeypatch.context() as patched:
            patched.setitem(
                shop.names, *(("end_row", _die) if dies == "saving" else ("charge_card", charge))
            )
            with pytest.raises(Killed):
                shop.post("/charges")


def _die(*_args: Any) -> Any:
    raise Killed
