"""``make real`` sees what a mode does to a suite: on a small one, in an environment that is there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from real.comparison import Result, differences
from real.environment import Environment
from real.packages import Package
from real.suite import run
from tests.databases import Databases

pytestmark = pytest.mark.of_tests

SUITE = """
import os

import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy


@pytest.fixture
def client():
    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["SHOP_DATABASE"]
    db, calls = SQLAlchemy(app), []

    @app.post("/orders")
    def order():
        calls.append(1)
        db.session.execute(db.text("INSERT INTO orders VALUES (DEFAULT)"))
        db.session.commit()
        return {"calls": len(calls)}, 201

    @app.post("/wrong")
    def wrong():
        calls.append(1)
        return {"calls": len(calls)}, 401

    with app.app_context(), db.engine.begin() as connection:
        connection.execute(db.text("DROP TABLE IF EXISTS orders"))
        connection.execute(db.text("CREATE TABLE orders (id serial PRIMARY KEY)"))
    with app.test_client() as client:
        yield client


def test_ordering(client):
    assert [client.post("/orders").json["calls"] for _ in range(2)] == [1, 2]


def test_wrong_passwords(client):
    assert [client.post("/wrong").json["calls"] for _ in range(2)] == [1, 2]


def test_the_extension(client):
    assert "idempotency" not in client.application.extensions
"""


PACKAGE = Package("shop", "1", ("test_shop.py",), (), environment=(("SHOP_DATABASE", "{database}"),))


@pytest.fixture(scope="module")
def run_in(
    tmp_path_factory: pytest.TempPathFactory, databases: Databases, redis_server: Any
) -> Iterator[Callable[[str], Result]]:
    """A function that gives the results of the suite in a mode."""
    sources = tmp_path_factory.mktemp("real") / "sources"
    sources.mkdir()
    (sources / "pytest.ini").touch()
    (sources / "test_shop.py").write_text(SUITE, encoding="utf-8")
    suite, database = Environment(sources, Path(sys.executable)), databases.take()
    yield cache(lambda mode: run(PACKAGE, suite, mode, database, redis_server.url))
    databases.give_back(database)


@pytest.mark.parametrize(
    ("mode", "replays", "other"),
    [
        ("unused", 0, ["test_the_extension"]),
        ("observed", 0, ["test_the_extension"]),
        ("protected", 0, ["test_the_extension"]),
        # A 401 is not stored, so its retry calls the view again.
        ("twice", 2, ["test_the_extension", "test_wrong_passwords"]),
    ],
)
def test_a_mode_beside_plain(
    run_in: Callable[[str], Result], mode: str, replays: int, other: list[str]
) -> None:
    plain, found = run_in("plain"), run_in(mode)
    assert set(plain.tests.values()) == {"passed"}
    assert [plain.writes, plain.replays] == [4, 0]
    assert [found.writes, found.replays, found.equal] == [4, replays, replays]
    assert [line.split("::")[1].split(":")[0] for line in differences(plain, found)] == other
