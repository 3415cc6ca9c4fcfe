"""Who did what to a record is in the store, whatever the loggers' levels are, and in the log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency, idempotent
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


def test_the_log_says_who_erased_how_many_records_and_nothing_of_them_is_left(shop, caplog):
    for number in range(3):
        assert shop.post(f"key-{number}").status_code == 201
    assert shop.run("forget", "--scope", "user-7", "--yes", "--by", "ann").exit_code == 0
    told = "operator erased: records 3, origin cli, by ann"
    assert [each.getMessage() for each in caplog.records if hasattr(each, "did")] == [told]
    assert shop.listed() == []
    assert shop.run("forget", "--scope", "user-7", "--yes").exit_code == 1


def test_the_record_of_one_key_is_named(shop, caplog):
    shop.post("key-1")
    (line,) = shop.listed()
    key = ["--key", "key-1", "--operation", "pay", "--scope", "user-7"]
    assert shop.run("forget", *key, "--yes", "--by", "ann").exit_code == 0
    told = f"operator erased: operation pay, id {line['key']}, records 1, origin cli, by ann"
    assert [each.getMessage() for each in caplog.records if hasattr(each, "did")] == [told]
    assert shop.listed() == []


def test_what_is_not_erased_is_not_told(shop, caplog):
    with pytest.raises(Killed):
        shop.post("key-1", "/die")
    with shop.app.app_context():
        store = shop.app.extensions["idempotency"].records.admin()
        (line,) = store.lines(9)
        key = line.hash
        assert store.erase([key]) == store.erase([key], "another version") == 0
        assert [each.state for each in store.lines(9)] == [line.state]
    assert shop.run("forget", "--scope", "user-7", "--yes").exit_code == 0
    assert not [each for each in caplog.records if hasattr(each, "did")]
