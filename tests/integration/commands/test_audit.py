"""Who did what to a record is in the store, whatever the loggers' levels are, and in the log."""

from __future__ import annotations

import getpass
import json
from collections.abc import Iterator
from typing import Any

import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency, idempotent
from flask_idempotency.core.keys import scope_tail
from flask_idempotency.stores import admin
from tests.integration.commands.running import runner
from tests.killed import Killed


class Shop:
    """Three stores with a view, each without a line in any log."""

    def __init__(self, store: str, folder: Any, url: str, redis_url: str) -> None:
        self.app = Flask("shop")
        self.app.config.update(
            SQLALCHEMY_DATABASE_URI=url if store == "postgres" else f"sqlite:///{folder}/shop.db",
            IDEMPOTENCY_STORE=store,
            IDEMPOTENCY_REDIS_PREFIX=f"{folder.name}:",
        )
        if store == "redis":
            self.app.config["IDEMPOTENCY_REDIS_URL"] = redis_url
        self.db = SQLAlchemy(self.app)
        Idempotency(self.app, self.db, scope=lambda: "user-7")
        for name in "pay", "refund":
            view = idempotent(atomic=False)(lambda: ({"a": 1}, 201))
            self.app.post(f"/{name}", endpoint=name)(view)
        self.app.post("/die", endpoint="die")(idempotent(atomic=False)(self.die))
        self.run = runner(self.app)
        with self.app.app_context():
            self.db.create_all()

    def die(self) -> None:
        raise Killed

    def post(self, key: str, path: str = "/pay") -> Any:
        return self.app.test_client().post(path, json={}, headers={"Idempotency-Key": key})

    def listed(self, *options: str) -> Any:
        return json.loads(self.run("list", "--json", *options).stdout)

    def audit(self, digits: str) -> Any:
        (line,) = json.loads(self.run("show", digits, "--json").stdout)
        return [(each["by"], each["did"], each["why"]) for each in line["audit"]]


@pytest.fixture(params=["postgres", "sql", "redis"])
def shop(
    request: pytest.FixtureRequest, tmp_path: Any, postgres: Any, redis_server: Any
) -> Iterator[Shop]:
    shop = Shop(request.param, tmp_path, postgres.database("audit"), redis_server.url)
    yield shop
    with shop.app.app_context():
        shop.db.engine.dispose()


def test_of_what_was_erased_one_row_says_who_and_when_and_nothing_of_it(shop, caplog):
    for number in range(3):
        assert shop.post(f"key-{number}").status_code == 201
    before = [line["key"] for line in shop.listed()]
    assert shop.run("forget", "--scope", "user-7", "--yes", "--by", "ann").exit_code == 0
    (line,) = shop.listed()
    assert (line["state"], line["operation"], line["status"]) == ("erased", "pay", None)
    assert line["key"] not in before
    assert shop.audit(line["key"]) == [("ann", "erased", "records: 3")]
    told = f"operator erased: operation pay, id {line['key']}, records 3, origin cli, by ann"
    assert [each.getMessage() for each in caplog.records if hasattr(each, "did")] == [told]
    # In Redis an expiry is what is left of it, to the millisecond.
    assert [each["key"] for each in shop.listed("--state", "erased")] == [line["key"]]
    assert shop.run("list", "--scope", "user-7").exit_code == 1
    assert shop.run("forget", "--scope", "user-7", "--yes").exit_code == 1
    assert [each["key"] for each in shop.listed()] == [line["key"]], "an act that erased nothing"


def test_of_several_operations_no_name_is_left(shop):
    shop.post("key-1")
    shop.post("key-1", "/refund")
    assert shop.run("forget", "--scope", "user-7", "--yes").exit_code == 0
    (line,) = shop.listed()
    assert (line["state"], line["operation"]) == ("erased", "several operations")
    assert shop.audit(line["key"]) == [(getpass.getuser(), "erased", "records: 2")]


def test_the_record_of_one_key_leaves_the_name_of_its_operation(shop):
    shop.post("key-1")
    key = ["--key", "key-1", "--operation", "pay", "--scope", "user-7"]
    assert shop.run("forget", *key, "--yes").exit_code == 0
    (line,) = shop.listed()
    assert (line["state"], line["operation"]) == ("erased", "pay")
    assert shop.audit(line["key"]) == [(getpass.getuser(), "erased", "records: 1")]


def test_what_is_not_erased_is_not_noted(shop):
    with pytest.raises(Killed):
        shop.post("key-1", "/die")
    with shop.app.app_context():
        state = shop.app.extensions["idempotency"]
        store = state.records.admin()
        (line,) = store.newest(None, None, 9)
        key = store.key(bytes.fromhex(line.key))
        erasure = admin.Erasure("die", admin.AuditEntry("ann", "erased", ""))
        assert store.erase([key], None, erasure) == 0
        assert store.erase([key], "another version", erasure) == 0
        assert [each.state for each in store.newest(None, None, 9)] == [line.state]


def test_the_row_is_in_nobodys_way(shop):
    """Neither a check, nor a second erasure, nor a decision is about it; a purge leaves it."""
    shop.post("key-1")
    shop.run("forget", "--scope", "user-7", "--yes")
    (line,) = shop.listed()
    assert shop.run("release", "--why=asked", line["key"]).exit_code == 1
    assert shop.run("resolve", line["key"], "--status", "200", "--why", "x", "--yes").exit_code == 1
    assert "encryption" not in shop.run("check").output
    shop.run("purge")
    if shop.app.config["IDEMPOTENCY_STORE"] != "redis":  # which deletes by itself
        with shop.app.app_context():
            assert list(shop.app.extensions["idempotency"].records.admin().purge(9, 0.0)) == []
    (left,) = shop.listed()
    # Redis rounds an expiry to a millisecond each time that it is read.
    assert left | {"expires": None} == line | {"expires": None}
    with shop.app.app_context():
        store = shop.app.extensions["idempotency"].records.admin()
        assert store.outermost() == []
        assert store.belonging(scope_tail("user-7"), None).keys == []
        assert shop.post("key-1").status_code == 201


def test_it_is_known_for_longer_than_a_year(shop):
    shop.post("key-1")
    shop.run("forget", "--scope", "user-7", "--yes")
    (line,) = shop.listed()
    assert int(line["expires"][:4]) - int(line["created"][:4]) >= 1
