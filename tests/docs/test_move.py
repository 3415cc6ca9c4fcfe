"""``own-keys.md``: what the old code left in its table, and what ours leaves. Charges are counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask import g

from flask_idempotency import idempotent
from tests.docs.how_to import Page
from tests.docs.pages import RECIPES, ROOT, apps, blocks
from tests.killed import Killed

OLD_BODY = '{"id": "of the old code"}'
PATHS = ("/orders", "/charges", "/transfers")


@pytest.fixture
def shop(page, names, provider) -> Page:
    view = apps(ROOT / "docs/other-services.md")[""][0]  # it has charge_card and save_payment
    exec(compile(view.source, view.name, "exec"), names)  # noqa: S102
    return page("own-keys.md")


def old_row(shop: Page, status: str = "NULL", body: str = OLD_BODY, key: str = "key-1") -> None:
    """Insert what the old code commits first: a row without a status; or what it leaves at its end."""
    columns = "account_id, key, status, body"
    shop.sql(f"INSERT INTO old_key ({columns}) VALUES ('alice', '{key}', {status}, '{body}')")


def old_rows(shop: Page) -> list[Any]:
    return shop.sql("SELECT status, body FROM old_key")


def cut_off(shop: Page, monkeypatch: pytest.MonkeyPatch, path: str, dies: str) -> None:
    """Send a request to our code, which dies before or after the charge, or at the old row."""

    def die(*_args: Any) -> Any:
        raise Killed

    charge_card = shop.names["charge_card"]
    changed = {
        "before": ("charge_card", die),
        "after": ("charge_card", lambda *args: die(charge_card(*args))),
        "saving": ("end_row", die),
    }
    with monkeypatch.context() as patched:
        patched.setitem(shop.names, *changed[dies])
        with pytest.raises(Killed):
            shop.post(path)


def test_the_query_finds_keys_that_are_refused(shop):
    refused = ["k 1", "a,b", "a;b", "größe", "x" * 256]
    for key in [*refused, "k-1", '"k 1, k"', "x" * 255]:
        old_row(shop, key=key)
    [query] = blocks(RECIPES / "own-keys.md", "postgres")
    assert {key for _, key in shop.sql(query.text.replace(":", "\\:"))} == set(refused)


@pytest.mark.parametrize("path", PATHS)
def test_a_key_that_the_old_code_finished_gets_its_response(shop, provider, path):
    old_row(shop, "201")
    answers = [shop.post(path) for _ in range(2)]
    assert [(each.status_code, each.text) for each in answers] == [(201, OLD_BODY)] * 2
    assert [each.headers["Idempotent-Replayed"] for each in answers] == ["true"] * 2
    assert (provider.ledger, shop.count("payment")) == ([], 0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("refuses", [0, 402])
def test_the_old_code_would_find_our_response_in_its_table(shop, provider, path, refuses):
    provider.refuses = refuses
    first = shop.post(path)
    assert first.status_code == (402 if refuses and path != "/orders" else 201)
    assert old_rows(shop) == [(first.status_code, first.text)]
    assert shop.post(path).data == first.data
    assert len(provider.ledger) == (path != "/orders" and not refuses)


@pytest.mark.parametrize("charged", [False, True])
def test_a_charge_that_the_old_code_began_is_made_once(shop, provider, charged):
    old_row(shop)
    provider.ledger += ["charge-1"] * charged  # the old code sent the row's id
    answers = [shop.post("/charges") for _ in range(2)]
    assert [answer.json for answer in answers] == [{"charge": "ch_0", "id": 1}] * 2
    assert answers[1].headers["Idempotent-Replayed"] == "true"
    assert (provider.ledger, shop.count("payment")) == (["charge-1"], 1)
    assert old_rows(shop) == [(201, answers[0].text)]


@pytest.mark.parametrize("charged", [False, True])
def test_where_nobody_knows_an_operator_decides(shop, provider, charged):
    old_row(shop)
    provider.ledger += ["the provider ignores it"] * charged
    assert shop.post("/transfers").json["type"].endswith("operation-interrupted")
    digits = shop.run_command("list", "--state", "interrupted").splitlines()[1].split()[0]
    resolve = ["resolve", "--status=201", "--yes", "--body", '{"transfer": "ch_0"}']
    shop.run_command(*(resolve if charged else ["release"]), "--why", "the provider was asked", digits)
    assert shop.post("/transfers").json == {"transfer": "ch_0"}
    assert len(provider.ledger) == 1


def test_a_task_of_the_old_code_is_not_done_again(shop):
    old_row(shop, "200", '{"invoice": 7}', "order-7")
    with shop.app.app_context():
        done = [shop.names["invoice"]("alice", order)["invoice"] for order in (7, 8, 8)]
    assert (done, shop.count("idempotency_record")) == ([7, 8, 8], 1)
    assert json.loads(old_rows(shop)[1][1]) == {"invoice": 8}


def test_a_race_with_the_old_code_is_rolled_back(shop):
    @shop.app.post("/between")
    @shop.names["old_keys_first"]
    @idempotent
    def between():
        assert g.cut_off is None
        old_row(shop, "201")
        return shop.names["create_order"].__wrapped__.__wrapped__()

    assert [shop.post("/between").status_code for _ in range(2)] == [500, 201]
    assert old_rows(shop) == [(201, OLD_BODY)]


@pytest.mark.parametrize("dies", ["before", "after", "saving"])
@pytest.mark.parametrize("began", ["ours", "old"])
@pytest.mark.parametrize("ends", ["ours", "old", "without old rows"])
def test_a_charge_that_we_were_cut_off_at_is_made_once(shop, provider, monkeypatch, dies, began, ends):
    if began == "old":
        old_row(shop)
    cut_off(shop, monkeypatch, "/charges", dies)
    assert shop.sql("SELECT id, status FROM old_key") == [(1, None)]
    if ends == "old":  # freed there, it sends the row's id, which the provider knows
        shop.names["charge_card"](5, "charge-1")
        shop.sql(f"UPDATE old_key SET status = 201, body = '{OLD_BODY}'")
    shop.names["WRITE_OLD_ROWS"] = ends != "without old rows"
    shop.sql("UPDATE idempotency_record SET lease_expires_at = clock_timestamp()")
    answers = [shop.post("/charges") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[0].data == answers[1].data
    assert (answers[0].text == OLD_BODY) is (ends == "old")
    assert (provider.ledger, shop.count("payment")) == (["charge-1"], ends != "old")


def test_an_order_that_we_were_cut_off_at_leaves_nothing(shop, monkeypatch):
    cut_off(shop, monkeypatch, "/orders", "saving")
    assert old_rows(shop) == []
    assert [shop.post("/orders").json for _ in range(2)] == [{"ordered": 5}] * 2
