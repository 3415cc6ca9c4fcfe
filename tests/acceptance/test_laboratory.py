"""The laboratory's page without a browser. What happened is read from the books, not from the page."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from html import unescape
from typing import Any

import psycopg2
import pytest
from flask.testing import FlaskClient

from example.seed import ALICE, BOB
from laboratory.page import create_app
from laboratory.stage import Stage, open_stage
from laboratory.stories import MANY, STORIES

# Cents that Alice and Bob have paid from their balances, and what the provider has charged.
WITHOUT = {
    "pay": ([1250], [], []),
    "lost-response": ([1250] * 2, [], []),
    "double-click": ([1250] * 2, [], []),
    "stampede": ([1250] * MANY, [], []),
    "other-amount": ([1250, 9900], [], []),
    "kill-worker": ([1250] * 2, [], []),
    "stop-redis": ([1250] * 2, [], []),
    "restart-postgres": ([1250] * 2, [], []),
    "bob": ([1250], [1250], []),
    "provider-charged": ([], [], [1250] * 2),
}
NAMES = tuple(WITHOUT)
WITH = {
    **{name: ([1250], [], []) for name in NAMES},
    "bob": ([1250], [1250], []),
    "provider-charged": ([], [], [1250]),
}
SHOWS = {"lost-response": "Guarantee 3: Stable replay.", "provider-charged": "No recorded step is"}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with open_stage() as stage:
        yield stage


@pytest.fixture
def client(stage: Stage) -> FlaskClient:
    client = create_app(stage).test_client()
    client.post("/reset", base_url="http://127.0.0.1")
    return client


def press(client: FlaskClient, path: str) -> str:
    """The page, as text, after a press."""
    answer = client.post(path, base_url="http://127.0.0.1", follow_redirects=True)
    assert answer.status_code == 200
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", answer.text)).split())


def books(stage: Stage, name: str) -> tuple[Any, ...]:
    """What both databases and the provider's ledger say, read here."""
    lane = stage.lane(name)
    paid: dict[str, list[int]] = {ALICE.name: [], BOB.name: []}
    with closing(psycopg2.connect(lane.database)) as connection, connection.cursor() as cursor:
        cursor.execute(
            "SELECT account.name, amount FROM payment JOIN account ON account.id = account_id"
            " ORDER BY payment.id"
        )
        for who, amount in cursor.fetchall():
            paid[who].append(amount)
        cursor.execute("SELECT name, balance FROM account")
        assert {who: 500_000 - sum(amounts) for who, amounts in paid.items()} == dict(cursor.fetchall())
        cursor.execute('SELECT count(*) FROM "order" WHERE charge_id IS NOT NULL')
        assert cursor.fetchone()[0] <= 1
    with closing(sqlite3.connect(lane.ledger)) as ledger:
        charges = [amount for (amount,) in ledger.execute("SELECT amount FROM charge")]
    return paid[ALICE.name], paid[BOB.name], charges


@pytest.mark.parametrize("name", NAMES)
def test_a_press_tells_the_story(stage: Stage, client: FlaskClient, name: str) -> None:
    page = press(client, f"/stories/{name}")
    assert books(stage, "without") == WITHOUT[name]
    assert books(stage, "with") == WITH[name]
    assert "not what the story tells" not in page
    assert STORIES[name].told in page
    assert SHOWS.get(name, "Guarantee") in page


def test_no_other_site_presses_a_button(client: FlaskClient) -> None:
    def status(**headers: str) -> int:
        return client.post("/reset", base_url="http://127.0.0.1", headers=headers).status_code

    assert status(Origin="http://127.0.0.1") == 303
    assert status(Origin="http://elsewhere.example") == status(Origin="null") == 403
    assert status(Host="elsewhere.example") == 400
