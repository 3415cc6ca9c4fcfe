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
from flask_sqlalchemy_lite import SQLAlchemy as Lite
from sqlalchemy.orm import DeclarativeBase, scoped_session, sessionmaker

from flask_idempotency import ConfigurationError, Idempotency, idempotent
from flask_idempotency.core.errors import shown
from flask_idempotency.web.settings import OPTIONS, SETTINGS

ELSEWHERE = "://shop:canary@nowhere.invalid/shop"
URI = f"postgresql+psycopg2{ELSEWHERE}"
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


YEARS, BYTES = "from 1 second to 10 years", "an integer from 0 to 1 GiB"
WRONG = [
    ("store", "'hybrid', 'postgres', 'redis' or 'sql'", ["mysql", "Postgres", object(), 5, dict]),
    ("redis_prefix", "visible ASCII", ["with space", ""]),
    ("header", "a header name", ["", "Idempotency Key", b"Idempotency-Key"]),
    ("namespace", "visible ASCII", [None, "v 1"]),
    ("required", "True or False", ["yes", 1]),
    ("ttl", YEARS, [0, "3600", None, True, float("nan"), dt.timedelta(milliseconds=5), 10**5000]),
    ("refuse_old_keys", "True, False or 'require'", ["yes", 1, None]),
    ("lease", "from 1 second to 1 day", [0]),
    ("max_attempts", "an integer from 1 to 10000", [0, -1, 1.5, True, "3", 10_001]),
    ("wait", "0 to 300 seconds", [-0.1, 301]),
    ("max_request_bytes", BYTES, [-1, "16 MiB", 1.5]),
    ("max_response_bytes", BYTES, [None]),
    ("table", "SQL name of up to 50", ["record; drop table x", "x" * 51]),
    ("bind_key", "a bind key, or None", ["", 1, str]),
    ("bind_key", "None", ["nope"]),
    ("problem_base", "URI", ["https://example.com/a b"]),
    ("on_store_error", "'reject' or 'allow'", ["ignore"]),
    ("key", "a callable that gives the key", ["order_id"]),
    ("scope", "a callable, or None", ["alice"]),
    ("fingerprint", "'request', 'json', a list of JSON pointers", ["body", []]),
    ("authorize_replay", "a callable that takes the operation", [True]),
    ("name", "1 to 255 characters, without NUL and lone surrogates", ["", "x" * 256, "a\0", "\ud800"]),
    ("other_binds", "a list of bind keys", ["log", 7]),
    ("on_interrupted", "'hold', 'retry', or a callable, not async", ["fail", None, find_out]),
]


@pytest.mark.parametrize(("name", "allowed", "values"), WRONG)
def test_what_is_wrong_names_itself_its_value_and_what_is_allowed(name, allowed, values):
    setting, uses = f"IDEMPOTENCY_{name.upper()}", {}
    if setting in SETTINGS:
        uses[setting] = lambda value: set_up(**{name.upper(): value})
    if name in OPTIONS and name != "store":  # which is something else
        is_leased = name in ("lease", "on_interrupted")
        uses[name] = lambda value: idempotent(atomic=not is_leased, **{name: value})
    assert uses
    for shown_name, use in uses.items():
        for value in values:
            with pytest.raises(ConfigurationError) as caught:
                use(value)
            assert str(caught.value).startswith(f"{shown_name} is {shown(value)}; allowed: ")
            assert allowed in str(caught.value)


URLS = """
    canary localhost:6379/0 user:canary@nowhere.invalid:6379/0 redis://:canary@[nowhere
    redis+sentinel://:canary@nowhere.invalid/main redis://:canary@nowhere.invalid:port/0
    redis://:canary@nowhere.invalid/0?canary=canary redis://:canary@nowhere.invalid/0?protocol=7
    rediss://:canary@nowhere.invalid/0?ssl_cert_reqs=canary redis://:p@canary#word@127.0.0.1:6379/0
    redis://canary:12345?a=rest@host/0 redis://canary:12345/rest@host/0 unix://canary:12345/x@/redis.sock
"""
NO_KEYS = (
    b"canary",
    "canary",
    "x" * 44,
    b"n" * 31,
    "A" * 42,
    "+/" * 21 + "A=",
    "A" * 43 + "=\n",
    7,
    None,
)
NO_KEY = "ENCRYPTION_KEYS[1] is not a key. Allowed are 32 bytes"
WRONG_SECRETS = [
    ("REDIS_URL", "a URL", [7]),
    ("REDIS_URL", "Allowed are redis://", URLS.split()),
    ("ENCRYPTION_KEYS", "a list of keys, newest first", ["canary" * 8, b"canary" * 8, {"canary": 1}]),
    ("ENCRYPTION_KEYS", NO_KEY, [[GOOD, each] for each in NO_KEYS]),
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


@pytest.mark.parametrize("secret", [URI, REDIS, KEY.encode(), [KEY]])
def test_a_secret_in_the_wrong_place_is_not_shown(secret):
    for put in MISPLACED:
        with pytest.raises(ConfigurationError) as caught:
            put(secret)
        assert "canary" not in str(caught.value)
        assert type(secret).__name__ in str(caught.value)


REDIS_URLS = """
    redis://:p@ss@nowhere.invalid:6379/0?socket_timeout=0.3 rediss://:canary@nowhere.invalid
    unix://user:canary@/run/redis%40main.sock?db=1
"""


def test_the_default_store_follows_from_what_there_is():
    assert [set_up().store, set_up(redis.Redis()).store] == ["postgres", "hybrid"]
    assert {set_up(REDIS_URL=url).store for url in REDIS_URLS.split()} == {"hybrid"}


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


def on(uri):
    config = {}
    if re.search("pymysql|asyncpg", uri):  # which need not be installed here
        module = SimpleNamespace(paramstyle="pyformat", __version__="99.0")
        config = {"SQLALCHEMY_ENGINE_OPTIONS": {"module": module}}
    Idempotency(*bare_app(uri, **config), scope=None)


def twice():
    app, db = bare_app()
    for _ in range(2):
        Idempotency(app, db, scope=None)


def with_a_table_of_the_applications_own():
    app, db = bare_app(IDEMPOTENCY_TABLE="payment")
    sa.Table("payment", db.metadata, sa.Column("created_at", sa.DateTime, primary_key=True))
    Idempotency(app, db, scope=None)


NO_DATABASE, NO_POINTER = r"call db\.init_app\(app\) before", "'{}' is not a JSON pointer"
NOT_OURS, USE = "the records' database begins with {}", r".*postgresql\+psycopg2://"
NO_CLIENT = r"allowed: a redis\.Redis"
MISTAKES = [
    (lambda: set_up(STOR="canary"), "STOR is not a setting; .*: IDEMPOTENCY_STORE, .*_ENABLED$"),
    (lambda: set_up(STORE="hybrid"), "'hybrid', which needs a Redis.*IDEMPOTENCY_REDIS"),
    (lambda: set_up(STORE="redis", REDIS_URL=REDIS), "set IDEMPOTENCY_REDIS_PREFIX"),
    (lambda: idempotent(timeout=5), "timeout is not an option.* required, ttl, wait"),
    (lambda: idempotent(lease=5), "lease is an option for atomic=False"),
    (lambda: idempotent("payments"), "takes a view, or options by name"),
    *(
        (lambda wrong=wrong: idempotent(fingerprint=["/ok", wrong]), NO_POINTER.format(wrong))
        for wrong in ("order", "#/foo", "/a~", "/order~2", " /foo")
    ),
    (lambda: Idempotency(*reversed(bare_app()), scope=None), r"app is .*allowed: a flask\.Flask"),
    (lambda: Idempotency(*bare_app()), "the other's stored response.*scope=None"),
    (lambda: Idempotency(*bare_app(), scope="alice"), "scope is 'alice'; allowed: a callable"),
    (lambda: Idempotency(Flask("shop"), scope=None), NO_DATABASE),
    (lambda: Idempotency(bare_app()[0], SQLAlchemy(), scope=None), NO_DATABASE),
    (twice, "already has an Idempotency"),
    (with_a_table_of_the_applications_own, "payment is in .*choose another IDEMPOTENCY_TABLE"),
    (lambda: set_up(object()), NO_CLIENT),
    (lambda: set_up(REDIS), NO_CLIENT),
    (lambda: set_up(redis.asyncio.Redis()), NO_CLIENT),
    (lambda: on("sqlite:///shop.db"), NOT_OURS.format("sqlite") + USE),
    (lambda: on(f"mysql+pymysql{ELSEWHERE}"), NOT_OURS.format("mysql") + USE),
    (lambda: on(f"postgresql+psycopg_async{ELSEWHERE}"), "not for asyncio" + USE),
    (lambda: on(f"postgresql+asyncpg{ELSEWHERE}"), "not for asyncio" + USE),
]


@pytest.mark.parametrize(("make", "said"), MISTAKES)
def test_a_mistake_is_explained(make, said):
    with pytest.raises(ConfigurationError, match=said) as caught:
        make()
    assert "canary" not in str(caught.value)


def test_one_object_is_set_up_on_two_applications_and_finds_their_database():
    """The URL may name no driver: then it means what SQLAlchemy makes of it."""
    first, db = bare_app()
    second = Flask("second")
    second.config["SQLALCHEMY_DATABASE_URI"] = "postgresql://shop@nowhere.invalid/shop"
    db.init_app(second)
    first.config.update(IDEMPOTENT="x", IDEMPOTENCYKEY="x")  # of others
    idempotency = Idempotency(first, scope=None)
    idempotency.init_app(second, db)
    assert "idempotency_record" in db.metadata.tables


@pytest.mark.parametrize("name", ["do_execute", "do_executemany", "do_execute_no_params"])
def test_who_may_execute_statements_before_the_extension_sees_them_is_refused(name):
    """What such a listener executes itself, no later one hears of: a COMMIT would double rows."""
    app, db = bare_app()
    listener = lambda *_arguments: False  # noqa: E731
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


class Base(DeclarativeBase):
    pass


def plain(**options):
    return {"session": scoped_session(sessionmaker(sa.create_engine(URI))), **options}


NOT_SCOPED = "scoped_session over a sessionmaker"
WRONG_SESSIONS = [
    (None, {"session": sessionmaker(sa.create_engine(URI))}, NOT_SCOPED),
    (None, {"session": scoped_session(sessionmaker())}, "the session's bind is None; allowed: "),
    (None, plain(metadata=None), "metadata is None, and the tables"),
    (None, plain(metadata=Base), r"metadata=Base.metadata\) with neither"),
    (None, {"db": object()}, "Flask-SQLAlchemy-Lite"),
    (Lite, plain(), "both db and session"),
    (Lite, {"metadata": None}, r"Idempotency\(app, db, metadata=Base.metadata\)"),
    (Lite, {"IDEMPOTENCY_BIND_KEY": "north"}, "BIND_KEY is 'north'; allowed: 'default'"),
    (SQLAlchemy, {}, "beside Flask-SQLAlchemy, which has its own"),
    (SQLAlchemy, {"db": SQLAlchemy(), "metadata": None}, r"call db.init_app\(app\) before"),
]


@pytest.mark.parametrize(("kind", "given", "said"), WRONG_SESSIONS)
def test_what_is_no_session_is_refused_with_what_is_allowed(kind, given, said):
    app, given = Flask("shop"), dict(given)
    app.config.update(SQLALCHEMY_ENGINES={"default": URI}, SQLALCHEMY_DATABASE_URI=URI)
    app.config["IDEMPOTENCY_BIND_KEY"] = given.pop("IDEMPOTENCY_BIND_KEY", None)
    if kind:
        given.setdefault("db", kind(app))
    with pytest.raises(ConfigurationError, match=said):
        Idempotency(app, **{"metadata": Base.metadata, "scope": None, **given})
