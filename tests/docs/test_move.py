"""``own-keys.md``: what the old code left in its table, and what ours leaves. Charges are counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask import g

from flask_idempotency import idempotent
from tests.docs.how_to import Page
from tests.docs.pages import RECIPES, ROOT, apps, blocks

OLD_BODY = '{"id": "of the old code"}'
DYING = {"before": ("charge_card",), "after": ("charge_card", True), "saving": ("end_row",)}
PATHS = ("/orders", "/charges", "/transfers")


@pytest.fixture
def shop(page, names, provider) -> Page:
    view = apps(ROOT / "docs/other-services.md")[""][0]  # it has charge_card and save_payment
    exec(compile(view.source, view.name, "exec"), names)  # noqa: S102
    return page("own-keys.md")


def old_row(shop: Page, status: str = "NULL", body: str = OLD_BODY, key: str = "key-1") -> None:
    """Insert what the old code commits first: a row without a status; or what it leaves at its end."""
    values = f"('alice', '{key}', {status}, '{body}')"
    shop.sql(f"INSERT INTO old_key (account_id, key, status, body) VALUES {values}")


def old_rows(shop: Page) -> list[Any]:
    return shop.sql("SELECT status, body FROM old_key")


def test_the_query_finds_keys_that_are_refused(shop):
    refused = ["k 1", "a,b", "a;b", "größe", "x" * 256]
    for key in [*refused, "k-1", '"k 1, k"', "x" * 255]:
        old_row(shop, key=key)
    [query] = blocks(RECIPES / "own-keys.md", "postgres")
    assert {key for _, key in shop.sql(query.text.replace(":", "\\:"))} == set(refused)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("old", "refuses", "status"), [("201", 0, 201), (None, 0, 201), (None, 402, 402)]
)
def test_either_code_gets_the_response_of_the_other(shop, provider, path, old, refuses, status):
    if old:
        old_row(shop, old)
    provider.refuses = 0 if path == "/orders" else refuses
    first, again = [shop.post(path) for _ in range(2)]
    assert first.status_code == (201 if path == "/orders" else status)
    assert old_rows(shop) == [(first.status_code, first.text)]
    assert (again.data, again.headers["Idempotent-Replayed"]) == (first.data, "true")
    assert first.text == OLD_BODY or not old
    assert len(provider.ledger) == (not old and not provider.refuses and path != "/orders")


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


@pytest.mark.parametrize(
    ("dies", "began", "ends"),
    [
        ("before", "ours", "ours"),
        ("after", "ours", "ours"),
        ("saving", "ours", "old"),
        ("after", "old", "ours"),
        ("saving", "old", "old"),
        ("before", "old", "without old rows"),
        ("saving", "ours", "without old rows"),
        (None, "old", "ours"),
        (None, "old, and charged", "ours"),
    ],
)
def test_a_charge_that_either_code_was_cut_off_at_is_made_once(shop, provider, dies, began, ends):
    if began != "ours":
        old_row(shop)
        provider.ledger += ["charge-1"] * ("charged" in began)  # it sent the row's id
    if dies is not None:
        shop.die("/charges", *DYING[dies])
    assert shop.sql("SELECT id, status FROM old_key") == [(1, None)]
    if ends == "old":  # freed there, it sends the row's id, which the provider knows
        shop.names["charge_card"](5, "charge-1")
        shop.sql(f"UPDATE old_key SET status = 201, body = '{OLD_BODY}'")
    shop.names["WRITE_OLD_ROWS"] = ends != "without old rows"
    answers = [shop.post("/charges") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[0].data == answers[1].data
    assert (answers[0].text == OLD_BODY) is (ends == "old")
    assert (provider.ledger, shop.count("payment")) == (["charge-1"], ends != "old")


def test_an_order_that_we_were_cut_off_at_leaves_nothing(shop):
    shop.die("/orders", *DYING["saving"])
    assert old_rows(shop) == []
    assert [shop.post("/orders").json for _ in range(2)] == [{"ordered": 5}] * 2
