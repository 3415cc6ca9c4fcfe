"""What `show` and `resolve` say before an operator decides: steps, their keys and results, advice."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

import pytest
from flask import g, request

from flask_idempotency import current_operation, idempotent
from flask_idempotency.cli import cli
from tests.integration.commands.running import runner
from tests.killed import Killed
from tests.web.leased.records import forge

KEYS = ["Yj1B5nbJVnb2nFHwpIlN8qn-_2XxXh6m0l0ZkJ3W7xE"]
PAID = ["--status", "201", "--body", '{"paid": true}', "--why", "the provider has it"]


class Shop:
    """A view that charges in one step and saves in the next; it is killed where a test says."""

    def __init__(self, world: Any) -> None:
        self.world, self.run = world, runner(world.app)
        self.charged, self.dies = list[str](), "before saving"
        world.app.post("/payments", endpoint="pay")(idempotent(atomic=False)(self.pay))

    def charge(self, key: str) -> Any:
        self.charged.append(key)
        if self.dies == "in the charge":
            raise Killed
        return {"charge": "ch_17", "card": "canary-card"}

    def save(self) -> None:
        self.world.db.session.add(self.world.Payment(amount=5))
        self.world.db.session.commit()

    def pay(self) -> Any:
        operation = current_operation
        operation.step("charge", self.charge, operation.derive_key("charge"))
        if self.dies == "before saving":
            raise Killed
        operation.step("save", self.save, atomic=True)
        return {"paid": True}, 201

    def interrupt(self, key: str = "key-1", user: str = "alice") -> str:
        with pytest.raises(Killed):
            self.world.post("/payments", key, user=user)
        return str(json.loads(self.run("list", "--json").output)[0]["key"])

    def show(self, *arguments: str) -> Any:
        (line,) = json.loads(self.run("show", *arguments, "--json").stdout)
        return line

    def rows(self) -> int:
        return int(self.world.count("payment"))


@pytest.fixture
def shop(world: Any) -> Shop:
    return Shop(world)


def words(text: str) -> str:
    return " ".join(text.split())


def test_what_is_advised_where_the_step_is_listed_loses_no_write_of_the_shop(shop):
    """The service has done it, and `show` lists the step: released, the view saves its row, too."""
    digits = shop.interrupt()
    said = words(shop.run("show", digits).output)
    assert "Finished: charge." in said
    assert "Release it" in said.partition("Finished: charge.")[2].partition("Resolve it")[0]
    assert "it will not do what comes after charge" in said.partition("Resolve it")[2]
    assert shop.run("release", "--why=asked", digits).exit_code == 0
    shop.dies = ""
    assert shop.world.post("/payments").status_code == 201
    assert (len(shop.charged), shop.rows()) == (1, 1)


def test_where_no_step_is_listed_the_advice_is_about_the_service(shop):
    shop.dies = "in the charge"
    said = words(shop.run("show", shop.interrupt()).output)
    assert "No step has finished" in said
    assert "recognises its key" in said.partition("Release it")[2].partition("Resolve it")[0]
    assert "by hand" in said.partition("Resolve it")[2]


@pytest.mark.parametrize("step", ["none has finished", "charge"])
def test_what_the_view_saves_outside_a_step_is_to_be_looked_at_before_a_release(world, step):
    """Killed after its own commit: the service deduplicates, the application's rows do not."""

    class Unstepped(Shop):
        def pay(self) -> Any:
            if step == "charge":
                current_operation.step("charge", self.charge, current_operation.derive_key("charge"))
            self.save()
            if self.dies:
                raise Killed
            return {"paid": True}, 201

    shop = Unstepped(world)
    digits = shop.interrupt()
    said = words(shop.run("show", digits).output)
    advice = said.partition("Release it")[2].partition("Resolve it")[0]
    assert "Look at your own rows first" in advice
    assert "saved outside a step, it saves again" in advice
    assert shop.run("release", "--why=asked", digits).exit_code == 0
    shop.dies = ""
    assert shop.world.post("/payments").status_code == 201
    assert shop.rows() == 2, "as the advice says"


def test_the_question_of_resolve_says_which_of_the_two(shop):
    digits = shop.interrupt()
    ask = shop.world.app.test_cli_runner().invoke
    output = ask(cli, ["resolve", digits, *PAID], input="n\n").output
    before = words(output.partition("Store it?")[0])
    assert "Release it" in before
    assert "it will not do what comes after charge" in before


def test_nothing_is_advised_where_nothing_is_to_be_decided(shop):
    shop.dies = ""
    assert shop.world.post("/payments").status_code == 201
    digits = json.loads(shop.run("list", "--json").output)[0]["key"]
    assert "Resolve" not in shop.run("show", digits).output


@pytest.mark.parametrize(("status", "asks"), [("200", True), ("500", True), ("204", False)])
def test_resolve_asks_before_it_stores_an_empty_response(shop, status, asks):
    digits = shop.interrupt()
    ask = shop.world.app.test_cli_runner().invoke
    options = ["resolve", digits, "--status", status, "--why", "found"]
    result = ask(cli, options, input="n\n")
    assert (f"an empty {status}" in result.output, result.exit_code) == (asks, 1)
    assert shop.show(digits)["state"] == "interrupted"
    assert shop.run(*options, "--yes").exit_code == 0
    assert shop.world.post("/payments").data == b""


def test_show_has_the_keys_that_the_other_service_got(shop):
    digits = shop.interrupt()
    (step,) = shop.show(digits)["steps"]
    assert [step["derived_key"]] == shop.charged
    assert shop.charged[0] in shop.run("show", digits).output


def test_a_key_is_derived_for_a_name_that_no_step_has(shop):
    """The step that was cut off is not stored, and a name need not be a step's."""
    shop.dies = "in the charge"
    digits = shop.interrupt()
    assert shop.show(digits)["steps"] == []
    shown = shop.show(digits, "--derive", "charge", "--derive", "refund")
    assert shown["derived"][0] == {"name": "charge", "derived_key": shop.charged[0]}
    assert [each["name"] for each in shown["derived"]] == ["charge", "refund"]
    assert f"charge {shop.charged[0]}" in words(shop.run("show", digits, "--derive", "charge").output)


def test_show_has_the_results_of_finished_steps(shop):
    digits = shop.interrupt()
    (step,) = shop.show(digits)["steps"]
    assert json.loads(step["result"]) == {"charge": "ch_17", "card": "canary-card"}
    assert '"ch_17"' in shop.run("show", digits).output


def test_a_long_result_is_cut_in_the_table_alone(shop):
    digits = shop.interrupt()
    forge(shop.world, "a" * 5000)
    assert shop.show(digits)["steps"][0]["result"] == "a" * 5000
    assert max(map(len, shop.run("show", digits).output.splitlines())) < 250


def test_sealed_results_need_the_keys(make_world):
    shop = Shop(make_world(IDEMPOTENCY_ENCRYPTION_KEYS=KEYS))
    digits = shop.interrupt()
    assert "ch_17" in shop.show(digits)["steps"][0]["result"]
    same = shop.world.app.config["SQLALCHEMY_DATABASE_URI"]
    keyless = runner(make_world(SQLALCHEMY_DATABASE_URI=same).app)
    result = keyless("show", digits, "--json")
    assert json.loads(result.stdout)[0]["steps"][0]["result"] is None
    assert "IDEMPOTENCY_ENCRYPTION_KEYS is empty" in result.stderr
    assert "canary" not in keyless("show", digits).output
    (key,) = shop.charged
    assert key in keyless("show", digits).output, "a derived key needs none"


def test_a_step_tells_whether_a_shell_has_the_keys(make_world):
    """With other keys than the application's, what `resolve` stores cannot be opened."""
    shop = Shop(make_world(IDEMPOTENCY_ENCRYPTION_KEYS=KEYS))
    digits = shop.interrupt()
    same = shop.world.app.config["SQLALCHEMY_DATABASE_URI"]
    others = ["A" * 43]
    shell = runner(make_world(SQLALCHEMY_DATABASE_URI=same, IDEMPOTENCY_ENCRYPTION_KEYS=others).app)
    assert "a step's result cannot be read" in shell("show", digits).output
    assert "cannot be read" not in shop.run("show", digits).output
    assert shell("resolve", digits, *PAID, "--yes").exit_code == 0
    assert shop.world.post("/payments").status_code == 500


class TestRetention:
    """How long a record is kept after an operator's decision."""

    @pytest.mark.parametrize(("ttl", "hours"), [(3600, 24), (48 * 3600, 48)])
    def test_it_is_the_later_of_the_setting_and_what_the_record_had(self, world, ttl, hours):
        @world.app.post("/charges")
        @idempotent(atomic=False, ttl=ttl)
        def charge():
            raise Killed

        with pytest.raises(Killed):
            world.post("/charges")
        run = runner(world.app)
        (line,) = json.loads(run("list", "--json").output)
        assert run("resolve", line["key"], *PAID, "--yes").exit_code == 0
        ((left,),) = world.sql(
            "select extract(epoch from expires_at - created_at) / 3600 from idempotency_record"
        )
        assert round(float(left), 1) == hours


def test_times_have_milliseconds_and_their_zone(shop):
    digits = shop.interrupt()
    shown = shop.show(digits)
    ((created,),) = shop.world.sql("select created_at from idempotency_record")
    read = datetime.fromisoformat(shown["created"].replace("Z", "+00:00"))
    assert 0 <= (created - read).total_seconds() < 0.001
    pattern = r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(pattern, shown["steps"][0]["finished"])
    assert len(re.findall(pattern, shop.run("show", digits).output)) >= 2


class TestOfScope:
    """`list --scope` finds what `forget --scope` erases."""

    @pytest.fixture
    def scopes(self, world: Any) -> Any:
        """Sends a request of whatever scope one gives: a text, or a number."""
        world.app.post("/payments", endpoint="pay")(
            idempotent(scope=lambda: g.get("whose") or request.headers["X-User"])(dict)
        )

        def number() -> None:
            if request.headers["X-User"].startswith("n"):
                g.whose = int(request.headers["X-User"][1:])

        world.app.before_request(number)
        return lambda key, whose: world.post("/payments", key, user=whose)

    def listed(self, run: Any, *options: str, code: int = 0) -> list[str]:
        result = run("list", "--json", *options)
        assert result.exit_code == code, result.output
        return [line["key"] for line in json.loads(result.stdout)]

    def test_it_lists_what_forget_erases(self, scopes, run, world):
        for key, whose in ("a", "42"), ("b", "n42"), ("c", "42"), ("d", "bob"):
            scopes(key, whose)
        digits = {bytes(row.key).hex()[:8] for row in world.records() if row != world.records()[3]}
        found = self.listed(run, "--scope", "42")
        assert (set(found), len(found)) == (digits, 3), "a text and a number"
        newest_first = [line["created"] for line in json.loads(run("list", "--json").stdout)]
        assert newest_first == sorted(newest_first, reverse=True)
        assert self.listed(run, "--scope", "42", "--limit", "1") == found[:1]
        assert self.listed(run, "--scope", "42", "--operation", "pay") == found
        assert self.listed(run, "--scope", "42", "--operation", "other", code=1) == []
        assert self.listed(run, "--scope", "42", "--state", "failed", code=1) == []
        assert run("list", "--scope", "nobody").output == "no record of this scope\n"
        assert json.loads(run("forget", "--scope", "42", "--yes", "--json").output)[0]["erased"] == 3
        assert self.listed(run, "--scope", "42", code=1) == []
        assert len(self.listed(run, "--scope", "bob")) == 1

    def test_it_lists_what_forget_has_to_leave(self, shop):
        digits = shop.interrupt(user="alice")
        assert self.listed(shop.run, "--scope", "alice") == [digits]
        assert self.listed(shop.run, "--scope", "alice", "--state", "interrupted") == [digits]

    def test_a_namespace_needs_a_key(self, run):
        assert run("list", "--namespace", "v2", "--scope", "alice").exit_code == 1
