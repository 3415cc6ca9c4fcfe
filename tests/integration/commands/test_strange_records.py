"""Records that something else wrote: each is shown as far as it can be read, and hides no other."""

from __future__ import annotations

import json
import re
from urllib.parse import quote

import pytest
import redis

from flask_idempotency import current_operation, idempotent
from tests.integration.commands.running import build, build_console, runner
from tests.killed import Killed

DEEP = "[" * 5000 + "]" * 5000
DIGITS = "1" * 5000
KEPT = '{"at": "2099-01-01 00:00:00.000000", "by": "ada", "did": "released", "why": "is kept"}'

ODD_ENTRIES = [
    "7",
    "[]",
    "null",
    DIGITS,
    '{"at": "x", "by": "b", "did": null, "why": []}',
    '{"at": 1e400, "by": 1e400, "did": 1e400, "why": 1e400}',
    '{"at": 1e400, "by": "b", "did": "c", "why": "d"}',
    f'{{"at": {DIGITS}, "by": "b", "did": "c", "why": "d"}}',
    r'{"at": "x", "by": "\ud800", "did": "c", "why": "\u0000"}',
]
IN_A_TABLE = [f"'[{entry}, {KEPT}]'" for entry in ODD_ENTRIES] + [
    "'{}'",
    "'7'",
    "'null'",
    f"'{DEEP}'",
]
STRANGE = {
    "postgres": [
        *(("audit", value) for value in IN_A_TABLE),
        ("headers", f"'{DEEP}'"),
        ("lease_expires_at", "'infinity'"),
        ("lease_expires_at", "'-infinity'"),
        ("lease_expires_at", "'294276-12-31'"),
        ("lease_expires_at", "'4713-01-01 BC'"),
    ],
    "sql": [
        *(("audit", value) for value in IN_A_TABLE),
        ("audit", "'no JSON'"),
        ("headers", f"'{DEEP}'"),
        ("status", f"'{DIGITS}'"),
        ("status", "x'ff'"),
        ("attempt", f"'{DIGITS}'"),
        ("lease_expires_at", "'infinity'"),
    ],
}
PAST = {"postgres": "clock_timestamp() - interval '1 s'", "sql": "'2020-01-01 00:00:00.000'"}
IN_EACH = [(store, *field) for store, fields in STRANGE.items() for field in fields]


class Shop:
    """An application with a console, and two operations that were interrupted after a step."""

    def __init__(self, store, folder, postgres_url, redis_url):
        uri = postgres_url or f"sqlite:///{folder}/shop.db"
        config = {"IDEMPOTENCY_STORE": store, "PROPAGATE_EXCEPTIONS": False}
        if store == "redis":
            config["IDEMPOTENCY_REDIS_URL"] = redis_url
            config["IDEMPOTENCY_REDIS_PREFIX"] = f"{folder.name}:"
        self.store = store
        self.app = build_console(build(uri, **config))
        self.app.post("/charges")(idempotent(atomic=False)(self.charge))
        self.app.add_url_rule(
            "/others", "other", idempotent(atomic=False)(self.charge), methods=["POST"]
        )
        self.run, self.browser = runner(self.app), self.app.test_client()
        if store != "redis":
            assert self.run("create-table").exit_code == 0
        self.usual, self.strange = self.interrupted("/others"), self.interrupted("/charges")

    def charge(self):
        current_operation.step("charge", lambda: 1)
        raise Killed

    def interrupted(self, path):
        before = {line["key"] for line in self.lines()}
        with pytest.raises(Killed):
            self.app.test_client().post(path, json={}, headers={"Idempotency-Key": "key"})
        return ({line["key"] for line in self.lines()} - before).pop()

    def lines(self):
        return json.loads(self.run("list", "--json").stdout)

    def forge(self, column, value):
        """Write SQL into one field of the strange record."""
        digits = {
            "postgres": "encode(substring(key for 4), 'hex')",
            "sql": "lower(hex(substr(key, 1, 4)))",
        }
        where = f"where {digits[self.store]} = '{self.strange}'"
        with self.app.app_context(), self.app.extensions["sqlalchemy"].engine.begin() as connection:
            connection.exec_driver_sql(f"update idempotency_record set {column} = {value} {where}")

    def page(self, path, **form):
        path = f"/operations{path}"
        ours = {"Sec-Fetch-Site": "same-origin"}
        return self.browser.post(path, data=form, headers=ours) if form else self.browser.get(path)


@pytest.fixture
def store():
    return "postgres"


@pytest.fixture
def shop(store, tmp_path, databases, redis_server):
    url = databases.take() if store == "postgres" else None
    if store == "redis":
        with redis.Redis.from_url(redis_server.url) as client:
            client.flushdb()
    shop = Shop(store, tmp_path, url, redis_server.url)
    yield shop
    with shop.app.app_context():
        engine = shop.app.extensions["sqlalchemy"].engine
        assert engine.pool.checkedout() == 0
        engine.dispose()
    if url:
        databases.give_back(url)


def strictly(text):
    """What JSON as in RFC 8259 says, which knows no ``Infinity``."""
    return json.loads(text, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("store", "column", "value"),
    IN_EACH,
    ids=[f"{store}-{column}-{str(value)[:20]!a}" for store, column, value in IN_EACH],
)
def test_a_strange_record_is_shown_and_hides_no_other(shop, column, value):
    shop.forge(column, value)
    assert "2 records in all: " in shop.run("list").output
    shown = [line["operation"] for line in strictly(shop.run("list", "--json").stdout)]
    assert "other" in shown
    assert len(shown) == 2
    result = shop.run("show", shop.strange)
    assert result.exit_code == 0
    strictly(shop.run("show", shop.strange, "--json").stdout)
    assert all(text.isprintable() for text in result.stdout.split("\n"))
    for path in "/", "/records?limit=9":
        response = shop.page(path)
        assert response.status_code == 200
        assert shop.usual in response.text
    response = shop.page(f"/records/{shop.strange}")
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("store", "column", "value"),
    [
        ("postgres", "audit", rf"""'["\u0000", {KEPT}]'"""),
        ("postgres", "headers", f"'{DEEP}', status = 500"),
        ("sql", "audit", "'no JSON'"),
        ("sql", "headers", f"'{DEEP}', status = 500"),
    ],
)
def test_what_cannot_be_read_is_not_decided_about_and_says_why(shop, store, column, value):
    shop.forge("lease_expires_at", PAST[store])
    shop.forge(column, value)
    why = "The stored record cannot be read"
    how = "--status", "200", "--body", "{}", "--why", "it was paid", "--yes"
    result = shop.run("resolve", shop.strange, *how)
    assert (result.exit_code, why in result.output) == (1, True)
    path = f"/records/{shop.strange}/resolve"
    text = shop.page(path).text
    seen = re.search('name="seen" value="([^"]+)"', text)[1]
    response = shop.page(path, seen=seen, status="200", body="{}", content_type="", why="it was paid")
    assert (response.status_code, why in response.text) == (409, True)


@pytest.mark.parametrize("operation", ["\0", "other\0", "\udcff", "x" * 256])
@pytest.mark.parametrize("store", ["postgres", "sql", "redis"])
def test_what_cannot_be_the_name_of_an_operation_is_told_so(shop, operation):
    for command in ["list"], ["list", "--scope", "7"], ["forget", "--scope", "7", "--yes"]:
        result = shop.run(*command, "--operation", operation)
        assert result.exit_code == 1
        assert "Error: no operation is named so" in result.output
    if operation.isprintable() or "\0" in operation:
        response = shop.page(f"/records?operation={quote(operation)}")
        assert response.status_code == 404
        assert "no operation is named so" in response.text
