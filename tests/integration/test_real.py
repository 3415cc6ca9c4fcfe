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


@pytest.mark.parametrize("status", [201, 401])
def test_ordering(status):
    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["SHOP_DATABASE"]
    db, calls = SQLAlchemy(app), []

    @app.post("/")
    def order():
        calls.append(db.session.execute(db.text("SELECT 1")))
        return {"calls": len(calls)}, status

    assert [app.test_client().post("/").json["calls"] for _ in range(2)] == [1, 2]
"""


PACKAGE = Package("shop", "1", ("test_shop.py",), (), environment=(("SHOP_DATABASE", "{database}"),))


def test_each_mode_beside_plain(tmp_path, databases, redis_server):
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_shop.py").write_text(SUITE, encoding="utf-8")
    suite, database = Environment(tmp_path, Path(sys.executable)), databases.take()
    plain, protected, twice = (
        run(PACKAGE, suite, mode, database, redis_server.url)
        for mode in ("plain", "protected", "twice")
    )
    databases.give_back(database)
    assert set(plain.tests.values()) == {"passed"}
    assert [plain.writes, plain.replays] == [protected.writes, protected.replays] == [4, 0]
    assert differences(plain, protected) == []
    # A 401 is not stored, so its retry calls the view again.
    assert [twice.writes, twice.replays, twice.equal] == [4, 2, 2]
    [differing] = differences(plain, twice)
    assert "test_ordering[401]" in differing
