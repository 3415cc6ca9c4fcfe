"""Mistakes in settings and options are named at once: what, which value, and what is allowed."""

import datetime as dt
import re
import secrets
from types import SimpleNamespace

import pytest
import redis.asyncio
import sqlalchemy as sa
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import ConfigurationError, Idempotency, idempotent
from flask_idempotency.core.errors import shown

URI = "postgresql+psycopg2://shop:canary@nowhere.invalid/shop"
REDIS = "redis://:canary@nowhere.invalid:6379/0"
KEY = "canary" * 7 + "9="


def set_up(*, uri=URI, **config):
    """An application with these settings; nothing connects to anywhere."""
    app, db = Flask("shop"), SQLAlchemy()
    app.config.update(SQLALCHEMY_DATABASE_URI=uri, **config)
    db.init_app(app)
    idempotency = Idempotency()
    idempotency.init_app(app, db, scope=None)
    return app.extensions["idempotency"].settings


WRONG_SETTINGS = [
    ("STORE", "mysql", "'hybrid'"),
    ("STORE", "Postgres", "'hybrid'"),
    ("REDIS_PREFIX", "with space", "visible ASCII"),
    ("REDIS_PREFIX", "", "visible ASCII"),
    ("HEADER", "", "a header name"),
    ("HEADER", "Idempotency Key", "a header name"),
    ("HEADER", b"Idempotency-Key", "a header name"),
    ("REQUIRED", "yes", "True or False"),
    ("REQUIRED", 1, "True or False"),
    ("TTL", 0, "from 1 second to 10 years"),
    ("TTL", -1, "from 1 second to 10 years"),
    ("TTL", "3600", "from 1 second to 10 years"),
    ("TTL", None, "from 1 second to 10 years"),
    ("TTL", True, "from 1 second to 10 years"),
    ("TTL", float("nan"), "from 1 second to 10 years"),
    ("TTL", float("inf"), "from 1 second to 10 years"),
    ("TTL", dt.timedelta(milliseconds=5), "from 1 second to 10 years"),
    ("REFUSE_OLD_KEYS", "yes", "True, False or 'require'"),
    ("REFUSE_OLD_KEYS", 1, "True, False or 'require'"),
    ("REFUSE_OLD_KEYS", None, "True, False or 'require'"),
    ("LEASE", 0, "seconds"),
    ("WAIT", -0.1, "0 to 300 seconds"),
    ("WAIT", 301, "0 to 300 seconds"),
    ("MAX_REQUEST_BYTES", -1, "0 to 1 GiB"),
    ("MAX_REQUEST_BYTES", None, "0 to 1 GiB"),
    ("MAX_REQUEST_BYTES", "16 MiB", "0 to 1 GiB"),
    ("MAX_REQUEST_BYTES", 1.5, "0 to 1 GiB"),
    ("MAX_RESPONSE_BYTES", -1, "0 to 1 GiB"),
    ("MAX_RESPONSE_BYTES", None, "0 to 1 GiB"),
    ("TABLE", "record; drop table x", "SQL name"),
    ("TABLE", "x" * 51, "SQL name of up to 50"),
    ("BIND_KEY", "", "bind key"),
    ("BIND_KEY", 1, "a bind key, or None"),
    ("BIND_KEY", str, "a bind key, or None"),
    ("BIND_KEY", "nope", "None"),
    ("NAMESPACE", None, "visible ASCII"),
    ("NAMESPACE", "v 1", "visible ASCII"),
    ("PROBLEM_BASE", "https://example.com/a b", "URI"),
    ("PURGE", 1, "True or False"),
    ("PURGE", None, "True or False"),
    ("ON_STORE_ERROR", "ignore", "'reject' or 'allow'"),
    ("ACCEPT_UNSEALED", "yes", "True or False"),
    ("ENABLED", 0, "True or False"),
    pytest.param("TTL", 10**5000, "from 1 second to 10 years", id="TTL of 5000 digits"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), WRONG_SETTINGS)
def test_a_wrong_setting_names_itself_its_value_and_what_is_allowed(name, value, allowed):
    with pytest.raises(ConfigurationError) as caught:
        set_up(**{f"IDEMPOTENCY_{name}": value})
    message = str(caught.value)
    assert message.startswith(f"IDEMPOTENCY_{name} is {shown(value)}; allowed: ")
    assert allowed in message


SECRET_SETTINGS = [
    ("REDIS_URL", 7, "a URL"),
    ("REDIS_URL", "canary", "Allowed are redis://"),
    ("REDIS_URL", "localhost:6379/0", "Allowed are redis://"),
    ("REDIS_URL", "user:canary@nowhere.invalid:6379/0", "Allowed are redis://"),
    ("REDIS_URL", "://canary", "Allowed are redis://"),
    ("REDIS_URL", "redis+sentinel://:canary@nowhere.invalid/main", "Allowed are redis://"),
    ("REDIS_URL", "redis://:canary@[nowhere", "Allowed are redis://"),
    ("REDIS_URL", "redis://:canary@nowhere.invalid/0?canary=canary", "Allowed are redis://"),
    ("REDIS_URL", "rediss://:canary@nowhere.invalid/0?ssl_cert_reqs=canary", "Allowed are redis://"),
    ("REDIS_URL", "redis://:canary@nowhere.invalid/0?protocol=7", "Allowed are redis://"),
    ("REDIS_URL", "redis://:canary@nowhere.invalid:port/0", "Allowed are redis://"),
    ("REDIS_URL", "redis://:canary@nowhere.invalid/canary", "Allowed are redis://"),
    ("REDIS_URL", "redis://:canary@nowhere.invalid/0?socket_timeout=canary", "Allowed are redis://"),
    ("REDIS_URL", "redis://:p@canary#word@127.0.0.1:6379/0", "Allowed are redis://"),
    ("REDIS_URL", "redis://:p@canary?word@127.0.0.1:6379/0", "Allowed are redis://"),
    ("REDIS_URL", "redis://canary:12345?a=rest@host/0", "Allowed are redis://"),
    ("REDIS_URL", "redis://canary:12345/rest@host/0", "Allowed are redis://"),
    ("REDIS_URL", "redis://nowhere.invalid/0?db=1&canary", "Allowed are redis://"),
    ("REDIS_URL", "unix://canary:12345/x@/run/redis.sock", "Allowed are redis://"),
    ("REDIS_URL", "unix://:canary@/?db=0", "Allowed are redis://"),
    ("REDIS_URL", "unix://canary/redis.sock", "Allowed are redis://"),
    ("ENCRYPTION_KEYS", "canary" * 8, "a list of keys"),
    ("ENCRYPTION_KEYS", b"canary" * 8, "a list of keys"),
    ("ENCRYPTION_KEYS", 7, "a list of keys"),
    ("ENCRYPTION_KEYS", ["canary"], "32 bytes"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), SECRET_SETTINGS)
def test_a_wrong_secret_is_named_and_not_shown(name, value, allowed):
    with pytest.raises(ConfigurationError, match=f"^IDEMPOTENCY_{name}") as caught:
        set_up(**{f"IDEMPOTENCY_{name}": value})
    message = str(caught.value)
    assert allowed in message
    assert "canary" not in message
    assert caught.value.__cause__ is None or "canary" not in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:p@ss@nowhere.invalid:6379/0?socket_timeout=0.3",
        "rediss://:canary@nowhere.invalid",
        "unix://user:canary@/run/redis%40main.sock?db=1",
    ],
)
def test_a_url_of_redis_may_be_written_in_these_ways(url):
    assert set_up(IDEMPOTENCY_REDIS_URL=url).store == "hybrid"


def give_url_as_db(url):
    Idempotency(bare_app()[0], url)


def give_url_as_application(url):
    Idempotency(url)


def give_url_as_scope(url):
    Idempotency(*bare_app(), scope=url)


def protect_url(url):
    Idempotency().protect(url)


def give_url_as_option(url):
    idempotent(key=url)(give_url_as_db)


def give_urls_as_pointers(url):
    idempotent(fingerprint=[url])(give_url_as_db)


def put_url_into(setting):
    def put(url):
        set_up(**{f"IDEMPOTENCY_{setting}": url})

    put.__name__ = f"put_url_into_{setting}"
    return put


SETTINGS_WITH_TEXT = (
    "STORE",
    "HEADER",
    "TTL",
    "BIND_KEY",
    "TABLE",
    "ACCEPT_UNSEALED",
)
MISPLACED = [
    give_url_as_db,
    give_url_as_application,
    give_url_as_scope,
    protect_url,
    give_url_as_option,
    give_urls_as_pointers,
    *map(put_url_into, SETTINGS_WITH_TEXT),
]


@pytest.mark.parametrize("secret", [URI, REDIS, KEY, KEY.encode(), [KEY]])
@pytest.mark.parametrize("give", MISPLACED, ids=lambda give: give.__name__)
def test_a_secret_in_the_wrong_place_is_not_shown(give, secret):
    with pytest.raises(ConfigurationError) as caught:
        give(secret)
    assert "canary" not in str(caught.value)
    assert type(secret).__name__ in str(caught.value)


def test_a_prefix_that_is_a_url_is_not_shown():
    with pytest.raises(ConfigurationError, match="^IDEMPOTENCY_REDIS_PREFIX is a str") as caught:
        set_up(IDEMPOTENCY_REDIS_PREFIX=REDIS * 3)
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize("kind", [set, frozenset, iter, dict.fromkeys])
def test_keys_in_no_order_or_that_are_read_once_are_refused(kind):
    keys = kind([secrets.token_urlsafe(32), secrets.token_urlsafe(32)])
    with pytest.raises(ConfigurationError, match="ENCRYPTION_KEYS is .*a list of keys, newest first"):
        set_up(IDEMPOTENCY_ENCRYPTION_KEYS=keys)


def test_swapped_arguments_are_named():
    app, db = bare_app()
    with pytest.raises(ConfigurationError, match=r"app is .*SQLAlchemy.*allowed: a flask\.Flask"):
        Idempotency(db, app, scope=None)


def test_a_client_that_is_given_comes_before_the_url():
    app, db = bare_app()
    app.config["IDEMPOTENCY_REDIS_URL"] = REDIS
    client = redis.Redis()
    Idempotency(app, db, scope=None, redis=client)
    assert app.extensions["idempotency"].lock._client is client


@pytest.mark.parametrize("wrong", [b"short", "too short", "x" * 44, 7, None])
def test_the_place_of_a_wrong_encryption_key_is_named(wrong):
    good = secrets.token_urlsafe(32)
    with pytest.raises(ConfigurationError, match=r"ENCRYPTION_KEYS\[1\] is not a key") as caught:
        set_up(IDEMPOTENCY_ENCRYPTION_KEYS=[good, wrong])
    assert good not in str(caught.value)
    assert "short" not in str(caught.value)


def test_an_unknown_setting_is_refused_with_those_that_there_are():
    refused = "IDEMPOTENCY_STOR is not a setting; there are: IDEMPOTENCY_STORE, .*_ENABLED$"
    with pytest.raises(ConfigurationError, match=refused):
        set_up(IDEMPOTENCY_STOR="canary")


def test_settings_of_others_are_none_of_our_business():
    assert set_up(IDEMPOTENT="x", IDEMPOTENCYKEY="x").ttl == 86400


def bare_app(uri=URI):
    app, db = Flask("shop"), SQLAlchemy()
    app.config["SQLALCHEMY_DATABASE_URI"] = uri
    db.init_app(app)
    return app, db


def test_a_missing_scope_explains_the_danger():
    with pytest.raises(ConfigurationError, match="the other's stored response.*scope=None"):
        Idempotency().init_app(*bare_app())
    with pytest.raises(ConfigurationError, match="scope is 'alice'; allowed: a callable"):
        Idempotency().init_app(*bare_app(), scope="alice")


@pytest.mark.parametrize(
    ("uri", "named"),
    [
        ("sqlite://", "begins with sqlite"),
        ("sqlite:///shop.db", "begins with sqlite"),
        ("mysql+pymysql://shop:canary@nowhere.invalid/shop", "begins with mysql"),
        ("postgresql+psycopg_async://shop:canary@nowhere.invalid/shop", "not for asyncio"),
        ("postgresql+asyncpg://shop:canary@nowhere.invalid/shop", "not for asyncio"),
    ],
)
def test_another_database_or_driver_is_refused_by_name(uri, named):
    app, db = Flask("shop"), SQLAlchemy()
    app.config["SQLALCHEMY_DATABASE_URI"] = uri
    if re.search("pymysql|asyncpg", uri):  # which need not be installed here
        module = SimpleNamespace(paramstyle="pyformat", __version__="99.0")
        app.config["SQLALCHEMY_ENGINE_OPTIONS"] = {"module": module}
    db.init_app(app)
    with pytest.raises(ConfigurationError, match=f"the records' database .*{named}") as caught:
        Idempotency().init_app(app, db, scope=None)
    assert "postgresql+psycopg2://" in str(caught.value)
    assert "canary" not in str(caught.value)


def test_the_hybrid_store_needs_a_redis():
    with pytest.raises(ConfigurationError, match="'hybrid', which needs a Redis.*IDEMPOTENCY_REDIS"):
        set_up(IDEMPOTENCY_STORE="hybrid")
    assert set_up(IDEMPOTENCY_STORE="hybrid", IDEMPOTENCY_REDIS_URL=REDIS).store == "hybrid"


def test_the_default_store_follows_from_what_there_is():
    assert set_up().store == "postgres"
    assert set_up(IDEMPOTENCY_REDIS_URL=REDIS).store == "hybrid"
    app, db = bare_app()
    Idempotency().init_app(app, db, scope=None, redis=redis.Redis())
    assert app.extensions["idempotency"].settings.store == "hybrid"


def test_the_database_comes_first():
    with pytest.raises(ConfigurationError, match=r"call db\.init_app\(app\) before"):
        Idempotency(Flask("shop"), scope=None)
    with pytest.raises(ConfigurationError, match=r"call db\.init_app\(app\) before"):
        Idempotency().init_app(bare_app()[0], SQLAlchemy(), scope=None)
    app, _ = bare_app()
    Idempotency(app, scope=None)  # finds the one that is registered


def test_one_application_has_one_extension():
    app, db = bare_app()
    Idempotency(app, db, scope=None)
    with pytest.raises(ConfigurationError, match="already has an Idempotency"):
        Idempotency(app, db, scope=None)


def test_a_url_without_a_driver_means_what_sqlalchemy_makes_of_it():
    """psycopg2 until SQLAlchemy 2.0, psycopg 3 since 2.1."""
    app, db = Flask("shop"), SQLAlchemy()
    app.config["SQLALCHEMY_DATABASE_URI"] = URI
    db.init_app(app)
    app.config["SQLALCHEMY_DATABASE_URI"] = "postgresql://shop@nowhere.invalid/shop"
    Idempotency().init_app(app, db, scope=None)


@pytest.mark.parametrize(
    "client",
    [object(), "redis://localhost", redis.asyncio.Redis()],
    ids=lambda value: type(value).__name__,
)
def test_a_redis_client_of_another_kind_is_named(client):
    app, db = bare_app()
    with pytest.raises(ConfigurationError, match=r"allowed: a redis\.Redis"):
        Idempotency().init_app(app, db, scope=None, redis=client)


@pytest.mark.parametrize("schema", [None, "shop"])
def test_a_table_of_the_applications_own_is_not_taken_for_ours(schema):
    app, db = Flask("shop"), SQLAlchemy(metadata=sa.MetaData(schema=schema))
    app.config.update(SQLALCHEMY_DATABASE_URI=URI, IDEMPOTENCY_TABLE="payment")

    class Payment(db.Model):
        __tablename__ = "payment"
        id = sa.Column(sa.Integer, primary_key=True)
        created_at = sa.Column(sa.DateTime)

    db.init_app(app)
    with pytest.raises(ConfigurationError, match="IDEMPOTENCY_TABLE .*payment.*another name"):
        Idempotency(app, db, scope=None)


def test_two_applications_share_our_table():
    first, db = bare_app()
    second, _ = bare_app()
    del second.extensions["sqlalchemy"]
    db.init_app(second)
    idempotency = Idempotency(first, db, scope=None)
    idempotency.init_app(second, db)
    Idempotency(*bare_app(), scope=None)
    one, two = (app.extensions["idempotency"].table for app in (first, second))
    assert one is two


@pytest.mark.parametrize("name", ["do_execute", "do_executemany", "do_execute_no_params"])
@pytest.mark.parametrize("target", ["the engine", "all engines"])
def test_who_may_execute_statements_before_the_extension_sees_them_is_refused(target, name):
    """What such a listener executes itself, no later one hears of: a COMMIT would double rows."""
    app, db = bare_app()

    def listener(*_arguments):
        return False

    with app.app_context():
        engine = db.engine if target == "the engine" else sa.Engine
    sa.event.listen(engine, name, listener)
    try:
        with pytest.raises(ConfigurationError, match="add it after idempotency.init_app"):
            Idempotency().init_app(app, db, scope=None)
    finally:
        sa.event.remove(engine, name, listener)
    Idempotency().init_app(app, db, scope=None)  # without it
