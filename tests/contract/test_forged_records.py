"""Rows that something else wrote: what no response of ours holds reaches no client, on any store."""

import gc
import json
import math
import re

import pytest
import redis
import sqlalchemy as sa

from tests.contract.in_redis import rewrite
from tests.contract.test_requests import STORES, Shop

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


@pytest.fixture(params=[store for store in STORES if store != "postgres"])
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
    with shop.app.app_context():
        shop.db.engine.dispose()
    if store == "hybrid":
        databases.give_back(uri)


def set_column(shop, column, sql):
    """Write an expression of SQL into the only record, past the extension."""
    table = shop.app.extensions["idempotency"].table.name
    with shop.app.app_context(), shop.db.engine.begin() as connection:
        connection.execute(sa.text(f"update {table} set {column} = {sql}"))


def in_redis(shop):
    """A client, and the name of the only record."""
    client = redis.Redis.from_url(shop.app.config["IDEMPOTENCY_REDIS_URL"])
    (name,) = client.keys(f"{shop.app.extensions['idempotency'].records.prefix}*")
    return client, name


def forge(shop, store, *, status=200, headers=(), body=b"forged", state="completed"):
    """Write into the only record, past the extension."""
    values = {"status": status, "headers": json.dumps(headers), "body": body, "state": state}
    if store == "redis":
        size = None if body is None else len(body)
        rewrite(*in_redis(shop), **values, bytes=size)
        return
    table = shop.app.extensions["idempotency"].table.name
    with shop.app.app_context(), shop.db.engine.begin() as connection:
        changes = ", ".join(f"{name} = :{name}" for name in values)
        connection.execute(sa.text(f"update {table} set {changes}"), values)


def assert_refused(shop, caplog):
    """The next request gets a plain 500, and one ERROR names the record by 8 digits of its hash."""
    caplog.clear()
    response = shop.post()
    assert response.status_code == 500, response.json
    assert shop.runs == [1]
    (line,) = [each for each in caplog.records if getattr(each, "problem", "") == "record-unreadable"]
    assert line.levelname == "ERROR"
    assert re.fullmatch("[0-9a-f]{8}", line.id)
    assert f"id {line.id}" in line.getMessage()
    assert line.error == "RecordBroken"


def test_headers_that_are_never_stored_are_never_sent(shop, store):
    forge(shop, store, headers=HEADERS)
    response = shop.post()
    assert (response.status, response.data) == ("200 OK", b"forged")
    assert response.headers.getlist("X-Real") == ["1", "B\u00fcro\t2"]
    assert response.headers["Idempotent-Replayed"] == "true"
    assert {name for name, _ in response.headers} == {
        "X-Real",
        "Idempotent-Replayed",
        "Cache-Control",
        "Content-Length",
    }
    assert "forged" not in str(response.headers)
    assert shop.runs == [1]


def test_nor_are_they_where_the_body_was_not_stored(shop, store):
    links = [("Location", "/\r\nSet-Cookie: forged"), ("Link", "</1>"), ("Link", "forged\u2028")]
    forge(shop, store, headers=links, body=None)
    response = shop.post()
    assert response.json["type"].endswith("response-not-kept")
    assert response.headers.getlist("Link") == ["</1>"]
    assert "forged" not in str(response.headers)
    assert shop.runs == [1]


FORGERIES = [
    {"status": 0},
    {"status": 99},
    {"status": 600},
    {"status": -200},
    {"headers": {"X-Real": "1"}},
    {"headers": 7},
    {"headers": [["X-Real"]]},
]
UNTYPED = [{"status": "ok"}, {"body": "text"}]  # what not every store can hold


def test_a_response_that_is_none_is_refused(shop, store, caplog):
    loosely = {"sql": UNTYPED, "redis": UNTYPED[:1]}.get(store, [])
    for forgery in [*FORGERIES, *loosely]:
        forge(shop, store, **forgery)
        assert_refused(shop, caplog)


@pytest.mark.parametrize("store", ["sql", "redis", "hybrid"], indirect=True)
def test_a_record_that_cannot_be_read_is_refused(shop, store, caplog):
    forge(shop, store, state="done")
    assert_refused(shop, caplog)


@pytest.mark.parametrize("store", ["sql", "redis", "hybrid"], indirect=True)
def test_a_completed_record_without_its_status_is_refused(shop, store, caplog):
    if store == "redis":
        rewrite(*in_redis(shop), status=None)
    else:
        set_column(shop, "status", "null")
    assert_refused(shop, caplog)


@pytest.mark.parametrize("store", ["sql", "redis", "hybrid"], indirect=True)
@pytest.mark.parametrize("body", [b"forged", None])
def test_a_completed_record_without_its_headers_is_refused(shop, store, caplog, body):
    forge(shop, store, body=body)
    if store == "redis":
        rewrite(*in_redis(shop), headers=None)
    else:
        set_column(shop, "headers", "null")
    assert_refused(shop, caplog)


@pytest.fixture
def no_garbage():
    """Collected at the end of the stack, it fails in its own finalizers, and so the test."""
    gc.disable()
    yield
    gc.enable()


DEEP = "[" * 5000 + "]" * 5000


@pytest.mark.parametrize("store", ["sql", "redis", "hybrid"], indirect=True)
@pytest.mark.usefixtures("no_garbage")
def test_headers_in_more_levels_than_python_reads_are_refused(shop, store, caplog):
    if store == "redis":
        rewrite(*in_redis(shop), headers=DEEP)
    else:
        set_column(shop, "headers", f"'{DEEP}'")
    assert_refused(shop, caplog)


@pytest.mark.parametrize("store", ["hybrid"], indirect=True)
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("lease_expires_at", "'infinity'"),
        ("lease_expires_at", "'-infinity'"),
        ("state", "'in_progress', attempt = 2147483647"),
    ],
)
def test_what_the_database_cannot_count_with_is_refused(shop, caplog, column, value):
    set_column(shop, "state", "'in_progress'")
    set_column(shop, column, value)
    assert_refused(shop, caplog)


@pytest.mark.parametrize("store", ["redis"], indirect=True)
@pytest.mark.parametrize("lease", [math.inf, -math.inf, math.nan, "soon"])
def test_a_lease_without_an_end_is_refused(shop, caplog, lease):
    rewrite(*in_redis(shop), state="in_progress", lease=lease)
    assert_refused(shop, caplog)


@pytest.mark.parametrize("store", ["redis"], indirect=True)
def test_what_is_no_record_in_redis_is_refused(shop, caplog):
    client, name = in_redis(shop)
    digits, stored = b"1" * 5000, client.get(name)
    many = stored.replace(b'"attempt": 1', b'"attempt": ' + digits)  # more than Python reads
    for forged in b"forged", b"[1]", b"{}", DEEP.encode(), many, stored[:60]:
        client.set(name, forged)
        assert_refused(shop, caplog)
    client.delete(name)
    client.rpush(name, "forged")
    assert_refused(shop, caplog)
    client.delete(name)
    assert shop.post().status_code == 201
