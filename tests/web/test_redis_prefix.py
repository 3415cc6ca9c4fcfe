"""What names in Redis begin with: a digest that tells databases apart, or a name that is given."""

import hashlib

import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import ConfigurationError, Idempotency

PG = "postgresql+psycopg2://"


def prefix_of(redis_server, url, store="hybrid", **config):
    """The prefix of an application on a database, which is not connected to."""
    app = Flask("shop")
    app.config.update(
        SQLALCHEMY_DATABASE_URI=url,
        IDEMPOTENCY_REDIS_URL=redis_server.url,
        IDEMPOTENCY_STORE=store,
        **config,
    )
    Idempotency(app, SQLAlchemy(app), scope=None)
    state = app.extensions["idempotency"]
    if store == "hybrid":
        return state.lock._prefix
    return state.records.prefix.removesuffix("record:")


@pytest.mark.parametrize(
    ("url", "place"),
    [
        (f"{PG}db.internal/shop", ("db.internal", None, "shop")),
        (f"{PG}u:p@db.internal:6432/shop?sslmode=require", ("db.internal", 6432, "shop")),
        (f"{PG}/shop", (None, None, "shop")),
    ],
)
def test_releases_side_by_side_agree(redis_server, url, place):
    text = "\n".join(map(str, (*place, "idempotency_record")))
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    assert prefix_of(redis_server, url) == f"idempotency:{digest}:"


def test_different_databases_and_tables_have_different_prefixes(redis_server):
    urls = [f"{PG}/shop", f"{PG}/bank", f"{PG}db/shop", f"{PG}db:6432/shop"]
    prefixes = {prefix_of(redis_server, url) for url in urls}
    prefixes.add(prefix_of(redis_server, urls[0], IDEMPOTENCY_TABLE="other"))
    assert len(prefixes) == 5


def test_the_bind_of_the_records_counts(redis_server):
    def bound(host):
        binds = {"ledger": f"{PG}{host}/shop"}
        config = {"SQLALCHEMY_BINDS": binds, "IDEMPOTENCY_BIND_KEY": "ledger"}
        return prefix_of(redis_server, f"{PG}db/shop", **config)

    assert len({bound("a"), bound("b"), prefix_of(redis_server, f"{PG}db/shop")}) == 3


def test_a_password_is_no_part_of_it(redis_server):
    assert prefix_of(redis_server, f"{PG}u:one@db/shop") == prefix_of(
        redis_server, f"{PG}u:two@db/shop"
    )


def test_the_store_that_has_nothing_else_asks_for_a_name(redis_server):
    """With that of another application it would give out the other's responses."""
    with pytest.raises(ConfigurationError, match="set IDEMPOTENCY_REDIS_PREFIX"):
        prefix_of(redis_server, f"{PG}db/shop", "redis")
    named = {"IDEMPOTENCY_REDIS_PREFIX": "shop:"}
    assert prefix_of(redis_server, f"{PG}db/shop", "redis", **named) == "shop:"
