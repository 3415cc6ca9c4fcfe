"""One contract, five stores."""

from __future__ import annotations

import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency
from flask_idempotency.testing.contract import StoreContract


def make(tmp_path, **config):
    app = Flask("shop")
    app.config.update(SQLALCHEMY_DATABASE_URI=f"sqlite:///{tmp_path}/shop.db", **config)
    db = SQLAlchemy(app)
    Idempotency(app, db, scope=None)
    with app.app_context():
        db.create_all()
    return app


class OnAnApplication(StoreContract):
    @pytest.fixture
    def records(self, app):
        yield app.extensions["idempotency"].records
        with app.app_context():
            engine = app.extensions["sqlalchemy"].engine
            assert engine.pool.checkedout() == 0
            engine.dispose()


class TestMemory(OnAnApplication):
    @pytest.fixture
    def app(self, tmp_path):
        return make(tmp_path, IDEMPOTENCY_STORE="memory")


class TestSqlite(OnAnApplication):
    @pytest.fixture
    def app(self, tmp_path):
        return make(tmp_path, IDEMPOTENCY_STORE="sql")


class TestRedis(OnAnApplication):
    atomic = False

    @pytest.fixture
    def app(self, tmp_path, redis_server):
        return make(tmp_path, IDEMPOTENCY_STORE="redis", IDEMPOTENCY_REDIS_URL=redis_server.url)


class TestPostgres(StoreContract):
    """Also the records of ``hybrid``, whose lock is none of a record's business, and of ``sql``."""

    @pytest.fixture(params=["postgres", "sql"])
    def store(self, request):
        return request.param

    @pytest.fixture
    def records(self, world):
        return world.app.extensions["idempotency"].records
