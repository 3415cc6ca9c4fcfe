"""Frameworks that take over errors, under gunicorn: the responses are those of Flask."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import psycopg2
import pytest

import servers
from laboratory import running
from tests.integration.apps import api_shop, gunicorn_conf

APPLICATION = "tests.integration.apps.api_shop:create_app()"
ALL = pytest.mark.parametrize("framework", api_shop.FRAMEWORKS)


class ApiShop:
    """The running application, and a connection to its database."""

    def __init__(self, url: str, connection: Any) -> None:
        self.url, self._connection = url, connection

    def post(self, path: str, key: str | None, body: str = '{"amount": 5}', **headers: str) -> Any:
        headers = {"X-User": "alice", "Content-Type": "application/json", **headers}
        if key is not None:
            headers["Idempotency-Key"] = key
        return running.send(self.url, "POST", path, headers, body)

    def sql(self, statement: str) -> None:
        with self._connection.cursor() as cursor:
            cursor.execute(statement)


@pytest.fixture(scope="module")
def shop(postgres: Any) -> Iterator[ApiShop]:
    """One server for all: every test has keys of its own."""
    uri = postgres.database("frameworks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATABASE_URL", uri)
        app = api_shop.create_app()
        with app.app_context():
            api_shop.db.engine.dispose()
    connection = psycopg2.connect(servers.plain_dsn(uri))
    connection.autocommit = True
    arguments = ("--config", gunicorn_conf.__file__, "--threads", "2", "--workers", "1")
    with running.gunicorn(APPLICATION, {"DATABASE_URL": uri}, *arguments) as (url, _process):
        yield ApiShop(url, connection)
    connection.close()


def refusals(shop: ApiShop, framework: str) -> dict[str, Any]:
    """Bring about every problem of the reference, each by its name, in one framework."""

    def post(name: str, key: str | None = None, *rest: str, **headers: str) -> Any:
        return shop.post(f"/{framework}/{name}", key and f"{framework}-{key}", *rest, **headers)

    for name in ("payments", "reports", "withdrawals", "charges"):
        assert post(name, name).status == 201, name
    other_body = post("payments", "payments", "{}")
    running = (
        "UPDATE idempotency_record SET state = 'in_progress', completed_at = NULL"
        f" WHERE name LIKE '%{framework}-charges'"
    )
    shop.sql(running.replace("SET", "SET lease_expires_at = now() + interval '1 hour',"))
    in_progress = post("charges", "charges")
    shop.sql(running.replace("SET", "SET lease_expires_at = now() - interval '1 hour',"))
    return {
        "key-required": post("payments"),
        "key-malformed": post("payments", "a,b"),
        # An ASGI server ends such a request itself.
        "body-incomplete": half_a_body(shop, f"/{framework.replace('connexion', 'flask')}/payments"),
        "scope-unknown": post("payments", "nobody's", **{"X-User": ""}),
        "key-reused": other_body,
        "request-in-progress": in_progress,
        "operation-interrupted": post("charges", "charges"),
        "response-not-kept": post("reports", "reports"),
        "replay-forbidden": post("withdrawals", "withdrawals"),
        "transaction-conflict": post("conflicts", "conflicts"),
        "store-unavailable": post("outages", "outages"),
    }


def half_a_body(shop: ApiShop, path: str) -> Any:
    where = urlsplit(shop.url)
    with socket.create_connection((where.hostname, where.port), timeout=10) as client:
        client.sendall(
            f"POST {path} HTTP/1.1\r\nHost: shop\r\nX-User: alice\r\nIdempotency-Key: half\r\n"
            "Content-Length: 40\r\n\r\n{}".encode()
        )
        client.shutdown(socket.SHUT_WR)
        answer = http.client.HTTPResponse(client)
        answer.begin()
        return running.Reply(answer.status, answer.headers, answer.read().decode())


NOT_COMPARED = {"Date", "Retry-After", "Cache-Control"}
"""No replay is to be cached, whatever the view said."""


def lines(answer: Any) -> list[tuple[str, str]]:
    named = ((name.title(), value) for name, value in answer.headers.items())  # ASGI has them lower
    return sorted((name, value) for name, value in named if name not in NOT_COMPARED)


@pytest.fixture(scope="module")
def in_flask(shop: ApiShop) -> dict[str, Any]:
    return refusals(shop, "flask")


@ALL
def test_all_eleven_problems_arrive_as_they_are(shop, in_flask, framework):
    found = in_flask if framework == "flask" else refusals(shop, framework)
    assert len(found) == 11
    for name, answer in found.items():
        assert answer.headers["Content-Type"] == "application/problem+json", name
        assert json.loads(answer.body)["type"] == f"urn:flask-idempotency:problem:{name}"
        assert json.loads(answer.body)["status"] == answer.status
        assert answer.headers["Cache-Control"] == "no-store"
        plain = in_flask[name]
        assert (answer.status, lines(answer), answer.body) == (plain.status, lines(plain), plain.body)
        assert ("Retry-After" in answer.headers) == ("Retry-After" in plain.headers)


@ALL
@pytest.mark.parametrize("name", api_shop.ERRORS)
def test_errors_of_views_are_those_of_the_unprotected_view_and_are_stored_by_their_status(
    shop, framework, name
):
    plain = shop.post(f"/{framework}/plain/{name}", None)
    first = shop.post(f"/{framework}/{name}", f"{framework}-{name}")
    again = shop.post(f"/{framework}/{name}", f"{framework}-{name}")
    assert (first.status, lines(first), first.body) == (plain.status, lines(plain), plain.body)
    is_kept = plain.status < 500 and plain.status != 401
    assert again.headers["Idempotent-Replayed"] == ("true" if is_kept else None)
    del again.headers["Idempotent-Replayed"]
    assert (again.status, lines(again), again.body) == (plain.status, lines(plain), plain.body)


@pytest.mark.parametrize("framework", ["restful", "restx"])
@pytest.mark.parametrize("name", api_shop.RESULTS)
def test_from_outside_a_resource_what_the_framework_makes_of_its_result_is_stored(
    shop, framework, name
):
    plain = shop.post(f"/{framework}/plain/{name}", None)
    first = shop.post(f"/{framework}/outside/{name}", f"{framework}-{name}")
    again = shop.post(f"/{framework}/outside/{name}", f"{framework}-{name}")
    assert (first.status, lines(first), first.body) == (plain.status, lines(plain), plain.body)
    assert again.headers["Idempotent-Replayed"] == "true"
    del again.headers["Idempotent-Replayed"]
    assert (again.status, lines(again), again.body) == (plain.status, lines(plain), plain.body)
