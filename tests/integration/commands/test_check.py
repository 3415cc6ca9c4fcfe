"""``flask idempotency check``: servers, whole and broken, and what it says of the routes."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from flask import Blueprint, g
from flask.views import MethodView, View
from flask_login import LoginManager
from redis.backoff import NoBackoff
from redis.retry import Retry

import servers
from flask_idempotency import Idempotency, idempotent
from tests.integration.commands.running import build, build_console, findings, not_ok, once, runner
from tests.sessions import factory_of

FAILED, ADVICE = "FAILED", "advice"


REFUSES = """create function refuse() returns trigger language plpgsql as
    $$begin raise exception 'replica only'; end$$;
    create trigger refuse before {} on idempotency_record for each row execute function refuse()"""
KEEPS = """create function keep() returns trigger language plpgsql as 'begin return null; end';
    create trigger keep before update on idempotency_record for each row execute function keep()"""
PARTITIONED = """alter table idempotency_record rename to old;
    create table idempotency_record (like old including indexes) partition by hash (key)"""
ALTER, INDEX = "alter table idempotency_record", "ix_idempotency_record_{}"
HALF_BUILT = "update pg_index set indisvalid = false where indexrelid = '{}'::regclass"
REJECTS = "let the table take what a request writes"


@pytest.mark.parametrize(
    ("change", "subject", "said"),
    [
        (f"{ALTER} drop column lease_expires_at", "columns", ["migration"]),
        (f"{ALTER} alter column status type integer", "columns", ["migration"]),
        (f"{ALTER} alter column name type varchar(30)", "columns", ["migration"]),
        (f"{ALTER} drop constraint idempotency_record_pkey", "claim", ["ON CONFLICT"]),
        (f"{ALTER} set unlogged", "table", ["make it an ordinary table"]),
        (PARTITIONED, "table", ["partitioned"]),
        (f"{ALTER} add column tenant text not null", "claim", ['column "tenant"', REJECTS]),
        (f"{ALTER} add constraint never check (key <> key)", "claim", ['constraint "never"', REJECTS]),
        (REFUSES.format("insert"), "claim", ["replica only", REJECTS]),
        (REFUSES.format("update"), "claim", ["replica only", REJECTS]),
        (KEEPS, "claim", ["trigger"]),
        (f"alter index {INDEX.format('leased')} rename to odd", None, []),
    ],
)
@pytest.mark.parametrize("store", ["postgres"])
def test_a_table_that_is_not_ours_or_rejects_a_record_is_named(world, run, change, subject, said):
    world.sql(change)
    result = run("check")
    assert not_ok(result).get(subject) == (FAILED if subject else None), result.output
    assert subject == "table" or len(not_ok(result)) == bool(subject)
    for words in said:
        assert words in result.output
    if subject != "columns":
        assert world.records() == []


@pytest.mark.parametrize("name", ["expires_at", "leased"])
@pytest.mark.parametrize("change", ["drop index {}", HALF_BUILT])
def test_an_index_that_is_missing_or_half_built_is_made_by_what_it_prints(world, run, name, change):
    index = INDEX.format(name)
    world.sql(change.format(index))
    result = run("check")
    assert not_ok(result) == {"index": FAILED}
    assert findings(result)["claim"] == "ok"
    assert re.search(f"-> (CREATE|REINDEX) INDEX CONCURRENTLY {index}", result.output)
    with world.app.app_context(), world.db.engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        for statement in re.findall("-> ((?:CREATE|REINDEX) .+)", result.output):  # as in psql
            connection.execute(sa.text(statement))
    assert not not_ok(run("check"))


def test_missing_rights_are_named(world, stranger):
    result = once(build(stranger), "check")
    assert not_ok(result) == dict.fromkeys(("claim", "deletion", "own pool"), FAILED)
    assert "may not use the table idempotency_record:" in result.output
    world.sql(f"grant select, insert, update on idempotency_record to {stranger.username}")
    result = once(build(stranger), "check")
    assert not_ok(result) == {"deletion": FAILED}, "no purge could"


def test_a_database_that_takes_no_writes_is_named(world):
    uri = world.app.config["SQLALCHEMY_DATABASE_URI"]
    database = sa.make_url(uri).database
    world.sql(f"alter database {database} set default_transaction_read_only = on")
    result, purge = once(build(uri), "check"), once(build(uri), "purge")
    assert not_ok(result) == {"claim": FAILED}
    assert "a primary that takes writes" in result.output
    assert (purge.exit_code, purge.output[:13]) == (1, "Error: cannot")


def test_a_session_that_does_not_join_is_named(world, run, monkeypatch):
    class Stubborn(factory_of(world.app, world.db).class_):
        def get_bind(self, *args: Any, **kwargs: Any) -> Any:
            return world.db.engine

    monkeypatch.setattr(factory_of(world.app, world.db), "class_", Stubborn)
    assert not_ok(run("check")) == {"db.session": FAILED}
    assert world.records() == []


@pytest.mark.parametrize("name", ["connect", "checkout"])
def test_a_listener_that_needs_a_request_is_named(world, name):
    app = build(world.app.config["SQLALCHEMY_DATABASE_URI"])
    with app.app_context():
        sa.event.listen(app.extensions["sqlalchemy"].engine, name, lambda *_: g.tenant)
    result = once(app, "check")
    assert not_ok(result) == {"listener": FAILED}
    assert "AttributeError" in result.output
    assert "as with g.get(...)" in result.output


class TestOfRedis:
    """The lock: requests do without it, so it only advises."""

    def test_a_server_that_is_not_there(self, make_world):
        world = make_world(IDEMPOTENCY_REDIS_URL=f"redis://:hush@127.0.0.1:{servers.free_port()}/0")
        result = runner(world.app)("check")
        assert not_ok(result) == {"Redis": ADVICE}
        assert "refused" in result.output
        assert "every duplicate reaches PostgreSQL" in result.output
        assert "hush" not in result.output
        assert findings(result)["db.session"] == "ok"

    @pytest.mark.parametrize(
        ("damage", "repair", "words"),
        [
            ("replicaof 127.0.0.1 1", "replicaof no one", "read only replica"),
            ("acl setuser default -eval", "acl setuser default +eval", "permission"),
            ("config set maxmemory 1", "config set maxmemory 0", "memory"),
        ],
    )
    def test_a_lock_that_cannot_be_taken(self, world, run, redis_server, damage, repair, words):
        with redis.Redis.from_url(redis_server.url) as client:
            try:
                client.execute_command(*damage.split())
                result = run("check")
            finally:
                client.execute_command(*repair.split())
        assert not_ok(result) == {"Redis": ADVICE}
        assert "its user may EVAL" in result.stdout
        assert words in result.stdout
        world.app.extensions["idempotency"].lock._skip_until = 0.0  # left alone since it failed
        assert not not_ok(run("check"))

    @pytest.mark.parametrize(
        ("retry", "timeout", "advice"), [(3, 0.1, "3 retries"), (None, 5, "5 s"), (None, 0.1, "")]
    )
    def test_a_client_that_makes_requests_wait(self, make_world, redis_server, retry, timeout, advice):
        options = {"socket_connect_timeout": 0.2, "socket_timeout": timeout}
        options["retry"] = retry and Retry(NoBackoff(), retry)
        with redis.Redis.from_url(redis_server.url, **options) as client:
            result = runner(make_world(init={"redis": client}).app)("check")
        assert not_ok(result) == ({"Redis client": ADVICE} if advice else {})
        assert advice in result.output


@pytest.fixture
def make_shop(tmp_path: Any) -> Callable[..., Any]:
    """Makes an application, which has a function that adds a route to it."""

    def make(**config: Any) -> Any:
        app: Any = build(f"sqlite:///{tmp_path}/shop.db", **{"IDEMPOTENCY_STORE": "sql", **config})
        app.add, app.protect = partial(add, app), Idempotency().protect
        runner(app)("create-table")
        return app

    return make


def add(target: Any, endpoint: str, view: Any, *methods: str) -> None:
    target.add_url_rule(f"/{endpoint}", endpoint, view, methods=methods or ("POST",))


def said(app: Any, subject: str) -> tuple[dict[str, str], str]:
    """What `check` found that was not ok, and its line of a subject with the remedy."""
    result = once(app, "check")
    line = re.search(rf"^\w+ +{subject} +(\S.*(?:\n +-> .+)?)$", result.output, re.MULTILINE)
    return not_ok(result), " ".join(line[1].split())


@pytest.fixture
def shop(make_shop: Callable[..., Any]) -> Any:
    return make_shop()


def view() -> Any:
    return {}, 201


def bare() -> Any:
    """A view that nothing protects: another function each time."""
    return lambda: ({}, 201)


class Both(MethodView):
    post, patch, put = (staticmethod(each) for each in (idempotent(view), view, view))


class Dispatched(View):
    @idempotent(ttl=60)
    def dispatch_request(self) -> Any:
        return {}, 201


def tenant() -> str:
    return "acme"


class TestOfRoutes:
    """What is protected and what is not, and what the first request would be refused for."""

    def test_they_are_counted_and_those_that_are_not_protected_named(self, shop):
        api = Blueprint("api", __name__)
        shop.protect(api)
        add(api, "a", bare())
        shop.register_blueprint(api)
        shop.add("b", idempotent(view), "POST", "PUT")
        shop.add("c", bare(), "GET", "PUT")
        shop.add("\x1b[31mred\u202e", bare())
        shop.add("read", bare(), "GET")
        shop.add_url_rule("/both", view_func=Both.as_view("both"))
        shop.add("dispatched", Dispatched.as_view("dispatched"))
        shop.add("hidden", lambda: idempotent(bare())())  # noqa: PLW0108 -- made in each request
        build_console(shop)
        counted = "4 of 7 endpoints that change something are protected; not protected: "
        assert said(shop, "routes") == (
            {},
            rf"{counted}\x1b[31mred\u202e, both (PATCH, PUT), c, hidden",
        )
        assert "\x1b" not in once(shop, "check", "--json").output

    @pytest.mark.parametrize("protect", [None, {}, {"skip": lambda _request: True}])
    def test_a_decorator_above_its_route_is_misplaced(self, shop, protect):
        if protect is not None:
            shop.protect(shop, **protect)
        shop.add("misplaced", alone := bare())
        idempotent(alone)
        wrong, text = said(shop, "route")
        assert wrong == {"route": FAILED}
        assert "the view of the endpoint 'misplaced', is not protected by its @idempotent" in text

    def test_a_class_that_protects_its_dispatch_is_not_and_the_options_of_protect_are_looked_at(
        self, shop
    ):
        shop.protect(shop, other_binds=["logs"])
        shop.add("pay", Dispatched.as_view("pay"))
        every = "1 of 1 endpoints that change something are protected"
        assert said(shop, "routes") == ({}, every)
        shop.add("send", bare())
        wrong, text = said(shop, "route")
        assert (wrong, "other_binds names 'logs'" in text) == ({"route": FAILED}, True)

    def test_a_store_without_transactions_is_missed(self, make_shop, redis_server):
        redis_only = {"IDEMPOTENCY_STORE": "redis", "IDEMPOTENCY_REDIS_PREFIX": "shop:"}
        shop = make_shop(**redis_only, IDEMPOTENCY_REDIS_URL=redis_server.url)
        shop.add("pay", idempotent(view))
        shop.add("send", idempotent(atomic=False)(view))
        wrong, text = said(shop, "route")
        assert wrong["route"] == FAILED
        assert text.startswith("pay is atomic, which the store 'redis' cannot be")

    def test_it_says_whose_keys_they_are_and_that_all_is_switched_off(self, shop, make_shop):
        assert said(shop, "scope") == ({}, "one tenant")
        LoginManager(shop)
        wrong, text = said(shop, "scope")
        assert (wrong, "Flask-Login" in text) == ({"scope": ADVICE}, True)
        shop = make_shop(scope=tenant)
        shop.add("hook", idempotent(scope=None)(view))
        assert said(shop, "scope") == ({}, f"asked of {__name__}.tenant; one tenant at hook")
        assert said(make_shop(IDEMPOTENCY_ENABLED=False), "routes")[0] == {"routes": ADVICE}
