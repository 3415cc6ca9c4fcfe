"""Whatever stands in Redis: what the records say."""

import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from flask_idempotency.core.keys import hash_key

MINE = "canary-of-mine"


def give(world, key):
    """One request, which must leave the pool full; a refusal quotes nothing."""
    response = world.post(key=key, user=MINE)
    with world.app.app_context():
        assert world.db.engine.pool.checkedout() == 0
    if response.status_code >= 400:
        assert b"canary" not in response.data
    return response


def test_whatever_stands_in_redis_postgres_decides(world, add_view, redis_server):
    runs = add_view(world)
    client = redis.Redis.from_url(redis_server.url)
    give(world, "fuzzed")
    prefix = world.app.extensions["idempotency"].lock._prefix
    (record,) = world.records()
    own = f"{record.fingerprint_version:x}.{bytes(record.fingerprint).hex()}"
    owners = st.sampled_from([record.owner, "x" * 22, "done", "", "\n"])
    honest = st.builds("{}:{}:{}".format, st.sampled_from(["1", "2", "", "1:1"]), owners, st.just(own))
    cut = st.tuples(honest, st.integers(0, 120)).map(lambda pair: pair[0][: pair[1]])
    other = st.builds("1:{}:1.{}".format, owners, st.binary(min_size=32, max_size=32).map(bytes.hex))
    values = st.binary(max_size=200) | (honest | cut | other | st.just("1:done")).map(str.encode)
    new = iter(range(10**6))

    @settings(max_examples=40, deadline=None, database=None, derandomize=True)
    @given(value=values, milliseconds=st.none() | st.integers(1000, 10**7), is_list=st.booleans())
    def check(value, milliseconds, is_list):
        for key in ("fuzzed", f"new-{next(new)}"):
            place = prefix + hash_key("", record.name, MINE, key).hex()
            client.delete(place)
            if is_list:
                client.rpush(place, value)
            else:
                client.set(place, value, px=milliseconds)
            before = len(runs)
            response = give(world, key)
            if response.status_code == 409:
                assert not is_list
                assert value.startswith(b"1:")
                assert value.endswith(own.encode())
                assert len(runs) == before
                client.delete(place)  # as it is when the lock has become old
                response = give(world, key)
            assert response.status_code == 201
            assert len(runs) == before + (key != "fuzzed")
            assert ("Idempotent-Replayed" in response.headers) == (key == "fuzzed")
            assert give(world, key).data == response.data or client.get(place) not in (None, b"1:done")

    check()
