"""Records that something else wrote: each is shown as far as it can be read, and hides no other."""

from __future__ import annotations

import json
from typing import Any

import pytest

DEEP = "[" * 5000 + "]" * 5000
DIGITS = "1" * 5000
KEPT = '{"at": "2099-01-01 00:00:00.000000", "by": "ada", "did": "released", "why": "is kept"}'

IN_BOTH = [
    *(
        ("audit", f"'[{entry}, {KEPT}]'")
        for entry in (
            DIGITS,
            '{"at": "x", "by": "b", "did": null, "why": []}',
            '{"at": 1e400, "by": 1e400, "did": 1e400, "why": 1e400}',
            r'{"at": "x", "by": "\ud800", "did": "c", "why": "\u0000"}',
        )
    ),
    *(("audit", value) for value in ("'{}'", f"'{DEEP}'")),
    ("headers", f"'{DEEP}', status = 500"),
    ("lease_expires_at", "'infinity'"),
]
STRANGE = {
    "postgres": [
        *IN_BOTH,
        ("lease_expires_at", "'4713-01-01 BC'"),
        ("expires_at", "'200000-01-01'"),
        ("created_at", "'infinity'"),
    ],
    "sql": [
        *IN_BOTH,
        ("audit", "'no JSON'"),
        *(("created_at", value) for value in ("'soon'", "7")),
        *(("status", value) for value in (f"'{DIGITS}'", "x'ff'")),
    ],
}


@pytest.fixture(params=STRANGE, scope="module")
def store(request: pytest.FixtureRequest) -> Any:
    return request.param


def strictly(text: str) -> Any:
    """What JSON as in RFC 8259 says, which knows no ``Infinity``."""
    return json.loads(text, parse_constant=pytest.fail)


def test_a_strange_record_is_shown_hides_no_other_and_is_not_decided_about(shop, store):
    for column, value in STRANGE[store]:
        shop.begin()
        shop.post("long")
        digits, said = shop.begun("order"), f"{column} = {value[:40]}"
        shop.sql(f"update idempotency_record set {column} = {value} where name = 'order'")
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
        if column == "headers" or "no JSON" in value:
            how = ["--status=200", "--body={}", "--why=it was paid", "--yes"]
            result = shop.run("resolve", digits, *how)
            assert (result.exit_code, "The stored record cannot be read" in result.output) == (1, True)
