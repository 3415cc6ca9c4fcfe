"""Records that something else wrote: each is shown as far as it can be read, and hides no other."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.integration.commands.shop import Shop

DEEP = "[" * 5000 + "]" * 5000
DIGITS = "1" * 5000
KEPT = '{"at": "2099-01-01 00:00:00.000000", "by": "ada", "did": "released", "why": "is kept"}'

ODD_ENTRIES = [
    "7",
    "null",
    DIGITS,
    '{"at": "x", "by": "b", "did": null, "why": []}',
    '{"at": 1e400, "by": 1e400, "did": 1e400, "why": 1e400}',
    f'{{"at": {DIGITS}, "by": "b", "did": "c", "why": "d"}}',
    r'{"at": "x", "by": "\ud800", "did": "c", "why": "\u0000"}',
]
IN_BOTH = [
    *(("audit", f"'[{entry}, {KEPT}]'") for entry in ODD_ENTRIES),
    *(("audit", value) for value in ("'{}'", "'7'", f"'{DEEP}'")),
    ("headers", f"'{DEEP}'"),
    ("lease_expires_at", "'infinity'"),
]
STRANGE = {
    "postgres": [
        *IN_BOTH,
        *(("lease_expires_at", f"'{time}'") for time in ("-infinity", "4713-01-01 BC")),
        ("expires_at", "'200000-01-01'"),
        ("completed_at", "'0044-01-01 BC'"),
        ("created_at", "'infinity'"),
    ],
    "sql": [
        *IN_BOTH,
        ("audit", "'no JSON'"),
        ("expires_at", "'0044-01-01 BC'"),
        *(("created_at", value) for value in ("'soon'", "7")),
        *(("status", value) for value in (f"'{DIGITS}'", "x'ff'")),
        ("attempt", f"'{DIGITS}'"),
    ],
}
WHY = "The stored record cannot be read"


@pytest.fixture(params=STRANGE, scope="module")
def store(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def forge(shop: Shop) -> Any:
    """Writes SQL into a column of the order, and undoes it before the next one."""

    def forge(column: str, value: str) -> str:
        shop.begin()
        shop.post("long")
        digits = shop.begun("order")
        shop.sql(f"update idempotency_record set {column} = {value} where name = 'order'")
        return digits

    return forge


def strictly(text: str) -> Any:
    """What JSON as in RFC 8259 says, which knows no ``Infinity``."""
    return json.loads(text, parse_constant=pytest.fail)


def test_a_strange_record_is_shown_and_hides_no_other(shop, store, forge):
    for column, value in STRANGE[store]:
        digits, said = forge(column, value), f"{column} = {value[:40]}"
        assert "2 records in all: " in shop.run("list").output, said
        shown = [line["operation"] for line in strictly(shop.run("list", "--json").stdout)]
        assert sorted(shown) == ["long", "order"], said
        result = shop.run("show", digits)
        assert result.exit_code == 0, said
        assert all(text.isprintable() for text in result.stdout.split("\n")), said
        strictly(shop.run("show", digits, "--json").stdout)
        if column == "created_at":  # what Python has no time for is shown as text
            assert value.strip("'")[:4] in result.stdout, said
        for path in "/", "/records?limit=9", f"/records/{digits}":
            response = shop.page(path)
            assert response.status_code == 200, said
            assert "long" in response.text or digits in response.text, said


def test_what_cannot_be_read_is_not_decided_about_and_says_why(shop, store, forge):
    unreadable = {"postgres": rf"""'["\u0000", {KEPT}]'""", "sql": "'no JSON'"}[store]
    for column, value in ("audit", unreadable), ("headers", f"'{DEEP}', status = 500"):
        digits = forge(column, value)
        how = ["--status=200", "--body={}", "--why=it was paid", "--yes"]
        result = shop.run("resolve", digits, *how)
        assert (result.exit_code, WHY in result.output) == (1, True)
        path = f"/records/{digits}/resolve"
        seen = re.search('name="seen" value="([^"]+)"', shop.page(path).text)[1]
        form = {"status": "200", "body": "{}", "content_type": "", "why": "it was paid"}
        response = shop.page(path, seen=seen, **form)
        assert (response.status_code, WHY in response.text) == (409, True)
