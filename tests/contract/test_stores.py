"""One contract, four stores; that of Redis on fakeredis, too."""

import fakeredis
import pytest
import redis
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency
from flask_idempotency.stores.redis import RedisRecords
from tests.contract.suite import StoreContract
from tests.drivers import EACH
from tests.stores import prefix_of


def make(tmp_path, **config):
    app = Flask("shop")
    app.config.update(SQLALCHEMY_DATABASE_URI=f"sqlite:///{tmp_path}/shop.db", **config)
    db = SQLAlchemy(app)
    Idempotency(app, db, scope=None)
    with app.app_context():
        db.create_all()
    return app


class OnSqlite(StoreContract):
    @pytest.fixture
    def engine(self, app):
        with app.app_context():
            engine = app.extensions["sqlalchemy"].engine
            yield engine
            assert engine.pool.checkedout() == 0
            engine.dispose()

    @pytest.fixture
    def records(self, app, engine):
        return app.extensions["idempotency"].records


class OnPostgres(StoreContract):
    @pytest.fixture
    def engine(self, world):
        with world.app.app_context():
            return world.db.engine

    @pytest.fixture
    def records(self, world):
        return world.app.extensions["idempotency"].records


class TestRedis(OnSqlite):
    atomic = False

    @pytest.fixture
    def app(self, tmp_path, redis_server):
        return make(
            tmp_path,
            IDEMPOTENCY_STORE="redis",
            IDEMPOTENCY_REDIS_URL=redis_server.url,
            IDEMPOTENCY_REDIS_PREFIX=prefix_of(tmp_path),
        )


class TestRedisWithAClientOfOnesOwn(StoreContract):
    """Which may be set up to decode all answers, for the application's own use of it."""

    atomic = False

    @pytest.fixture(params=[{"decode_responses": True}, {"protocol": 3}])
    def records(self, request, tmp_path, redis_server):
        with redis.Redis.from_url(redis_server.url, **request.param) as client:
            yield RedisRecords(client, f"{tmp_path.name}:")


class TestRedisOnFakeredis(StoreContract):
    atomic = False

    @pytest.fixture
    def records(self):
        client = fakeredis.FakeRedis()
        client.ping()  # threads that are the first to ask make a database each
        return RedisRecords(client, "fake:")


@EACH
class TestPostgres(OnPostgres):
    """Also the records of ``hybrid``, whose lock is none of a record's business, and of ``sql``."""

    @pytest.fixture
    def store(self):
        return "postgres"
