"""What names in Redis begin with tells databases apart, or has to be given."""

import hashlib
import itertools
import re

import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import URL, make_url

from flask_idempotency import ConfigurationError, Idempotency

PG = "postgresql+psycopg2://"


def shown(value):
    """An id that is the same in every process, without the address of a function."""
    return re.sub(r" at 0x\w+", "", str(value))


@pytest.fixture
def prefix_of(redis_server):
    """The prefix of an application on a database, which is not connected to."""

    def prefix(url, store="hybrid", config=None, db=None, **options):
        db, app = db or SQLAlchemy(), Flask("shop")
        app.config.update(
            SQLALCHEMY_DATABASE_URI=url,
            SQLALCHEMY_ENGINE_OPTIONS=options,
            IDEMPOTENCY_REDIS_URL=redis_server.url,
            IDEMPOTENCY_STORE=store,
            **(config or {}),
        )
        db.init_app(app)
        Idempotency(app, db, scope=None)
        state = app.extensions["idempotency"]
        if store == "hybrid":
            return state.lock._prefix
        return state.records.prefix.removesuffix("record:")

    return prefix


def former(*place):
    """The prefix of the releases before."""
    text = "\n".join(map(str, (*place, "idempotency_record")))
    return f"idempotency:{hashlib.sha256(text.encode()).hexdigest()[:12]}:"


@pytest.fixture(autouse=True)
def _no_defaults(monkeypatch):
    for name in "PGHOST", "PGHOSTADDR", "PGPORT", "PGSERVICE", "PGDATABASE", "PGUSER":
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("store", ["hybrid", "redis"])
@pytest.mark.parametrize(
    ("url", "options", "place"),
    [
        (f"{PG}db.internal/shop", {}, ("db.internal", None, "shop")),
        (f"{PG}u:p@db.internal:6432/shop?sslmode=require", {}, ("db.internal", 6432, "shop")),
        (f"{PG}db/shop?application_name=web", {}, ("db", None, "shop")),
        (f"{PG}db/shop", {"connect_args": {"connect_timeout": 3}}, ("db", None, "shop")),
        (f"{PG}db/shop", {"creator": lambda: None}, ("db", None, "shop")),
        (f"{PG}u@db/shop", {"connect_args": {"user": "v"}}, ("db", None, "shop")),
        (f"{PG}/shop", {}, (None, None, "shop")),
        (f"{PG}/shop?connect_timeout=3", {}, (None, None, "shop")),
    ],
    ids=shown,
)
def test_an_upgrade_forgets_nothing(prefix_of, monkeypatch, store, url, options, place):
    has = make_url(url)
    monkeypatch.setenv("PGDATABASE", "other")
    monkeypatch.setenv("PGUSER", "other")
    monkeypatch.setenv("PGHOSTADDR", "")
    if has.host:
        monkeypatch.setenv("PGHOST", "other")
    if has.port:
        monkeypatch.setenv("PGPORT", "7432")
    assert prefix_of(url, store, **options) == former(*place)


APART = [
    (f"{PG}/shop", {}),
    (f"{PG}/bank", {}),
    (f"{PG}db/shop", {}),
    (f"{PG}db:6432/shop", {}),
    (f"{PG}/shop?host=/var/run/a", {}),
    (f"{PG}/shop?host=/var/run/b", {}),
    (f"{PG}/shop?host=/var/run/a&port=6432", {}),
    (f"{PG}/shop?host=a:1&host=b:2", {}),
    (f"{PG}/shop?host=a:1&host=c:2", {}),
    (f"{PG}/shop?host=a,b&port=1,2", {}),
    (f"{PG}/shop?hostaddr=10.0.0.1", {}),
    (f"{PG}/?service=staging", {}),
    (f"{PG}/?service=production", {}),
    (f"{PG}/?dbname=shop", {}),
    (f"{PG}db/shop?port=7432", {}),
    (f"{PG}db/shop?host=other", {}),
    (f"{PG}db/shop?dbname=other", {}),
    (f"{PG}", {"host": "a", "dbname": "shop"}),
    (f"{PG}", {"host": "b", "dbname": "shop"}),
    (f"{PG}/shop", {"host": "/var/run/c"}),
    (f"{PG}db/shop", {"port": 8432}),
    (URL.create("postgresql+psycopg2", database="shop", query={"host": ("c", "d")}), {}),
]


def test_different_databases_have_different_prefixes(prefix_of, monkeypatch):
    prefixes = [prefix_of(url, connect_args=args) for url, args in APART]
    for name in "PGHOST", "PGPORT", "PGSERVICE":
        monkeypatch.setenv(name, "6432")
        prefixes.append(prefix_of(f"{PG}/shop"))
    assert len(set(prefixes)) == len(APART) + 3


@pytest.mark.parametrize(("url", "args"), [each for each in APART if "=" in str(each[0]) or each[1]])
def test_the_store_that_has_nothing_else_asks_for_a_name(prefix_of, url, args):
    """With another prefix than before, it would forget its records."""
    with pytest.raises(
        ConfigurationError, match=r"set IDEMPOTENCY_REDIS_PREFIX.*'idempotency:\w{12}:'"
    ):
        prefix_of(url, "redis", connect_args=args)
    named = {"IDEMPOTENCY_REDIS_PREFIX": "shop:"}
    assert prefix_of(url, "redis", named, connect_args=args) == "shop:"


CHOSEN = {
    "the user, by default": [(f"{PG}{user}:pw@db:5432", {}, {}) for user in ("a", "b")],
    "connect_args' user": [(f"{PG}db:5432", {"user": user}, {}) for user in ("a", "b")],
    "?user=": [(f"{PG}db:5432/?user={user}", {}, {}) for user in ("a", "b")],
    "PGUSER": [(f"{PG}db:5432", {}, {"PGUSER": user}) for user in ("a", "b")],
    "connect_args' database": [(f"{PG}u@db:5432", {"database": name}, {}) for name in ("a", "b")],
    "PGDATABASE": [(f"{PG}u@db:5432", {}, {"PGDATABASE": name}) for name in ("a", "b")],
    "PGDATABASE, no name": [
        (f"{PG}db:5432/shop", {"dbname": None}, {"PGDATABASE": name}) for name in ("a", "b")
    ],
    "PGPORT": [(f"{PG}u@db/shop", {}, {"PGPORT": port}) for port in ("6432", "7432")],
    "?service=": [(f"{PG}u@db:5432/shop?service={name}", {}, {}) for name in ("a", "b")],
    "PGSERVICE": [(f"{PG}u@db:5432/shop", {}, {"PGSERVICE": name}) for name in ("a", "b")],
    "?hostaddr=": [(f"{PG}u@db:5432/shop?hostaddr=10.0.0.{n}", {}, {}) for n in (1, 2)],
    "connect_args' hostaddr": [
        (f"{PG}u@db:5432/shop", {"hostaddr": f"10.0.0.{n}"}, {}) for n in (1, 2)
    ],
    "PGHOSTADDR": [(f"{PG}u@db:5432/shop", {}, {"PGHOSTADDR": f"10.0.0.{n}"}) for n in (1, 2)],
}


@pytest.mark.parametrize("shops", CHOSEN.values(), ids=CHOSEN.keys())
def test_what_libpq_takes_from_elsewhere_tells_databases_apart_or_needs_a_name(prefix_of, shops):
    prefixes = set()
    for url, args, environment in shops:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            prefixes.add(prefix_of(url, connect_args=args))
            with pytest.raises(ConfigurationError, match="set IDEMPOTENCY_REDIS_PREFIX"):
                prefix_of(url, "redis", connect_args=args)
    assert len(prefixes) == 2


OTHER_DRIVERS = "db", "odbc_connect", "option_files", "read_default_file", "unix_sock", "unix_socket"


@pytest.mark.parametrize("name", OTHER_DRIVERS)
def test_what_other_drivers_take_in_place_of_the_url_needs_a_name(prefix_of, name):
    with pytest.raises(ConfigurationError, match="set IDEMPOTENCY_REDIS_PREFIX"):
        prefix_of(f"{PG}db/shop?{name}=a", "redis")


def test_a_password_is_no_part_of_it_where_the_user_is(prefix_of):
    assert prefix_of(f"{PG}u:one@db") == prefix_of(f"{PG}u:two@db") != prefix_of(f"{PG}v:one@db")


@pytest.mark.parametrize("store", ["hybrid", "redis"])
@pytest.mark.parametrize(
    ("url", "options"),
    [
        (PG, {}),
        (f"{PG}db", {}),
        (f"{PG}u@db", {"creator": lambda: None}),
        (f"{PG}db/shop?dsn=port%3D1+password%3Dcanary", {}),
        (PG, {"creator": lambda: None}),
        (f"{PG}/shop", {"creator": lambda: None}),
        (f"{PG}/?dsn=host%3Da+password%3Dcanary", {}),
        (PG, {"connect_args": {"dsn": "host=a password=canary"}}),
    ],
    ids=shown,
)
def test_a_database_that_cannot_be_read_from_the_url_needs_a_name(prefix_of, store, url, options):
    with pytest.raises(ConfigurationError, match="set IDEMPOTENCY_REDIS_PREFIX") as caught:
        prefix_of(url, store, **options)
    assert "canary" not in str(caught.value)


def test_so_does_one_in_memory(prefix_of, tmp_path):
    with pytest.raises(ConfigurationError, match="set IDEMPOTENCY_REDIS_PREFIX"):
        prefix_of("sqlite://", "redis")
    assert prefix_of(f"sqlite:///{tmp_path}/shop.db", "redis") == former(
        None, None, f"{tmp_path}/shop.db"
    )


def test_the_bind_of_the_records_counts(prefix_of):
    def bound(host):
        binds = {"ledger": {"url": f"{PG}/shop", "connect_args": {"host": host}}}
        return prefix_of(
            f"{PG}db/shop", config={"SQLALCHEMY_BINDS": binds, "IDEMPOTENCY_BIND_KEY": "ledger"}
        )

    assert len({bound("a"), bound("b"), prefix_of(f"{PG}db/shop")}) == 3


def test_so_do_the_options_of_the_object_that_makes_the_engines(prefix_of):
    def made(host):
        return prefix_of(f"{PG}/shop", db=SQLAlchemy(engine_options={"connect_args": {"host": host}}))

    assert len({made("a"), made("b"), prefix_of(f"{PG}/shop")}) == 3


def test_a_password_is_no_part_of_it(prefix_of):
    sent = itertools.product(["one", "two"], ["", "?host=a&password={}", "?host=/run/a&user={}"])
    pairs = [f"{PG}u:{word}@/shop{query.format(word)}" for word, query in sent]
    assert len({prefix_of(url) for url in pairs}) == 3
