"""Rows that something else wrote: what no response of ours holds reaches no client, on any store."""

import gc
import json
import math
import re

import pytest
import redis
import sqlalchemy as sa

from tests.contract.in_redis import rewrite
from tests.contract.test_requests import Shop

KEYS = {"IDEMPOTENCY_ENCRYPTION_KEYS": [b"k" * 32], "IDEMPOTENCY_ACCEPT_UNSEALED": True}

HEADERS = [
    ("X-Real", "1"),
    ("Set-Cookie", "session=forged"),
    ("SET-COOKIE", "session=forged"),
    ("Connection", "close"),
    ("Transfer-Encoding", "chunked"),
    ("Content-Length", "1"),
    ("Idempotent-Replayed", "forged"),
    ("X-A", "1\r\nSet-Cookie: session=forged"),
    ("X-B", "1\nforged"),
    ("X-C", "\0forged"),
    ("X-D\r\nSet-Cookie", "session=forged"),
    ("X-E: forged\r\nX-F", "1"),
    ("X G", "forged"),
    ("", "forged"),
    ("X-H", "forged \u2028"),
    ("X-\u00fc", "forged"),
    ("X-Real", "B\u00fcro\t2"),
]


@pytest.fixture(params=["sql", "redis", "hybrid"])
def store(request):
    return request.param


@pytest.fixture
def shop(store, tmp_path, databases, redis_server, probing_at_once):
    """One store has keys: what they seal and open is the same in front of each."""
    uri = databases.take() if store == "hybrid" else f"sqlite:///{tmp_path}/shop.db"
    shop = Shop(store, uri, redis_server.url, **(KEYS if store == "sql" else {}))
    shop.runs = []
    shop.view(lambda: (shop.runs.append(1), ({}, 201))[1])
    assert shop.post().status_code == 201
    yield shop
    shop.engine.dispose()
    if store == "hybrid":
        databases.give_back(uri)


def in_redis(shop):
    """A client, and the name of the only record."""
    client = redis.Redis.from_url(shop.app.config["IDEMPOTENCY_REDIS_URL"])
    (name,) = client.keys(f"{shop.app.extensions['idempotency'].records.prefix}*")
    return client, name


def forge(shop, store, **values):
    """Write into the only record, past the extension; what is no text of JSON, as it is."""
    values = {"status": 200, "headers": [], "body": b"forged", "state": "completed"} | values
    if store == "redis":
        if isinstance(values["headers"], (list, dict, int)):
            values["headers"] = json.dumps(values["headers"])
        size = None if values["body"] is None else len(values["body"])
        rewrite(*in_redis(shop), **values, bytes=size)
        return
    if values["headers"] is not None and not isinstance(values["headers"], str):
        values["headers"] = json.dumps(values["headers"])
    table = shop.app.extensions["idempotency"].table.name
    with shop.engine.begin() as connection:
        changes = ", ".join(f"{name} = :{name}" for name in values)
        connection.execute(sa.text(f"update {table} set {changes}"), values)


def assert_refused(shop, caplog, forged):
    """The next request gets a plain 500, and one ERROR names the record by 8 digits of its hash."""
    caplog.clear()
    response = shop.post()
    assert (response.status_code, forged) == (500, forged), response.json
    assert shop.runs == [1]
    (line,) = [each for each in caplog.records if getattr(each, "problem", "") == "record-unreadable"]
    assert (line.levelname, line.error) == ("ERROR", "RecordBroken")
    assert re.fullmatch("[0-9a-f]{8}", line.id)
    assert f"id {line.id}" in line.getMessage()


def test_headers_that_are_never_stored_are_never_sent(shop, store):
    forge(shop, store, headers=HEADERS)
    response = shop.post()
    assert (response.status, response.data) == ("200 OK", b"forged")
    assert response.headers.getlist("X-Real") == ["1", "B\u00fcro\t2"]
    assert response.headers["Idempotent-Replayed"] == "true"
    names = {"X-Real", "Idempotent-Replayed", "Cache-Control", "Content-Length"}
    assert {name for name, _ in response.headers} == names
    assert "forged" not in str(response.headers)
    links = [("Location", "/\r\nSet-Cookie: forged"), ("Link", "</1>"), ("Link", "forged\u2028")]
    forge(shop, store, headers=links, body=None)
    response = shop.post()
    assert response.json["type"].endswith("response-not-kept")
    assert response.headers.getlist("Link") == ["</1>"]
    assert "forged" not in str(response.headers)
    assert shop.runs == [1]


DEEP = "[" * 5000 + "]" * 5000
RUNS = {"state": "in_progress"}

FORGERIES = [
    *({"status": status} for status in (0, 99, 600, -200, None)),
    *({"headers": headers} for headers in ({"X-Real": "1"}, 7, [["X-Real"]], None, DEEP)),
    {"headers": None, "body": None},
    {"state": "done"},
]
TYPED = {  # what not every store can hold, or calls by this name
    "sql": [{"status": "ok"}, {"body": "text"}],
    "redis": [
        {"status": "ok"},
        *({**RUNS, "lease": lease} for lease in (math.inf, -math.inf, math.nan, "soon")),
    ],
    "hybrid": [
        *({**RUNS, "lease_expires_at": sign + "infinity"} for sign in ("", "-")),
        {**RUNS, "attempt": 2147483647},
    ],
}


@pytest.fixture
def no_garbage():
    """Collected at the end of the stack, it fails in its own finalizers, and so the test."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage")
def test_a_record_that_is_none_is_refused(shop, store, caplog):
    for forged in [*FORGERIES, *TYPED[store]]:
        forge(shop, store, **forged)
        assert_refused(shop, caplog, forged)


@pytest.mark.parametrize("store", ["redis"], indirect=True)
@pytest.mark.usefixtures("no_garbage")
def test_what_is_no_record_in_redis_is_refused(shop, caplog):
    client, name = in_redis(shop)
    digits, stored = b"1" * 5000, client.get(name)
    many = stored.replace(b'"attempt": 1', b'"attempt": ' + digits)  # more than Python reads
    for forged in b"", b"forged", b"[1]", b"{}", DEEP.encode(), many, stored[:60]:
        client.set(name, forged)
        assert_refused(shop, caplog, forged[:40])
    client.delete(name)
    client.rpush(name, "forged")
    assert_refused(shop, caplog, "a list")
    client.delete(name)
    assert shop.post().status_code == 201
