"""Every store gives the responses of the table in ``docs/http.md``: the same, row by row."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from flask import request

import servers
from flask_idempotency import Retryable, idempotent, operation_interrupted
from flask_idempotency.cli import cli
from tests.contract.test_requests import STORES, Shop
from tests.killed import Killed

PAGE = Path(__file__).parents[2] / "docs/http.md"
ROW = re.compile(r"^\| \[(.+?)\]\(#([\w-]+)\) \| (.+?) \| (.+?) \| (.+?) \| .+? \|$", re.MULTILINE)
ROWS = {row[2]: row.groups()[2:] for row in ROW.finditer(PAGE.read_text(encoding="utf-8"))}
"""By anchor: status, type of the problem, and further headers."""

NOWHERE = f"postgresql+psycopg2://shop@127.0.0.1:{servers.free_port()}/shop"
CONFLICT = "do $$ begin raise exception using errcode = '40001'; end $$"


class Api(Shop):
    """An API with a way into every situation of the table."""

    def __init__(self, store, uri, redis_url, *, tables=True):
        self.running, self.go_on = threading.Event(), threading.Event()
        config = {"scope": lambda: request.headers.get("X-User"), "PROPAGATE_EXCEPTIONS": False}
        config |= {f"IDEMPOTENCY_MAX_{what}_BYTES": 1000 for what in ("REQUEST", "RESPONSE")}
        super().__init__(store, uri, redis_url, tables=tables, **config)
        atomic = self.atomic
        self.add("pay", lambda: ({"id": 1}, 201, {"Location": "/pay/1"}), atomic=atomic)
        self.add("transfer", dict, atomic=atomic, fingerprint="json")
        self.add("withdraw", dict, atomic=atomic, authorize_replay=lambda _operation: False)
        location = {"Location": "/report/1", "Content-Location": "/report/1.json", "Link": "</help>"}
        self.add("report", lambda: ("x" * 2000, 201, location), atomic=atomic)
        self.add("order", dict, atomic=atomic, refuse_old_keys=True)
        self.add("hold", self.hold, atomic=atomic)
        self.add("conflict", lambda: [self.db.session.execute(sa.text(CONFLICT))], atomic=atomic)
        self.add("charge", self.die, atomic=False)
        self.add("donate", self.die, atomic=False)
        self.add("busy", self.be_busy, atomic=False)

    def add(self, name, view, **options):
        self.app.add_url_rule(f"/{name}", name, idempotent(**options)(view), methods=["POST"])

    def hold(self):
        self.running.set()
        assert self.go_on.wait(10)
        return {}

    def die(self):
        raise Killed

    def be_busy(self):
        raise Retryable("The provider is busy.", retry_after=5)

    def post(self, name="pay", key="key", *, user="alice", json=None, **kwargs):
        headers = {"Idempotency-Key": f"{name}-{key}"} if key else {}
        headers |= {"X-User": user} if user else {}
        if "data" not in kwargs:
            kwargs["json"] = {} if json is None else json
        return self.app.test_client().post(f"/{name}", headers=headers, **kwargs)

    def again(self, name, **kwargs):
        """The same request a second time, when the first has ended."""
        assert self.post(name).status_code < 300
        return self.post(name, **kwargs)

    def after_a_death(self, name):
        with pytest.raises(Killed):
            self.post(name)
        return self.post(name)

    def after_an_operator_said_that_it_failed(self):
        found = []
        with operation_interrupted.connected_to(lambda _app, event: found.append(event.id), self.app):
            self.after_a_death("donate")
        words = ["release", "--fail", "--why=it cannot be found out", found[0]]
        result = self.app.test_cli_runner().invoke(cli, words)
        assert result.exit_code == 0, result.output
        return self.post("donate")

    def beside_the_first(self):
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(self.post, "hold")
            assert self.running.wait(10)
            try:
                return self.post("hold")
            finally:
                self.go_on.set()
                assert first.result().status_code == 200


SITUATIONS = {
    "first-request": lambda shop: shop.post(key="first"),
    "retry": lambda shop: shop.again("pay"),
    "key-required": lambda shop: shop.post(key=None),
    "key-malformed": lambda shop: shop.post(key="a,b"),
    "body-incomplete": lambda shop: shop.post(
        key="short", data=b"{}", environ_overrides={"CONTENT_LENGTH": "8"}
    ),
    "body-too-large": lambda shop: shop.post(key="long", data=b"x" * 1001),
    "body-malformed": lambda shop: shop.post("transfer", data=b"{", content_type="application/json"),
    "scope-unknown": lambda shop: shop.post(user=None),
    "replay-forbidden": lambda shop: shop.again("withdraw"),
    "request-in-progress": Api.beside_the_first,
    "response-not-kept": lambda shop: shop.again("report"),
    "operation-interrupted": lambda shop: shop.after_a_death("charge"),
    "key-expired": lambda shop: shop.post(
        "order", environ_overrides={"HTTP_IDEMPOTENCY_KEY": "017f22e2-79b0-7cc3-98c4-dc0c0c07398f"}
    ),
    "key-reused": lambda shop: shop.again("transfer", json={"changed": True}),
    "operation-failed": Api.after_an_operator_said_that_it_failed,
    "try-again": lambda shop: shop.post("busy"),
    "store-unavailable": lambda shop: shop.post(),
    "transaction-conflict": lambda shop: shop.post("conflict"),
}

WITHOUT = {
    # SQLite lets one writer in after the other, and an operation of redis has no transaction.
    "transaction-conflict": ["sql", "redis"],
}
"""The stores that never come there."""


@pytest.fixture(scope="module")
def shops(postgres, redis_server, tmp_path_factory):
    """Those whose store can be reached, and those whose store cannot."""
    folder = tmp_path_factory.mktemp("responses")
    made = {}
    for store in STORES:
        on_sqlite = store in ("sql", "redis")
        uri = f"sqlite:///{folder}/{store}.db" if on_sqlite else postgres.database(f"responses_{store}")
        made[store] = Api(store, uri, redis_server.url)
        lost = f"sqlite:///{folder}/nowhere/shop.db" if on_sqlite else NOWHERE
        no_redis = f"redis://127.0.0.1:{servers.free_port()}/0"
        redis_url = no_redis if store == "redis" else redis_server.url
        made["lost", store] = Api(store, lost, redis_url, tables=False)
    yield made
    for shop in made.values():
        shop.engine.dispose()


def content(response):
    """All that a client is told, but for the seconds to wait."""
    headers = {name: "…" if name == "Retry-After" else value for name, value in response.headers}
    return response.status, headers, response.data


@pytest.mark.parametrize("situation", ROWS)
def test_every_store_gives_the_response_of_the_page(shops, situation):
    stores = [store for store in STORES if store not in WITHOUT.get(situation, [])]
    lost = situation == "store-unavailable"
    responses = {
        store: SITUATIONS[situation](shops["lost", store] if lost else shops[store]) for store in stores
    }
    told = {store: content(response) for store, response in responses.items()}
    assert told == dict.fromkeys(stores, told["postgres"])
    status, problem, further = ROWS[situation]
    response = responses["postgres"]
    if status.isdigit():
        assert response.status_code == int(status)
    if problem.startswith("`"):
        assert response.json["type"].endswith(f":{problem.strip('`')}")
    for name in re.findall(r"`([\w-]+)(?:: .+?)?`", further):
        assert name in response.headers


def test_the_page_has_every_situation_once():
    assert list(ROWS) == list(SITUATIONS)
