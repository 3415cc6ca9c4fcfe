"""The shop in this process, on a database of its own."""

import pytest

from flask_idempotency.drivers.raw_connection import taken
from flask_idempotency.session.transaction import innermost
from tests.drivers import with_driver
from tests.exits import shop
from tests.waiting import wait_until


@pytest.fixture
def database(databases, driver, tmp_path, monkeypatch):
    """The shop's, with its tables; its address is in the environment."""
    url = databases.take()
    monkeypatch.setenv("DATABASE_URL", with_driver(url, driver))
    monkeypatch.setenv("CHARGES", str(tmp_path / "charges"))
    app = shop.create_app()
    with app.app_context():
        shop.db.create_all()
        shop.db.engine.dispose()
    yield
    databases.give_back(url)


@pytest.fixture
def shop_app(database):
    """The shop. After the test its connection must be in the pool, and no transaction be open."""
    app = shop.create_app()
    yield app
    with app.app_context():
        assert shop.db.engine.pool.checkedout() == 0, "a connection was not given back"
        shop.db.engine.dispose()
    wait_until(lambda: not shop.select(shop.OPEN), "no transaction is open")
    # A thread that was struck where an operation begins or ends may keep a note of it, as may its
    # process of a connection. They cost a few calls, which a later test would count as its own.
    innermost.set(None)
    taken.clear()
