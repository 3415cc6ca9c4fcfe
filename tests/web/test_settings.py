"""Mistakes in settings and options are named at once: what, which value, and what is allowed."""

import datetime as dt
import hashlib
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


WRONG = {
    "'hybrid'": [("STORE", "mysql"), ("STORE", "Postgres")],
    "visible ASCII": [
        ("REDIS_PREFIX", "with space"),
        ("REDIS_PREFIX", ""),
        ("NAMESPACE", None),
        ("NAMESPACE", "v 1"),
    ],
    "a header name": [("HEADER", ""), ("HEADER", "Idempotency Key"), ("HEADER", b"Idempotency-Key")],
    "True or False": [
        ("REQUIRED", "yes"),
        ("REQUIRED", 1),
        ("PURGE", None),
        ("ACCEPT_UNSEALED", "yes"),
        ("ENABLED", 0),
    ],
    "from 1 second to 10 years": [
        *(("TTL", each) for each in (0, -1, "3600", None, True, float("nan"), float("inf"))),
        ("TTL", dt.timedelta(milliseconds=5)),
        pytest.param("TTL", 10**5000, id="TTL of 5000 digits"),
    ],
    "True, False or 'require'": [("REFUSE_OLD_KEYS", each) for each in ("yes", 1, None)],
    "from 1 second to 1 day": [("LEASE", 0)],
    "0 to 300 seconds": [("WAIT", -0.1), ("WAIT", 301)],
    "0 to 1 GiB": [
        *(("MAX_REQUEST_BYTES", each) for each in (-1, None, "16 MiB", 1.5)),
        ("MAX_RESPONSE_BYTES", -1),
    ],
    "SQL name of up to 50": [("TABLE", "record; drop table x"), ("TABLE", "x" * 51)],
    "a bind key, or None": [("BIND_KEY", each) for each in ("", 1, str)],
    "None": [("BIND_KEY", "nope")],
    "URI": [("PROBLEM_BASE", "https://example.com/a b")],
    "'reject' or 'allow'": [("ON_STORE_ERROR", "ignore")],
}


@pytest.mark.parametrize(
    ("allowed", "name", "value"),
    [
        pytest.param(allowed, *case.values, id=case.id) if hasattr(case, "values") else (allowed, *case)
        for allowed, cases in WRONG.items()
        for case in cases
    ],
)
def test_a_wrong_setting_names_itself_its_value_and_what_is_allowed(allowed, name, value):
    with pytest.raises(ConfigurationError) as caught:
        set_up(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"IDEMPOTENCY_{name} is {shown(value)}; allowed: ")
    assert allowed in message


WRONG_SECRETS = {
    "REDIS_URL": {
        "a URL": [7],
        "Allowed are redis://": [
            "canary",
            "localhost:6379/0",
            "user:canary@nowhere.invalid:6379/0",
            "://canary",
            "redis+sentinel://:canary@nowhere.invalid/main",
            "redis://:canary@[nowhere",
            "redis://:canary@nowhere.invalid/0?canary=canary",
            "rediss://:canary@nowhere.invalid/0?ssl_cert_reqs=canary",
            "redis://:canary@nowhere.invalid/0?protocol=7",
            "redis://:canary@nowhere.invalid:port/0",
            "redis://:p@canary#word@127.0.0.1:6379/0",
            "redis://canary:12345?a=rest@host/0",
            "redis://canary:12345/rest@host/0",
            "unix://canary:12345/x@/run/redis.sock",
        ],
    },
    "ENCRYPTION_KEYS": {
        "a list of keys, newest first": [
            "canary" * 8,
            b"canary" * 8,
            7,
            {"canary"},
            iter(["canary"]),
            {"canary": 1},
        ],
        "ENCRYPTION_KEYS[1] is not a key. Allowed are 32 bytes": [
            [GOOD, wrong] for wrong in (b"canary", "canary", "x" * 44, 7, None)
        ],
    },
}


@pytest.mark.parametrize(
    ("name", "allowed", "value"),
    [
        (name, allowed, value)
        for name, every in WRONG_SECRETS.items()
        for allowed, values in every.items()
        for value in values
    ],
)
def test_a_wrong_secret_is_named_and_not_shown(name, allowed, value):
    with pytest.raises(ConfigurationError, match=f"^IDEMPOTENCY_{name}") as caught:
        set_up(**{name: value})
    message = str(caught.value)
    assert allowed in message
    for secret in "canary", GOOD:
        assert secret not in message + str(caught.value.__cause__)


MISPLACED = {
    "db": lambda secret: Idempotency(bare_app()[0], secret),
    "app": lambda secret: Idempotency(secret),  # noqa: PLW0108
    "scope": lambda secret: Idempotency(*bare_app(), scope=secret),
    "protect": lambda secret: Idempotency().protect(secret),
    "an option": lambda secret: idempotent(key=secret)(set_up),
    "pointers": lambda secret: idempotent(fingerprint=[secret])(set_up),
    **{
        name: lambda secret, name=name: set_up(**{name: secret})
        for name in ("STORE", "HEADER", "TTL", "BIND_KEY", "TABLE", "ACCEPT_UNSEALED")
    },
}


@pytest.mark.parametrize("secret", [URI, REDIS, KEY, KEY.encode(), [KEY]])
@pytest.mark.parametrize("place", [*MISPLACED, "REDIS_PREFIX"])
def test_a_secret_in_the_wrong_place_is_not_shown(place, secret):
    put = MISPLACED.get(place, lambda secret: set_up(REDIS_PREFIX=secret * 3))
    with pytest.raises(ConfigurationError) as caught:
        put(secret)
    assert "canary" not in str(caught.value)
    assert type(secret).__name__ in str(caught.value)


def test_an_unknown_setting_is_refused_with_those_that_there_are():
    refused = "IDEMPOTENCY_STOR is not a setting; there are: IDEMPOTENCY_STORE, .*_ENABLED$"
    with pytest.raises(ConfigurationError, match=refused):
        set_up(STOR="canary")
    Idempotency(*bare_app(IDEMPOTENT="x", IDEMPOTENCYKEY="x"), scope=None)  # of others


@pytest.mark.parametrize(
    ("config", "client", "store"),
    [
        ({}, None, "postgres"),
        ({}, redis.Redis(), "hybrid"),
        ({"STORE": "hybrid", "REDIS_URL": REDIS}, None, "hybrid"),
        *(
            ({"REDIS_URL": url}, None, "hybrid")
            for url in (
                "redis://:p@ss@nowhere.invalid:6379/0?socket_timeout=0.3",
                "rediss://:canary@nowhere.invalid",
                "unix://user:canary@/run/redis%40main.sock?db=1",
            )
        ),
    ],
)
def test_the_default_store_follows_from_what_there_is(config, client, store):
    assert set_up(client, **config).store == store


def test_a_client_that_is_given_comes_before_the_url(redis_server, make_world, add_view):
    with redis.Redis.from_url(redis_server.url) as client:
        world = make_world(init={"redis": client}, IDEMPOTENCY_REDIS_URL="redis://127.0.0.1:1/0")
        add_view(world)
        assert world.post().status_code == 201
        assert client.dbsize() > 0


@pytest.mark.parametrize("table", [{}, {"IDEMPOTENCY_TABLE": "other"}])
def test_releases_side_by_side_agree_on_the_names_in_redis(redis_server, make_world, add_view, table):
    """They begin with a digest of the database and the table; a password is no part of it."""
    world = make_world(**table)
    add_view(world)
    world.post()
    url = sa.make_url(world.app.config["SQLALCHEMY_DATABASE_URI"])
    name = table.get("IDEMPOTENCY_TABLE", "idempotency_record")
    text = "\n".join(map(str, (url.host, url.port, url.database, name)))
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    with redis.Redis.from_url(redis_server.url) as client:
        assert {key.decode().rpartition(":")[0] for key in client.scan_iter()} == {
            f"idempotency:{digest}"
        }


OTHER_DATABASES = {
    "begins with sqlite": ["sqlite:///shop.db"],
    "begins with mysql": ["mysql+pymysql://shop:canary@nowhere.invalid/shop"],
    "not for asyncio": [
        "postgresql+psycopg_async://shop:canary@nowhere.invalid/shop",
        "postgresql+asyncpg://shop:canary@nowhere.invalid/shop",
    ],
}


@pytest.mark.parametrize(
    ("named", "uri"), [(named, uri) for named, uris in OTHER_DATABASES.items() for uri in uris]
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


MISTAKES = {
    "swapped": (
        lambda: Idempotency(*reversed(bare_app()), scope=None),
        r"app is .*SQLAlchemy.*allowed: a flask\.Flask",
    ),
    "no scope": (lambda: Idempotency(*bare_app()), "the other's stored response.*scope=None"),
    "no callable": (
        lambda: Idempotency(*bare_app(), scope="alice"),
        "scope is 'alice'; allowed: a callable",
    ),
    "no Redis": (
        lambda: set_up(STORE="hybrid"),
        "'hybrid', which needs a Redis.*IDEMPOTENCY_REDIS",
    ),
    "no prefix": (
        lambda: set_up(STORE="redis", REDIS_URL=REDIS),
        "set IDEMPOTENCY_REDIS_PREFIX",
    ),
    "no database": (
        lambda: Idempotency(Flask("shop"), scope=None),
        r"call db\.init_app\(app\) before",
    ),
    "another database": (
        lambda: Idempotency(bare_app()[0], SQLAlchemy(), scope=None),
        r"call db\.init_app\(app\) before",
    ),
    "twice": (twice, "already has an Idempotency"),
    **{
        f"{type(client).__name__} as a client": (
            lambda client=client: Idempotency(*bare_app(), scope=None, redis=client),
            r"allowed: a redis\.Redis",
        )
        for client in (object(), "redis://localhost", redis.asyncio.Redis())
    },
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_set_up_is_explained(mistake):
    make, said = MISTAKES[mistake]
    with pytest.raises(ConfigurationError, match=said):
        make()


@pytest.mark.parametrize("schema", [None, "shop"])
def test_a_table_of_the_applications_own_is_not_taken_for_ours(schema):
    app, db = Flask("shop"), SQLAlchemy(metadata=sa.MetaData(schema=schema))
    app.config.update(SQLALCHEMY_DATABASE_URI=URI, IDEMPOTENCY_TABLE="payment")

    class Payment(db.Model):
        __tablename__ = "payment"
        id = sa.Column(sa.Integer, primary_key=True)
        created_at = sa.Column(sa.DateTime)

    db.init_app(app)
    with pytest.raises(ConfigurationError, match="payment is in .*choose another IDEMPOTENCY_TABLE"):
        Idempotency(app, db, scope=None)


def test_one_object_is_set_up_on_two_applications_and_finds_their_database():
    """The URL may name no driver: then it means what SQLAlchemy makes of it."""
    first, db = bare_app()
    second = Flask("second")
    second.config["SQLALCHEMY_DATABASE_URI"] = URI
    db.init_app(second)
    second.config["SQLALCHEMY_DATABASE_URI"] = "postgresql://shop@nowhere.invalid/shop"
    idempotency = Idempotency(first, scope=None)
    idempotency.init_app(second, db)
    assert "idempotency_record" in db.metadata.tables


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
            Idempotency(app, db, scope=None)
    finally:
        sa.event.remove(engine, name, listener)
    Idempotency(app, db, scope=None)  # without it
