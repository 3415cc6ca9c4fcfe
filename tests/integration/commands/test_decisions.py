"""``flask idempotency release`` and ``resolve`` in detail: what is asked, stored, noted and sent.

In which states they are refused: the grid of ``test_states_and_verbs.py``.
"""

from __future__ import annotations

import getpass

import pytest

from tests.integration.commands.running import APART, runner
from tests.integration.commands.shop import Shop

WHY = "the provider has charged it"
PAID = ["--status", "201", "--body", '{"paid": true}', "--why", WHY]
RELEASE = ["release", "--why", WHY]


@pytest.fixture(scope="module")
def store() -> str:
    return "sql"


@pytest.fixture
def order(shop: Shop) -> str:
    """The digits of an operation that was interrupted after a step."""
    return shop.begun("order")


def test_it_asks_first_and_shows_what_it_asks_about(shop, order):
    result = shop.run("resolve", order, *PAID, input="n\n")
    assert result.exit_code == 1
    for part in (order, "interrupted", "charge", "HTTP 201 CREATED", '{"paid": true}', "Store it?"):
        assert part in result.output
    assert shop.show(order)["state"] == "interrupted"
    assert shop.run("resolve", order, *PAID, input="y\n").exit_code == 0
    response = shop.post("order")
    assert (response.status_code, response.data) == (201, b'{"paid": true}')
    result = shop.run("resolve", order, *PAID)
    assert (result.exit_code, "is completed: only what is" in result.output) == (1, True)
    assert "Store it?" not in result.output, "what cannot be decided is refused before it is asked"


@pytest.mark.parametrize(("status", "asks"), [("200", True), ("503", True), ("204", False)])
def test_it_asks_before_it_stores_an_empty_response(shop, order, status, asks):
    options = ["resolve", order, "--status", status, "--why", "found"]
    result = shop.run(*options, input="n\n")
    assert (f"an empty {status}" in result.output, result.exit_code) == (asks, 1)
    assert shop.show(order)["state"] == "interrupted"
    (line,) = shop.rows(*options, "--yes")
    assert (line["key"], line["state"]) == (order, "failed" if status == "503" else "completed")
    assert (shop.post("order").status_code, shop.post("order").data) == (int(status), b"")


@pytest.mark.parametrize(
    ("options", "given", "headers"),
    [
        (
            ["--body={}", "--header=Location: /orders/1", "--header=X-Two: a", "--header=X-Two: b"],
            b"{}",
            {"Location": ["/orders/1"], "X-Two": ["a", "b"], "Content-Type": ["application/json"]},
        ),
        (["--body=-", "--content-type=image/x"], b"\x00\xff", {"Content-Type": ["image/x"]}),
        (
            ["--body=paid", "--header=content-type: text/plain"],
            b"paid",
            {"Content-Type": ["text/plain"]},
        ),
    ],
)
def test_a_response_is_stored_as_it_is_given(shop, order, options, given, headers):
    resolve = ["resolve", order, "--status=200", f"--why={WHY}", "--yes"]
    assert shop.run(*resolve, *options, input=given).exit_code == 0
    response = shop.post("order")
    assert response.data == given
    assert {name: response.headers.getlist(name) for name in headers} == headers


@pytest.mark.parametrize(
    ("by", "noted"),
    [
        ("ann\nERROR forged\r\x1b[2J\u2028\u202e\0", "ann ERROR forged  [2J"),
        ("ann \udcff", "ann"),
        (" \n", getpass.getuser()),
        ("\u3164\u0301", getpass.getuser()),
    ],
)
def test_a_name_is_one_line_that_can_be_seen(shop, order, by, noted):
    assert shop.run("release", "--why=asked\0", order, "--by", by).exit_code == 0
    assert [(each["by"], each["why"]) for each in shop.show(order)["audit"]] == [(noted, "asked")]
    assert f"{noted}  released  asked" in shop.run("show", order).output


def test_a_later_life_of_the_key_has_no_decisions(shop, order):
    shop.run("resolve", order, *PAID, "--yes")
    shop.sql("update idempotency_record set expires_at = '2000-01-01 00:00:00.000'")
    shop.post("order")
    assert (shop.show(order)["state"], shop.show(order)["audit"]) == ("interrupted", [])


def test_what_is_given_is_sealed_and_without_the_keys_nothing_is_stored(shop, tmp_path):
    """No retry could open it. A result of a step that cannot be read says why."""
    uri = shop.app.config["SQLALCHEMY_DATABASE_URI"]
    sealed = Shop(shop.store, tmp_path, "", uri, IDEMPOTENCY_ENCRYPTION_KEYS=["A" * 43])
    key = sealed.begun("order")
    (step,) = sealed.show(key)["steps"]
    assert "canary-answer" in step["result"]
    result = runner(shop.app, **APART)("show", key, "--json")
    assert '"result": null' in result.stdout
    assert "a step's result cannot be read: What is stored is sealed" in result.stderr
    output = shop.run("show", key).output
    assert ("canary" in output, step["derived_key"] in output) == (False, True)
    for command in ["resolve", *PAID, "--yes"], [*RELEASE, "--fail"]:
        result = shop.run(*command, key)
        assert result.exit_code == 1
        assert "IDEMPOTENCY_ENCRYPTION_KEYS is empty here" in result.output
    assert sealed.show(key)["state"] == "interrupted"
    assert shop.run(*RELEASE, key).exit_code == 0, "stores no response"
    assert sealed.run("resolve", key, *PAID, "--yes").exit_code == 0
    assert sealed.post("order").json == {"paid": True}
    sealed.close()
