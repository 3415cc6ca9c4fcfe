"""The shop on a PostgreSQL, with a card provider on a port of its own."""

import threading

import flask_migrate
import pytest
from werkzeug.serving import make_server

import servers
from example import create_app
from example.extensions import db
from example.seed import seed
from laboratory import card_provider


@pytest.fixture(scope="session")
def provider(tmp_path_factory):
    """Its address. It forgets nothing between tests, as the real one would not."""
    ledger = tmp_path_factory.mktemp("provider") / "ledger.db"
    app = card_provider.create_app({"PROVIDER_DATABASE": str(ledger)})
    server = make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=server.serve_forever).start()
    yield f"http://127.0.0.1:{server.port}"
    server.shutdown()


@pytest.fixture(scope="session")
def shop(provider):
    secrets = {"SECRET_KEY": "k", "WEBHOOK_SECRET": "w", "OPERATOR_PASSWORD": "o"}
    config = {"TESTING": True, "WTF_CSRF_ENABLED": False, "IDEMPOTENCY_REDIS_URL": None, **secrets}
    with servers.postgres(fsync=False) as server:
        url = server.database("example_tests")
        app = create_app({**config, "SQLALCHEMY_DATABASE_URI": url, "PROVIDER_URL": provider})
        with app.app_context():
            flask_migrate.upgrade()
        yield app


@pytest.fixture
def app(shop):
    """The shop as it is after ``flask --app example seed``."""
    with shop.app_context():
        for table in reversed(db.metadata.sorted_tables):
            db.session.execute(table.delete())
        db.session.commit()
        seed()
    return shop
