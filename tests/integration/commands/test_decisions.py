"""``flask idempotency release`` and ``resolve`` in detail: what is asked, stored, noted and sent."""

from __future__ import annotations

import getpass
from typing import Any

import click
import pytest
from sqlalchemy import make_url

from flask_idempotency import current_operation, idempotent
from flask_idempotency.cli import cli
from tests.drivers import EACH
from tests.integration.commands.running import build, once, runner
from tests.integration.commands.shop import Shop
from tests.killed import Killed
from tests.web.leased.records import begun, kill

WHY = "the provider has charged it"
PAID = ["--status", "201", "--body", '{"paid": true}', "--why", WHY]
RELEASE = ["release", "--why", WHY]
KEYS = ["Yj1B5nbJVnb2nFHwpIlN8qn-_2XxXh6m0l0ZkJ3W7xE"]


@pytest.fixture(scope="module")
def store() -> str:
    return "sql"


@pytest.fixture
def order(shop: Shop) -> str:
    """The digits of an operation that was interrupted after a step."""
    return shop.begun("order")


def ask(shop: Shop, *arguments: str, **options: Any) -> Any:
    return shop.app.test_cli_runner().invoke(cli, ["resolve", *arguments], **options)


def test_it_asks_first_and_shows_what_it_asks_about(shop, order):
    result = ask(shop, order, *PAID, input="n\n")
    assert result.exit_code == 1
    for part in (order, "interrupted", "charge", "HTTP 201 CREATED", '{"paid": true}', "Store it?"):
        assert part in result.output
    assert shop.show(order)["state"] == "interrupted"
    assert ask(shop, order, *PAID, input="y\n").exit_code == 0
    response = shop.post("order")
    assert (response.status_code, response.data) == (201, b'{"paid": true}')
    result = ask(shop, order, *PAID)
    assert (result.exit_code, "is completed: only what is" in result.output) == (1, True)
    assert "Store it?" not in result.output, "what cannot be decided is refused before it is asked"


@pytest.mark.parametrize(("status", "asks"), [("200", True), ("503", True), ("204", False)])
def test_it_asks_before_it_stores_an_empty_response(shop, order, status, asks):
    options = [order, "--status", status, "--why", "found"]
    result = ask(shop, *options, input="n\n")
    assert (f"an empty {status}" in result.output, result.exit_code) == (asks, 1)
    assert shop.show(order)["state"] == "interrupted"
    (line,) = shop.rows("resolve", *options, "--yes")
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
    """No retry could open it. With other keys than the application's, a step's result says so."""
    uri = shop.app.config["SQLALCHEMY_DATABASE_URI"]

    def with_keys(keys: list[str]) -> Shop:
        return Shop(shop.store, tmp_path, "", uri, IDEMPOTENCY_ENCRYPTION_KEYS=keys)

    sealed, others = with_keys(KEYS), with_keys(["A" * 43])
    key = sealed.begun("order")
    (step,) = sealed.show(key)["steps"]
    assert "canary-answer" in step["result"]
    result = shop.run("show", key, "--json")
    assert '"result": null' in result.stdout
    assert "IDEMPOTENCY_ENCRYPTION_KEYS is empty" in result.stderr
    output = shop.run("show", key).output
    assert ("canary" in output, step["derived_key"] in output) == (False, True)
    for command in ["resolve", *PAID, "--yes"], [*RELEASE, "--fail"]:
        result = shop.run(*command, key)
        assert (result.exit_code, "IDEMPOTENCY_ENCRYPTION_KEYS is empty here" in result.output) == (
            1,
            True,
        )
    assert sealed.show(key)["state"] == "interrupted"
    assert shop.run(*RELEASE, key).exit_code == 0, "stores no response"
    assert sealed.run("resolve", key, *PAID, "--yes").exit_code == 0
    assert sealed.post("order").json == {"paid": True}
    key = sealed.begun("order", "key-2")
    assert "a step's result cannot be read" in others.run("show", key).output
    assert "cannot be read" not in sealed.run("show", key).output
    assert others.run("resolve", key, *PAID, "--yes").exit_code == 0
    assert sealed.post("order", "key-2").status_code == 500
    for each in sealed, others:
        each.close()


class TestOnPostgres:
    """What only its clock, its locks and its connections show."""

    @pytest.fixture
    def store(self) -> str:
        return "hybrid"

    @pytest.fixture
    def shop(self, world: Any) -> Any:
        return OnWorld(world)

    def test_what_was_released_is_open_as_long_as_a_provider_knows_its_key(self, shop, assert_problem):
        """Counted from the first call. What is older needs a look into the provider's books."""
        key, world = shop.begun(), shop.world
        assert shop.run(*RELEASE, key).exit_code == 0
        begun(world, "25 hours")
        world.sql("update idempotency_record set completed_at = now() - interval '2 hours'")
        assert_problem(world.post(), 409, "operation-interrupted")
        result = shop.run(*RELEASE, key)
        assert result.exit_code == 1
        assert f"{key} began 1 d 1 h ago, and its ttl is 1 d" in result.output
        assert "say so (--not-done); otherwise do the rest by hand, and resolve" in result.output
        shown = " ".join(shop.run("show", key).output.split())
        assert "say so (--not-done)" in shown, "a plain release would be refused"
        assert "recognises the key" not in shown
        assert_problem(world.post(), 409, "operation-interrupted")
        assert shop.run(*RELEASE, key, "--not-done").exit_code == 0
        begun(world, "25 hours")
        assert_problem(world.post(), 409, "operation-interrupted")
        assert shop.run(*RELEASE, "--fail", key).exit_code == 0, "it may be failed, however old it is"
        assert world.post().status_code == 500
        assert shop.run(*RELEASE, key, "--not-done").exit_code == 0
        assert world.post().json == {"attempt": 2}

    def test_what_was_released_waits_until_it_has_ended(self, shop):
        """A decision is not the end: if the client never comes back, somebody must hear of it."""
        key, past = shop.begun(), "now() - interval '2 days'"
        assert shop.run(*RELEASE, "--not-done", key).exit_code == 0
        shop.world.sql(f"update idempotency_record set expires_at = {past}, lease_expires_at = {past}")
        assert shop.run("purge").output == "0 expired records deleted\n"
        assert "interrupted" in shop.run("list").output
        assert shop.world.post().json == {"attempt": 2}

    def test_who_has_not_seen_the_last_renewal_decides_nothing(self, shop, monkeypatch):
        """The worker was alive after all, went on, and was killed only then."""
        key, world = shop.begun(), shop.world
        renew = "update idempotency_record set lease_expires_at = lease_expires_at + '1 ms'"
        monkeypatch.setattr(click, "confirm", lambda *_, **__: world.sql(renew))
        result = shop.run("resolve", key, *PAID)
        assert result.exit_code == 1
        assert (
            f"{key} is interrupted now, in attempt 1. That is not what you have seen" in result.output
        )

    def test_what_somebody_works_on_is_left_alone(self, shop, caplog):
        key = shop.begun()
        with shop.world.app.app_context(), shop.world.db.engine.begin() as other:
            other.exec_driver_sql("select 1 from idempotency_record for update")
            result = shop.run("resolve", key, *PAID, "--yes")
        assert (result.exit_code, f"{key} was in use just now" in result.output) == (1, True)
        assert "operator resolved" not in caplog.text
        assert shop.run("resolve", key, *PAID, "--yes").exit_code == 0

    @EACH
    @pytest.mark.parametrize(("usual", "used"), [("off", "on"), ("remote_apply", "remote_apply")])
    def test_a_decision_waits_for_the_disk(self, shop, usual, used):
        key, sql = shop.begun(), shop.world.sql
        sql("create table commits as select '' as how where false")
        insert = "insert into commits select current_setting('synchronous_commit'); return new;"
        sql(f"create function note() returns trigger language plpgsql as $$ begin {insert} end $$")
        sql("create trigger note before update on idempotency_record"
            " for each row execute function note()")  # fmt: skip
        uri = shop.world.app.config["SQLALCHEMY_DATABASE_URI"]
        sql(f"alter database {make_url(uri).database} set synchronous_commit = {usual}")
        result = once(build(uri), "resolve", key, *PAID, "--yes")
        assert (result.exit_code, sql("select how from commits")) == (0, [(used,)])


class OnWorld:
    """An order that is not atomic, on the usual world, whose database a test may change."""

    def __init__(self, world: Any) -> None:
        self.world, self.run = world, runner(world.app)
        world.app.post("/payments", endpoint="order")(idempotent(atomic=False)(self.order))

    def order(self) -> Any:
        current_operation.step("charge", lambda: 17)
        if current_operation.attempt == 1:
            raise Killed
        return {"attempt": current_operation.attempt}, 201

    def begun(self) -> str:
        """The digits of an order that was killed."""
        kill(self.world)
        return str(self.world.records()[0].key[:4].hex())
