"""A database for each tenant: every record lies beside its rows, and nothing crosses."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import psycopg2
import pytest
import sqlalchemy as sa
from flask import Flask, g, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.exc import ProgrammingError
from werkzeug.test import Client

import servers
from flask_idempotency import (
    ConfigurationError,
    Idempotency,
    NotAtomic,
    current_operation,
    idempotent,
)
from flask_idempotency.testing import CRASH_POINTS, age, crash_at
from laboratory import running
from tests.docs.pages import ROOT, blocks
from tests.drivers import EACH
from tests.integration.apps import tenant_shop
from tests.integration.apps.tenant_shop import TENANTS, Payment
from tests.integration.commands.running import runner
from tests.waiting import PATIENCE_SECONDS

KINDS = ["flask-sqlalchemy", "lite"]
OF_EACH_KIND = pytest.mark.parametrize("kind", KINDS, indirect=True)
"""For a test of what the application's kind of session has a part in."""


@pytest.fixture
def kind(request: Any) -> str:
    return getattr(request, "param", KINDS[0])


@pytest.fixture
def urls(databases: Any, driver: str) -> Any:
    taken = {name: databases.take() for name in (*TENANTS, "fr")}
    yield {name: url.replace("postgresql://", f"{driver}://") for name, url in taken.items()}
    for url in taken.values():
        databases.give_back(url)


def rows_of(url: str, statement: str) -> list[Any]:
    with contextlib.closing(psycopg2.connect(servers.plain_dsn(url))) as connection:
        cursor = connection.cursor()
        cursor.execute(statement)
        return cursor.fetchall()


def stored(url: str) -> tuple[int, int]:
    """How many payments and how many completed records a database has."""
    records = "SELECT count(*) FROM idempotency_record WHERE state = 'completed'"
    (payments,), (completed,) = rows_of(url, f"SELECT count(*) FROM payment UNION ALL ({records})")
    return payments, completed


@pytest.fixture
def make_shop(urls: Any, kind: str, redis_server: Any) -> Any:
    made = []

    def make(**config: Any) -> Any:
        config = {"IDEMPOTENCY_REDIS_URL": redis_server.url, "TESTING": True, **config}
        app, db, idempotency = tenant_shop.make_app(kind, urls, **config)
        tenant_shop.create_tables(app, db, kind)
        made.append((app, db))
        return SimpleNamespace(app=app, db=db, idempotency=idempotency, post=poster(app))

    yield make
    for app, db in made:
        with app.app_context():
            for engine in db.engines.values():
                assert engine.pool.checkedout() == 0, "a connection was not given back"
                engine.dispose()


def poster(app: Any) -> Any:
    def post(tenant: str | None, key: str, path: str = "/payments", **headers: str) -> Any:
        named = {} if tenant is None else {"X-Tenant": tenant}
        every = {"Idempotency-Key": key, **named, **headers}
        return app.test_client().post(path, headers=every)

    return post


@pytest.fixture
def shop(make_shop: Any) -> Any:
    return make_shop()


@EACH
@OF_EACH_KIND
def test_each_record_lies_beside_its_rows(shop, urls):
    first = {tenant: shop.post(tenant, "one-key") for tenant in TENANTS}
    again = {tenant: shop.post(tenant, "one-key") for tenant in TENANTS}
    for tenant in TENANTS:
        assert (first[tenant].status_code, first[tenant].json["tenant"]) == (201, tenant)
        assert again[tenant].headers["Idempotent-Replayed"] == "true"
        assert again[tenant].data == first[tenant].data
        assert stored(urls[tenant]) == (1, 1)
        assert rows_of(urls[tenant], "SELECT tenant FROM payment") == [(tenant,)]


@OF_EACH_KIND
def test_a_request_for_a_database_without_records_is_refused_by_name(shop, urls):
    text = r"callable bind_key returned {}; the databases with records are 'eu', 'us' \(IDEMPOTENCY_BI"
    for tenant in ("fr", "nowhere", None):
        default = "'default'" if tenant is None and "default" in shop.app.config else repr(tenant)
        with pytest.raises(ConfigurationError, match=text.format(default)):
            shop.post(tenant, "a-key")
    assert [stored(urls[tenant]) for tenant in TENANTS] == [(0, 0)] * 2
    assert shop.post("eu", "a-key").status_code == 201


@OF_EACH_KIND
def test_a_write_in_another_tenants_database_is_refused_by_name(shop, urls):
    @shop.app.post("/across")
    @idempotent
    def across():
        shop.db.session.add(Payment(key="mine", tenant="eu"))
        shop.db.session.flush()
        with shop.db.engines["us"].begin() as connection:
            connection.execute(sa.insert(Payment).values(key="theirs", tenant="us"))

    with pytest.raises(NotAtomic, match="bind 'us'"):
        shop.post("eu", "a-key", "/across")
    assert [stored(urls[tenant]) for tenant in TENANTS] == [(0, 0)] * 2


@OF_EACH_KIND
def test_a_tenant_that_changes_in_the_view_is_refused_by_name(shop, urls):
    @shop.app.post("/turn")
    @idempotent
    def turn():
        shop.db.session.add(Payment(key="mine", tenant="eu"))
        shop.db.session.flush()
        g.tenant = "us"
        shop.db.session.add(Payment(key="theirs", tenant="us"))
        shop.db.session.commit()

    with pytest.raises(NotAtomic, match="bind 'us'"):
        shop.post("eu", "a-key", "/turn")
    assert [stored(urls[tenant]) for tenant in TENANTS] == [(0, 0)] * 2


def test_other_tenants_writes_can_be_allowed(shop, urls):
    @shop.app.post("/both")
    @idempotent(other_binds=["us"])
    def both():
        shop.db.session.add(Payment(key="mine", tenant="eu"))
        shop.db.session.commit()
        with shop.db.engines["us"].begin() as connection:
            connection.execute(sa.insert(Payment).values(key="theirs", tenant="us"))
        return "", 201

    assert [shop.post("eu", "a-key", "/both").status_code for _ in range(2)] == [201, 201]
    assert [stored(urls[tenant]) for tenant in TENANTS] == [(1, 1), (1, 0)]


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_an_attempt_that_dies_is_retried_in_its_own_database(shop, urls, point):
    for tenant in TENANTS:
        with crash_at(point, app=shop.app):
            shop.post(tenant, "one-key")
        answers = [shop.post(tenant, "one-key") for _ in range(2)]
        assert [each.status_code for each in answers] == [201, 201]
        assert answers[0].json == answers[1].json
    assert [stored(urls[tenant]) for tenant in TENANTS] == [(1, 1)] * 2


def test_duplicates_of_one_tenant_do_not_stop_another(shop):
    held, go_on = threading.Event(), threading.Event()

    @shop.app.post("/held")
    @idempotent
    def wait():
        held.set()
        if g.tenant == "eu":
            assert go_on.wait(PATIENCE_SECONDS)
        return "", 201

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(shop.post, "eu", "one-key", "/held")
        assert held.wait(PATIENCE_SECONDS)
        assert shop.post("eu", "one-key", "/held").status_code == 409
        assert shop.post("us", "one-key", "/held").status_code == 201
        go_on.set()
        assert first.result().status_code == 201


def test_one_prefix_in_redis_is_enough(make_shop):
    shop = make_shop(IDEMPOTENCY_REDIS_PREFIX="shop:")
    test_duplicates_of_one_tenant_do_not_stop_another(shop)


@OF_EACH_KIND
def test_a_route_names_its_database(make_shop, urls):
    shop = make_shop(IDEMPOTENCY_BIND_KEY="us")

    @shop.app.post("/europe")
    @idempotent(bind_key="eu")
    def europe():
        shop.db.session.add(Payment(key="k", tenant="eu"))
        shop.db.session.commit()
        return "", 201

    assert [shop.post("eu", "a-key", "/europe").status_code for _ in range(2)] == [201, 201]
    assert shop.post("us", "a-key").status_code == 201
    assert [stored(urls[tenant]) for tenant in TENANTS] == [(1, 1)] * 2


def test_a_route_that_names_no_database_of_records_is_refused_at_once(make_shop):
    shop = make_shop()
    shop.app.add_url_rule("/fr", view_func=idempotent(bind_key="fr")(lambda: ""), methods=["POST"])
    with pytest.raises(ConfigurationError, match="bind_key is 'fr'; the databases with records"):
        shop.post("eu", "a-key", "/fr")


@OF_EACH_KIND
def test_run_belongs_to_the_database_that_it_names(shop, urls):
    def count(tenant: str) -> int:
        shop.db.session.add(Payment(key="k", tenant=tenant))
        shop.db.session.commit()
        return 1

    with shop.app.app_context():
        for tenant in (*TENANTS, *TENANTS):
            g.tenant = tenant
            how = {"name": "count", "scope": "a"}
            assert shop.idempotency.run("a-key", count, tenant, bind_key=tenant, **how) == 1
            assert shop.idempotency.run("another", count, tenant, **how) == 1
        with pytest.raises(ConfigurationError, match="bind_key is 'fr'"):
            shop.idempotency.run("a-key", count, "fr", bind_key="fr", name="count", scope="a")
    assert [stored(urls[tenant]) for tenant in TENANTS] == [(2, 2)] * 2


@OF_EACH_KIND
@pytest.mark.parametrize("writes", [False, True])
def test_a_view_that_asks_its_own_application_for_another_tenant(shop, urls, writes):
    @shop.app.post("/ask")
    @idempotent
    def ask():
        if writes:
            shop.db.session.add(Payment(key="mine", tenant="eu"))
            shop.db.session.commit()
        return {"status": shop.post("us", "inner").status_code}

    for _ in range(2):
        with pytest.raises(NotAtomic, match="for an operation of another database"):
            shop.post("eu", "outer", "/ask")
    assert [stored(urls[tenant]) for tenant in TENANTS] == [(0, 0)] * 2


def test_a_view_that_is_not_atomic_may_ask_for_another_tenant(shop, urls):
    @shop.app.post("/ask")
    @idempotent(atomic=False)
    def ask():
        shop.db.session.add(Payment(key="mine", tenant="eu"))
        shop.db.session.commit()
        return {"status": shop.post("us", "inner").status_code}

    assert [shop.post("eu", "outer", "/ask").json for _ in range(2)] == [{"status": 201}] * 2
    assert [stored(urls[tenant]) for tenant in TENANTS] == [(1, 1)] * 2


@OF_EACH_KIND
def test_observing_asks_the_database_of_the_request(make_shop, urls, caplog):
    shop = make_shop(IDEMPOTENCY_ENFORCE=False)
    for tenant in (*TENANTS, *TENANTS):
        assert shop.post(tenant, "one-key").status_code == 201
    assert shop.post("eu", "one-key").status_code == 201
    assert [rows_of(urls[tenant], "SELECT count(*) FROM payment") for tenant in TENANTS] == [
        [(3,)],
        [(2,)],
    ]
    assert [rows_of(urls[tenant], "SELECT count(*) FROM idempotency_record") for tenant in TENANTS] == [
        [(1,)]
    ] * 2


def test_a_key_is_another_operation_in_each_database(shop):
    """A provider sees the keys of all of them."""

    @shop.app.post("/charges")
    @idempotent(atomic=False)
    def charge():
        return {"id": current_operation.id, "key": current_operation.derive_key("charge")}

    told = [shop.post(tenant, "one-key", "/charges").json for tenant in TENANTS]
    assert told[0]["id"] != told[1]["id"]
    assert told[0]["key"] != told[1]["key"]


def test_the_keys_of_the_default_database_stay(urls, redis_server):
    """An application that grows a second database forgets nothing."""
    told = []
    for config in ({}, {"IDEMPOTENCY_BINDS": [None, "us"], "IDEMPOTENCY_BIND_KEY": lambda: None}):
        app, db = Flask("grows"), SQLAlchemy()
        binds = {"SQLALCHEMY_DATABASE_URI": urls["eu"], "SQLALCHEMY_BINDS": {"us": urls["us"]}}
        app.config.update(**binds, IDEMPOTENCY_REDIS_URL=redis_server.url, **config)
        db.init_app(app)
        Idempotency(app, db, scope=None)
        app.post("/id", endpoint="id")(idempotent(lambda: (current_operation.id, 201)))
        with app.app_context():
            db.create_all()
        answer = app.test_client().post("/id", headers={"Idempotency-Key": "one-key"})
        told.append((answer.text, answer.headers.get("Idempotent-Replayed")))
        with app.app_context():
            for engine in db.engines.values():
                engine.dispose()
    assert told == [(told[0][0], None), (told[0][0], "true")]


@OF_EACH_KIND
def test_two_binds_of_one_database_do_not_meet(kind, urls, redis_server):
    both = {**urls, "us": urls["eu"]}
    app, db, _ = tenant_shop.make_app(kind, both, IDEMPOTENCY_REDIS_URL=redis_server.url)
    tenant_shop.create_tables(app, db, kind)
    post = poster(app)
    answers = [post(tenant, "one-key").json for tenant in (*TENANTS, *TENANTS)]
    assert [each["tenant"] for each in answers] == [*TENANTS, *TENANTS]
    assert stored(urls["eu"]) == (2, 2)
    with app.app_context():
        for engine in db.engines.values():
            engine.dispose()


def read_catalog(shop, statement):
    """What a ``before_request`` function does in a database that has no records."""
    tenant, g.tenant = g.tenant, "fr"
    try:
        return shop.db.session.execute(sa.text(statement)).scalar()
    finally:
        g.tenant = tenant


@EACH
def test_a_catalog_that_is_lost_before_the_view_is_an_error_as_without_us(make_shop, urls):
    """Of the view's commit, which is that of each database; and nothing leaves the application."""
    shop = make_shop(TESTING=False)

    @shop.app.before_request
    def read():
        pid = read_catalog(shop, "select pg_backend_pid()")
        if "X-Lose" in request.headers:
            rows_of(urls["eu"], f"select pg_terminate_backend({pid}, 5000)")

    answers = [shop.post("eu", "one-key", **more) for more in ({"X-Lose": "yes"}, {}, {})]
    assert [each.status_code for each in answers] == [500, 201, 201]
    assert answers[1].data == answers[2].data
    assert stored(urls["eu"]) == (1, 1)


@EACH
@OF_EACH_KIND
def test_a_statement_that_failed_in_the_catalog_is_no_matter_to_the_view(shop, urls):
    @shop.app.before_request
    def read():
        with pytest.raises(ProgrammingError):
            read_catalog(shop, "select 1 from nowhere")

    assert [shop.post("eu", "one-key").status_code for _ in range(2)] == [201, 201]
    assert stored(urls["eu"]) == (1, 1)


async def asks_async() -> str:
    return "eu"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"IDEMPOTENCY_BINDS": []}, "allowed: a list of different bind keys"),
        ({"IDEMPOTENCY_BINDS": "eu"}, "allowed: a list of different bind keys"),
        ({"IDEMPOTENCY_BINDS": ["eu", "eu"]}, "allowed: a list of different bind keys"),
        ({"IDEMPOTENCY_BINDS": ["eu", "nowhere"]}, "IDEMPOTENCY_BINDS is 'nowhere'; allowed: "),
        ({"IDEMPOTENCY_BINDS": None}, "is a callable, which needs IDEMPOTENCY_BINDS"),
        ({"IDEMPOTENCY_BIND_KEY": None}, "IDEMPOTENCY_BIND_KEY is None; allowed: one of"),
        ({"IDEMPOTENCY_BIND_KEY": "fr"}, "IDEMPOTENCY_BIND_KEY is 'fr'; allowed: one of"),
        ({"IDEMPOTENCY_BIND_KEY": asks_async}, "a callable that returns one"),
        ({"IDEMPOTENCY_BIND_KEY": lambda tenant: tenant}, "a callable that returns one"),
        ({"IDEMPOTENCY_STORE": "redis"}, "'redis' keeps no records in them"),
    ],
)
def test_wrong_settings_fail_at_once(make_shop, config, message):
    with pytest.raises(ConfigurationError, match=message):
        make_shop(**config)


@OF_EACH_KIND
def test_what_works_with_one_database_says_so(shop):
    with pytest.raises(ConfigurationError, match="age\\(\\) works with one database of records"):
        age(shop.app, 1)
    page = shop.idempotency.console_blueprint(authorize=lambda: True)
    with pytest.raises(ConfigurationError, match="a console works with one database of records"):
        shop.app.register_blueprint(page)


def test_a_page_and_commands_for_each_database(make_shop):
    shop = make_shop(SECRET_KEY="k")
    for tenant in TENANTS:
        page = shop.idempotency.console_blueprint(
            authorize=lambda: True, name=f"ops-{tenant}", bind_key=tenant
        )
        shop.app.register_blueprint(page)
    shop.post("eu", "a-key")
    client = shop.app.test_client()
    pages = {tenant: client.get(f"/ops-{tenant}/records").text for tenant in TENANTS}
    assert [pages[tenant].count("/records/") for tenant in TENANTS] == [1, 0]
    run = runner(shop.app)
    lists = {tenant: run("--bind", tenant, "list").output for tenant in TENANTS}
    assert ("pay" in lists["eu"], lists["us"]) == (True, "no records\n")
    missing, wrong = run("list"), run("--bind", "fr", "list")
    assert (missing.exit_code, "--bind {eu|us}" in missing.output) == (2, True)
    assert (wrong.exit_code, "no records in 'fr'" in wrong.output) == (2, True)
    for tenant in TENANTS:
        checked = run("--bind", tenant, "check")
        assert checked.exit_code == 0, checked.output
        joined = "joins the operation's transaction", "does not join outside of a request: AttributeErr"
        assert joined[tenant == "us"] in checked.output, "the first request has shown it"


@pytest.mark.parametrize("file", ["tenants", "shards"])
@EACH
def test_an_application_with_binds_and_one_for_each_tenant(file, urls, monkeypatch, redis_server):
    for tenant in TENANTS:
        monkeypatch.setenv(f"{tenant.upper()}_DATABASE_URL", urls[tenant])
    sources = {block.mark: block.source for block in blocks(ROOT / "docs/session.md", "python")}
    sources["file: shards.py"] = (ROOT / "tests/integration/apps/shards.py").read_text("utf-8")
    names = {"__name__": file}
    code = compile(sources[f"file: {file}.py"], f"{file}.py", "exec", dont_inherit=True)
    exec(code, names)  # noqa: S102
    client = Client(names["app"])
    for tenant in TENANTS:
        headers = {"Idempotency-Key": "one-key", "X-Account": "a", "X-Tenant": tenant}
        answers = [client.post("/payments", json={"amount": 5}, headers=headers) for _ in range(2)]
        assert [each.status_code for each in answers] == [201, 201]
        assert answers[0].data == answers[1].data
        assert stored(urls[tenant]) == (1, 1)
    headers = {"Idempotency-Key": "one-key", "X-Account": "a", "X-Tenant": "fr"}
    assert client.post("/payments", json={"amount": 5}, headers=headers).status_code == 404
    apps = names["shards"].values() if file == "shards" else [names["app"]]
    for app in apps:
        with app.app_context():
            for engine in names["db"].engines.values():
                engine.dispose()


@pytest.mark.parametrize(
    ("kind", "driver", "with_redis"),
    [("flask-sqlalchemy", "psycopg2", True), ("lite", "psycopg", False)],
    indirect=["kind", "driver"],
)
def test_workers_die_and_every_record_is_beside_its_rows(urls, kind, redis_server, with_redis):
    environment = {
        "SESSIONS": kind,
        **{name.upper(): urls[name] for name in TENANTS},
        "REDIS_URL": redis_server.url if with_redis else "",
    }
    application = "tests.integration.apps.tenant_shop:create_app()"
    how = ("--worker-class", "sync", "--workers", "3", "--log-level", "critical")
    keys = [(random.choice(TENANTS), f"key-{n // 2}") for n in range(24)]  # noqa: S311
    told: dict[tuple[str, str], set[str]] = {}

    with running.gunicorn(application, environment, *how) as (address, _process):

        def pay(tenant: str, key: str) -> None:
            deadline = time.monotonic() + PATIENCE_SECONDS
            deaths = iter(random.choices(["written", "committed", ""], k=2))  # noqa: S311
            while True:
                assert time.monotonic() < deadline, "no answer"
                headers = {"Idempotency-Key": key, "X-Tenant": tenant, "X-Die": next(deaths, "")}
                with contextlib.suppress(OSError, http.client.HTTPException):
                    reply = running.send(address, "POST", "/payments", headers)
                    if reply.status == 201:
                        told.setdefault((tenant, key), set()).add(reply.body)
                        return
                    assert reply.status == 409
                time.sleep(0.01)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda each: pay(*each), keys))

    for tenant in TENANTS:
        mine = sorted(key for at, key in told if at == tenant)
        found = rows_of(urls[tenant], "SELECT key, tenant FROM payment ORDER BY key")
        assert sorted(found) == [(key, tenant) for key in mine]
        assert stored(urls[tenant]) == (len(mine), len(mine))
    assert all(len(bodies) == 1 for bodies in told.values())
    assert all(json.loads(min(bodies))["tenant"] == tenant for (tenant, _), bodies in told.items())
