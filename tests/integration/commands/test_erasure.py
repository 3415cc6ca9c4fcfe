"""``flask idempotency forget``: what is deleted before it expires."""

from __future__ import annotations

import json
import threading
from typing import Any

import click
import pytest
import redis
from flask import request

from flask_idempotency import Retryable, current_operation, idempotent
from flask_idempotency.cli import cli
from flask_idempotency.core.keys import scope_tail
from flask_idempotency.operate import erase as erasure
from flask_idempotency.operate.decide import Operator
from flask_idempotency.operate.find import Sought, scope_tails
from tests.integration.commands.running import runner
from tests.killed import Killed
from tests.stores import BOTH


class Shop:
    """Payments, and orders that are killed, given back or done as their body says."""

    def __init__(self, world: Any) -> None:
        self.world, self.run, self.calls = world, runner(world.app), list[Any]()
        world.app.post("/payments", endpoint="pay")(idempotent(self.pay))
        world.app.post("/orders", endpoint="order")(idempotent(atomic=False)(self.order))

    def pay(self) -> Any:
        self.calls.append(request.headers["X-User"])
        return {"calls": len(self.calls)}, 201

    def order(self) -> Any:
        self.calls.append(request.headers["X-User"])
        if request.get_json() == "free":
            raise Retryable
        current_operation.step("charge", lambda: 17)
        if request.get_json() == "die":
            raise Killed
        return {"calls": len(self.calls)}, 201

    def interrupt(self, user: str = "alice", key: str = "dead") -> None:
        with pytest.raises(Killed):
            self.world.post("/orders", key, user=user, json="die")

    def forget(self, *options: str) -> dict[str, int]:
        result = self.run("forget", *options, "--yes", "--json")
        (row,) = json.loads(result.output)
        assert result.exit_code == (0 if any(row.values()) else 1), "as grep's"
        return dict(row)

    def rows(self) -> int:
        """How many records there are."""
        return int(self.world.count("idempotency_record"))


@pytest.fixture
def shop(world: Any) -> Shop:
    return Shop(world)


ONLY = {"in_progress": 0, "interrupted": 0}


def test_all_of_a_scope_is_erased_and_nothing_of_another(shop):
    for user in "alice", "bob":
        for number in range(3):
            shop.world.post("/payments", f"key-{number}", user=user)
        shop.world.post("/orders", "order", user=user, json="done")
    assert shop.rows() == 8
    assert shop.forget("--scope", "alice") == {"erased": 4, **ONLY}
    assert shop.rows() == 4
    left = shop.world.records()
    assert {bytes(row.key)[-7:] for row in left} == {scope_tail("bob")}
    assert shop.forget("--scope", "alice") == {"erased": 0, **ONLY}
    assert shop.world.post("/payments", "key-0", user="bob").headers["Idempotent-Replayed"] == "true"
    assert shop.world.post("/payments", "key-0", user="alice").json == {"calls": 9}, "runs anew"


def test_one_operation_or_one_key_of_a_scope_is_erased(shop):
    for number in range(3):
        shop.world.post("/payments", f"key-{number}")
    shop.world.post("/orders", "order", json="done")
    assert shop.forget("--scope", "alice", "--operation", "order") == {"erased": 1, **ONLY}
    key = ["--key", "key-1", "--operation", "pay"]
    assert shop.forget(*key) == {"erased": 0, **ONLY}, "without its scope it is nobody's"
    assert shop.forget(*key, "--scope", "alice") == {"erased": 1, **ONLY}
    assert shop.rows() == 2
    shop.interrupt()
    dead = ["--key", "dead", "--operation", "order", "--scope", "alice"]
    assert shop.forget(*dead) == {"erased": 0, "in_progress": 0, "interrupted": 1}


def test_who_finds_nothing_is_told_what_may_be_mistyped(shop):
    shop.world.post("/payments", "key-0")
    misspelt = "no protected route is named 'pya': there are order, pay"
    no_scope = "this application has scopes: give --scope"
    for command in ("forget", "--yes"), ("list",):
        for options, hint in (
            (("--operation", "pya", "--scope", "alice"), misspelt),
            (("--operation", "pay"), no_scope),
            (("--operation", "pay", "--scope", "bob"), "scope and namespace"),
        ):
            result = shop.run(*command, "--key", "key-0", *options)
            assert result.exit_code == 1
            assert result.output.endswith(f"{hint}\n")
    result = shop.run("forget", "--yes", "--scope", "alice", "--operation", "pya")
    assert (result.exit_code, result.output) == (1, f"no record of this scope; {misspelt}\n")
    assert shop.rows() == 1


def test_a_scope_is_a_text_a_number_or_a_uuid():
    tails = [tail.hex() for tail in scope_tails("42")]
    assert tails == [scope_tail("42").hex(), scope_tail(42).hex()]


def test_what_is_in_progress_is_left_and_said(shop):
    told = list[dict[str, int]]()

    def slow() -> Any:
        told.append(shop.forget("--scope", "alice"))
        return {"slow": True}, 201

    for number, atomic in enumerate((True, False)):
        view = idempotent(atomic=atomic)(slow)
        shop.world.app.add_url_rule(f"/slow{number}", f"slow{number}", view, methods=["POST"])
    shop.interrupt()
    for number in range(2):
        shop.world.post("/orders", "free", json="free")
        assert shop.world.post(f"/slow{number}").json == {"slow": True}
        assert shop.world.post(f"/slow{number}").headers["Idempotent-Replayed"] == "true"
    rest = {"in_progress": 1, "interrupted": 1}
    assert told == [{"erased": 1, **rest}, {"erased": 2, **rest}]
    result = shop.run("forget", "--scope", "alice", "--yes")
    assert result.output == (
        "1 record erased\n1 record left, interrupted: release or resolve it, then run this again\n"
    )


def test_what_has_got_a_lease_since_it_was_counted_is_left(shop):
    shop.interrupt()
    key = bytes(shop.world.records()[0].key)
    with shop.world.app.app_context():
        store = shop.world.app.extensions["idempotency"].records.admin()
        assert store.erase([key]) == 0
    assert shop.rows() == 1


def test_it_counts_and_asks_first(shop):
    ask = shop.world.app.test_cli_runner().invoke
    shop.world.post("/payments")
    shop.interrupt()
    result = ask(cli, ["forget", "--scope", "alice"], input="n\n")
    assert (
        "1 record to erase. Retries of these requests will run again.\n1 record left" in result.output
    )
    assert (result.exit_code, shop.rows()) == (1, 2)
    assert ask(cli, ["forget", "--scope", "alice"], input="y\n").exit_code == 0
    assert shop.rows() == 1
    nobody = ask(cli, ["forget", "--scope", "nobody"])
    assert nobody.output == "no record of this scope\n", "nothing to ask"
    assert nobody.exit_code == 1


def test_the_record_of_a_key_is_shown_and_erased_only_as_it_was_shown(shop, monkeypatch):
    shop.world.post("/orders", "free", json="free")
    monkeypatch.setattr(
        click, "confirm", lambda *_, **__: shop.world.post("/orders", "free", json="free")
    )
    mine = ["forget", "--key", "free", "--operation", "order", "--scope", "alice"]
    result = shop.run(*mine)
    assert "order      released" in result.output
    assert result.output.endswith(
        "0 records erased\n"
        "1 record left, in progress, or changed since it was counted: run this again later\n"
    )
    assert (result.exit_code, shop.rows()) == (0, 1)
    monkeypatch.setattr(click, "confirm", lambda *_, **__: True)
    assert shop.run(*mine).output.endswith("1 record erased\n")
    assert shop.rows() == 0


@pytest.mark.parametrize(
    "options", [[], ["--operation", "pay"], ["--key", "a"], ["--scope", "a", "--json"]]
)
def test_it_wants_to_know_whose(shop, options):
    assert shop.run("forget", *options).exit_code == 2


def test_the_markers_in_redis_go_too(shop, redis_server):
    shop.world.post("/payments")
    client = redis.Redis.from_url(redis_server.url)
    name = f"*{scope_tail('alice').hex()}"
    assert client.keys(name)
    shop.forget("--scope", "alice")
    assert not client.keys(name)


def test_a_dead_redis_keeps_nothing_from_being_erased(make_world, caplog):
    world = make_world(IDEMPOTENCY_REDIS_URL="redis://127.0.0.1:1/0")
    shop = Shop(world)
    world.post("/payments")
    assert shop.forget("--scope", "alice") == {"erased": 1, **ONLY}
    assert "Redis failed" in caplog.text


@BOTH
def test_requests_and_erasures_of_one_scope_do_not_disturb_each_other(shop):
    """Every request succeeds, and each run has a record of its own: what runs is never erased."""
    erased, stop = [0], threading.Event()
    app, errors = shop.world.app, list[BaseException]()

    def erase() -> None:
        try:
            with app.app_context():
                state = app.extensions["idempotency"]
                while not stop.is_set():
                    found = erasure.erasable(state, Sought(scope="alice"))
                    erased[0] += erasure.erase(state, found, Operator("ann", "test"))
        except BaseException as error:
            errors.append(error)

    eraser = threading.Thread(target=erase)
    eraser.start()
    try:
        statuses = {shop.world.post("/payments", f"key-{n % 7}").status_code for n in range(150)}
    finally:
        stop.set()
        eraser.join()
    assert (statuses, errors) == ({201}, [])
    # A claim that was erased before its row was locked is made again: two records, and one run.
    assert len(shop.calls) <= erased[0] + shop.rows()


def test_many_records_are_erased_in_batches(shop, monkeypatch, caplog):
    monkeypatch.setattr(erasure, "BATCH", 2)
    for number in range(5):
        shop.world.post("/payments", f"key-{number}")
    assert shop.forget("--scope", "alice")["erased"] == 5
    erased = [line.records for line in caplog.records if getattr(line, "did", "") == "erased"]
    assert erased == [2, 2, 1], "a line for each transaction"


@pytest.mark.parametrize("text", ["0_7", "07", "+7", " 7", "\u0667"])
def test_a_scope_is_compared_as_it_is_written(text):
    """Python reads all of these as 7."""
    assert scope_tails(text) == [scope_tail(text)]
    assert scope_tail(7) in scope_tails("7")
