"""Mistakes in settings and options are named at once: what, which value, and what is allowed."""

import datetime as dt
import hashlib
import re
import secrets
from types import SimpleNamespace

import pytest
import redis.asyncio
import sqlalchemy as sa
from flask import Blueprint, Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import ConfigurationError, Idempotency, idempotent
from flask_idempotency.core.errors import shown

URI = "postgresql+psycopg2://shop:canary@nowhere.invalid/shop"
REDIS = "redis://:canary@nowhere.invalid:6379/0"
KEY = "canary" * 7 + "9="
GOOD = secrets.token_urlsafe(32)


def bare_app(uri=URI, **config):
    """An application that is not set up; nothing connects to anywhere."""
    app, db = Flask("shop"), SQLAlchemy()
    app.config.update(SQLALCHEMY_DATABASE_URI=uri, **config)
    db.init_app(app)
    return app, db


def set_up(redis=None, **config):
    """The settings of an application that has these."""
    app, db = bare_app(**{f"IDEMPOTENCY_{name}": value for name, value in config.items()})
    Idempotency(app, db, scope=None, redis=redis)
    return app.extensions["idempotency"].settings


async def find_out(_operation):
    return None


YEARS = "from 1 second to 10 years"
POLICY = "'hold', 'retry', or a callable, not async"
WRONG_SETTINGS = [
    ("STORE", "'hybrid'", ["mysql", "Postgres"]),
    ("REDIS_PREFIX", "visible ASCII", ["with space", ""]),
    ("NAMESPACE", "visible ASCII", [None, "v 1"]),
    ("HEADER", "a header name", ["", "Idempotency Key", b"Idempotency-Key"]),
    ("REQUIRED", "True or False", ["yes", 1]),
    ("TTL", YEARS, [0, "3600", None, True, float("nan"), dt.timedelta(milliseconds=5), 10**5000]),
    ("REFUSE_OLD_KEYS", "True, False or 'require'", ["yes", 1, None]),
    ("LEASE", "from 1 second to 1 day", [0]),
    ("WAIT", "0 to 300 seconds", [-0.1, 301]),
    ("MAX_REQUEST_BYTES", "0 to 1 GiB", [-1, None, "16 MiB", 1.5]),
    ("TABLE", "SQL name of up to 50", ["record; drop table x", "x" * 51]),
    ("BIND_KEY", "a bind key, or None", ["", 1, str]),
    ("BIND_KEY", "None", ["nope"]),
    ("PROBLEM_BASE", "URI", ["https://example.com/a b"]),
    ("ON_STORE_ERROR", "'reject' or 'allow'", ["ignore"]),
]
WRONG_OPTIONS = [
    ("required", "True or False", ["no"]),
    ("ttl", YEARS, [0, "1h"]),
    ("key", "a callable that gives the key", ["order_id"]),
    ("scope", "a callable, or None", ["alice"]),
    ("fingerprint", "'request', 'json', a list of JSON pointers", ["body", []]),
    ("max_request_bytes", "an integer from 0 to 1 GiB", [-1]),
    ("store", "a callable that takes the response", [True]),
    ("authorize_replay", "a callable that takes the operation", [True]),
    ("name", "1 to 255 characters", ["", "x" * 256]),
    ("name", "without NUL and lone surrogates", ["a\0b", "a\ud800b"]),
    ("other_binds", "a list of bind keys", ["log", 7]),
    ("on_interrupted", POLICY, ["fail", None, find_out]),
]


def by_setting(name, value):
    set_up(**{name: value})


def by_option(name, value):
    idempotent(atomic=name != "on_interrupted", **{name: value})


def by_protect(name, value):
    Idempotency().protect(Blueprint("shop", __name__), atomic=name != "on_interrupted", **{name: value})


def test_what_is_wrong_names_itself_its_value_and_what_is_allowed():
    uses = [(by_setting, "IDEMPOTENCY_", *row) for row in WRONG_SETTINGS]
    uses += [(by_option, "", *row) for row in WRONG_OPTIONS]
    uses += [(by_protect, "", *row) for row in WRONG_OPTIONS if row[0] != "name"]
    for use, prefix, name, allowed, values in uses:
        for value in values:
            with pytest.raises(ConfigurationError) as caught:
                use(name, value)
            message = str(caught.value)
            assert message.startswith(f"{prefix}{name} is {shown(value)}; allowed: ")
            assert allowed in message


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (
            lambda: set_up(STOR="canary"),
            "IDEMPOTENCY_STOR is not a setting; .*: IDEMPOTENCY_STORE, .*_ENABLED$",
        ),
        (lambda: idempotent(timeout=5), "timeout is not an option.* required, ttl, wait"),
        (lambda: idempotent(lease=5), "lease is an option for atomic=False"),
        (lambda: idempotent("payments"), "takes a view, or options by name"),
        *(
            (
                lambda wrong=wrong: idempotent(fingerprint=["/ok", wrong]),
                f"'{wrong}' is not a JSON pointer",
            )
            for wrong in ("order", "/order~2", "order/id")
        ),
    ],
)
def test_what_is_unknown_or_misplaced_is_refused(use, said):
    with pytest.raises(ConfigurationError, match=said):
        use()
    Idempotency(*bare_app(IDEMPOTENT="x", IDEMPOTENCYKEY="x"), scope=None)  # of others


URLS = """
    canary localhost:6379/0 user:canary@nowhere.invalid:6379/0 ://canary redis://:canary@[nowhere
    redis+sentinel://:canary@nowhere.invalid/main redis://:canary@nowhere.invalid:port/0
    redis://:canary@nowhere.invalid/0?canary=canary redis://:canary@nowhere.invalid/0?protocol=7
    rediss://:canary@nowhere.invalid/0?ssl_cert_reqs=canary redis://:p@canary#word@127.0.0.1:6379/0
    redis://canary:12345?a=rest@host/0 redis://canary:12345/rest@host/0 unix://canary:12345/x@/redis.sock
"""
WRONG_SECRETS = [
    ("REDIS_URL", "a URL", [7]),
    ("REDIS_URL", "Allowed are redis://", URLS.split()),
    (
        "ENCRYPTION_KEYS",
        "a list of keys, newest first",
        ["canary" * 8, b"canary" * 8, 7, {"canary": 1}],
    ),
    (
        "ENCRYPTION_KEYS",
        "ENCRYPTION_KEYS[1] is not a key. Allowed are 32 bytes",
        [[GOOD, each] for each in (b"canary", "canary", "x" * 44, 7, None)],
    ),
]


def test_a_wrong_secret_is_named_and_not_shown():
    for name, allowed, values in WRONG_SECRETS:
        for value in values:
            with pytest.raises(ConfigurationError, match=f"^IDEMPOTENCY_{name}") as caught:
                set_up(**{name: value})
            message = str(caught.value)
            assert allowed in message, value
            for secret in "canary", GOOD:
                assert secret not in message + str(caught.value.__cause__)


MISPLACED = [
    lambda secret: Idempotency(bare_app()[0], secret),
    lambda secret: Idempotency(secret),  # noqa: PLW0108
    lambda secret: Idempotency(*bare_app(), scope=secret),
    lambda secret: Idempotency().protect(secret),
    lambda secret: idempotent(key=secret)(set_up),
    lambda secret: idempotent(fingerprint=[secret])(set_up),
    lambda secret: set_up(REDIS_PREFIX=secret * 3),
    *(
        lambda secret, name=name: set_up(**{name: secret})
        for name in ("STORE", "HEADER", "TTL", "BIND_KEY", "TABLE", "ACCEPT_UNSEALED")
    ),
]


@pytest.mark.parametrize("secret", [URI, REDIS, KEY, KEY.encode(), [KEY]])
def test_a_secret_in_the_wrong_place_is_not_shown(secret):
    for put in MISPLACED:
        with pytest.raises(ConfigurationError) as caught:
            put(secret)
        assert "canary" not in str(caught.value)
        assert type(secret).__name__ in str(caught.value)


@pytest.mark.parametrize(
    ("config", "client", "store"),
    [
        ({}, None, "postgres"),
        ({}, redis.Redis(), "hybrid"),
        ({"STORE": "hybrid", "REDIS_URL": REDIS}, None, "hybrid"),
        ({"REDIS_URL": "redis://:p@ss@nowhere.invalid:6379/0?socket_timeout=0.3"}, None, "hybrid"),
        ({"REDIS_URL": "rediss://:canary@nowhere.invalid"}, None, "hybrid"),
        ({"REDIS_URL": "unix://user:canary@/run/redis%40main.sock?db=1"}, None, "hybrid"),
    ],
)
def test_the_default_store_follows_from_what_there_is(config, client, store):
    assert set_up(client, **config).store == store


@pytest.mark.parametrize("table", ["idempotency_record", "other"])
def test_releases_side_by_side_agree_on_the_names_in_redis(redis_server, make_world, add_view, table):
    """They begin with a digest of the database and the table; a password is no part of it.

    A client that is given comes before the URL.
    """
    with redis.Redis.from_url(redis_server.url) as client:
        url = {"IDEMPOTENCY_REDIS_URL": "redis://127.0.0.1:1/0"}
        world = make_world(init={"redis": client}, IDEMPOTENCY_TABLE=table, **url)
        add_view(world)
        assert world.post().status_code == 201
        database = sa.make_url(world.app.config["SQLALCHEMY_DATABASE_URI"])
        text = "\n".join(map(str, (database.host, database.port, database.database, table)))
        prefix = f"idempotency:{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        assert {key.decode().rpartition(":")[0] for key in client.scan_iter()} == {prefix}


@pytest.mark.parametrize(
    ("uri", "named"),
    [
        ("sqlite:///shop.db", "begins with sqlite"),
        ("mysql+pymysql://shop:canary@nowhere.invalid/shop", "begins with mysql"),
        ("postgresql+psycopg_async://shop:canary@nowhere.invalid/shop", "not for asyncio"),
        ("postgresql+asyncpg://shop:canary@nowhere.invalid/shop", "not for asyncio"),
    ],
)
def test_another_database_or_driver_is_refused_by_name(uri, named):
    config = {}
    if re.search("pymysql|asyncpg", uri):  # which need not be installed here
        module = SimpleNamespace(paramstyle="pyformat", __version__="99.0")
        config = {"SQLALCHEMY_ENGINE_OPTIONS": {"module": module}}
    with pytest.raises(ConfigurationError, match=f"the records' database .*{named}") as caught:
        Idempotency(*bare_app(uri, **config), scope=None)
    assert "postgresql+psycopg2://" in str(caught.value)
    assert "canary" not in str(caught.value)


def twice():
    app, db = bare_app()
    for _ in range(2):
        Idempotency(app, db, scope=None)


def of_the_applications_own(schema):
    """A table that the application has already, and that is not taken for ours."""
    app, db = Flask("shop"), SQLAlchemy(metadata=sa.MetaData(schema=schema))
    app.config.update(SQLALCHEMY_DATABASE_URI=URI, IDEMPOTENCY_TABLE="payment")
    columns = sa.Column("id", sa.Integer, primary_key=True), sa.Column("created_at", sa.DateTime)
    sa.Table("payment", db.metadata, *columns)
    db.init_app(app)
    Idempotency(app, db, scope=None)


MISTAKES = [
    (
        lambda: Idempotency(*reversed(bare_app()), scope=None),
        r"app is .*SQLAlchemy.*allowed: a flask\.Flask",
    ),
    (lambda: Idempotency(*bare_app()), "the other's stored response.*scope=None"),
    (lambda: Idempotency(*bare_app(), scope="alice"), "scope is 'alice'; allowed: a callable"),
    (lambda: set_up(STORE="hybrid"), "'hybrid', which needs a Redis.*IDEMPOTENCY_REDIS"),
    (lambda: set_up(STORE="redis", REDIS_URL=REDIS), "set IDEMPOTENCY_REDIS_PREFIX"),
    (lambda: Idempotency(Flask("shop"), scope=None), r"call db\.init_app\(app\) before"),
    (lambda: Idempotency(bare_app()[0], SQLAlchemy(), scope=None), r"call db\.init_app\(app\) before"),
    (twice, "already has an Idempotency"),
    (lambda: of_the_applications_own(None), "payment is in .*choose another IDEMPOTENCY_TABLE"),
    (lambda: of_the_applications_own("shop"), "payment is in .*choose another IDEMPOTENCY_TABLE"),
    *(
        (lambda client=client: set_up(client), r"allowed: a redis\.Redis")
        for client in (object(), "redis://localhost", redis.asyncio.Redis())
    ),
]


@pytest.mark.parametrize(("make", "said"), MISTAKES)
def test_a_mistake_in_the_set_up_is_explained(make, said):
    with pytest.raises(ConfigurationError, match=said):
        make()


def test_one_object_is_set_up_on_two_applications_and_finds_their_database():
    """The URL may name no driver: then it means what SQLAlchemy makes of it."""
    first, db = bare_app()
    second = Flask("second")
    second.config["SQLALCHEMY_DATABASE_URI"] = "postgresql://shop@nowhere.invalid/shop"
    db.init_app(second)
    idempotency = Idempotency(first, scope=None)
    idempotency.init_app(second, db)
    assert "idempotency_record" in db.metadata.tables


@pytest.mark.parametrize("name", ["do_execute", "do_executemany", "do_execute_no_params"])
def test_who_may_execute_statements_before_the_extension_sees_them_is_refused(name):
    """What such a listener executes itself, no later one hears of: a COMMIT would double rows."""
    app, db = bare_app()

    def listener(*_arguments):
        return False

    with app.app_context():
        targets = db.engine, sa.Engine
    for target in targets:
        sa.event.listen(target, name, listener)
        try:
            with pytest.raises(ConfigurationError, match="add it after idempotency.init_app"):
                Idempotency(app, db, scope=None)
        finally:
            sa.event.remove(target, name, listener)
    Idempotency(app, db, scope=None)  # without it
