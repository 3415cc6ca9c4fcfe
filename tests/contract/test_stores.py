"""One contract, four stores; that of Redis on fakeredis, too."""

import fakeredis
import pytest
import redis

from flask_idempotency.stores.redis import RedisRecords
from tests.contract.suite import StoreContract
from tests.contract.transactions import AtomicContract
from tests.drivers import EACH


class TestRedis(StoreContract):
    @pytest.fixture(
        params=[{}, {"decode_responses": True}, {"protocol": 3}], ids=["usual", "text", "3"]
    )
    def records(self, request, tmp_path, redis_server):
        """A client of one's own may decode all answers, for the application's own use of it."""
        with redis.Redis.from_url(redis_server.url, **request.param) as client:
            yield RedisRecords(client, f"{tmp_path.name}:")


class TestRedisOnFakeredis(StoreContract):
    @pytest.fixture
    def records(self):
        client = fakeredis.FakeRedis()
        client.ping()  # threads that are the first to ask make a database each
        return RedisRecords(client, "fake:")


@EACH
@pytest.mark.parametrize("store", ["postgres"], indirect=True)
class TestPostgres(AtomicContract):
    """Also the records of ``hybrid``, whose lock is none of a record's business, and of ``sql``."""

    @pytest.fixture
    def engine(self, world):
        with world.app.app_context():
            return world.db.engine

    @pytest.fixture
    def records(self, world):
        return world.app.extensions["idempotency"].records
