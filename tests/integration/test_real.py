"""``make real`` sees what a mode does to a suite: on a small one, in an environment that is there."""

import sys
from pathlib import Path

import pytest

from real.comparison import differences
from real.environment import Environment
from real.packages import Package
from real.suite import run

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

    @app.post("/<int:status>")
    def order(status):
        calls.append(1)
        db.session.execute(db.text("INSERT INTO orders VALUES (DEFAULT)"))
        db.session.commit()
        return {"calls": len(calls)}, status

    with app.app_context(), db.engine.begin() as connection:
        connection.execute(db.text("DROP TABLE IF EXISTS orders"))
        connection.execute(db.text("CREATE TABLE orders (id serial PRIMARY KEY)"))
    with app.test_client() as client:
        yield client


@pytest.mark.parametrize("status", [201, 401])
def test_ordering(client, status):
    assert [client.post(f"/{status}").json["calls"] for _ in range(2)] == [1, 2]


def test_the_extension(client):
    assert "idempotency" not in client.application.extensions
"""


PACKAGE = Package("shop", "1", ("test_shop.py",), (), environment=(("SHOP_DATABASE", "{database}"),))


def test_each_mode_beside_plain(tmp_path, databases, redis_server):
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_shop.py").write_text(SUITE, encoding="utf-8")
    suite, database = Environment(tmp_path, Path(sys.executable)), databases.take()
    plain, observed, protected, twice = (
        run(PACKAGE, suite, mode, database, redis_server.url)
        for mode in ("plain", "observed", "protected", "twice")
    )
    databases.give_back(database)

    def differing(found):
        return [line.split("::")[1].split(":")[0] for line in differences(plain, found)]

    assert set(plain.tests.values()) == {"passed"}
    assert [plain.writes, plain.replays] == [4, 0]
    for found in observed, protected:
        assert [found.writes, found.replays] == [4, 0]
        assert differing(found) == ["test_the_extension"]
    # A 401 is not stored, so its retry calls the view again.
    assert [twice.writes, twice.replays, twice.equal] == [4, 2, 2]
    assert differing(twice) == ["test_ordering[401]", "test_the_extension"]
