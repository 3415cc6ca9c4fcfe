"""``flask idempotency list`` and ``show`` in detail: advice, keys, odd contents, large tables."""

from __future__ import annotations

import json
import re
from typing import Any
from uuid import UUID

import pytest
from flask import Flask

from flask_idempotency import Idempotency, idempotent
from flask_idempotency.stores.admin import CAPPED
from flask_idempotency.stores.postgres import statements
from tests.integration.commands.running import build, runner
from tests.integration.commands.shop import KEY, Shop


@pytest.fixture(scope="module")
def store() -> str:
    return "sql"


def words(shop: Shop, *arguments: str) -> str:
    return " ".join(shop.run(*arguments).output.split())


OWN_ROWS = "Look at your own rows first: what the view saved outside a step, it saves again"


@pytest.mark.parametrize(
    ("name", "came", "release", "resolve"),
    [
        ("order", "Finished: charge.", "repeats no finished step", "not do what comes after charge"),
        ("cut", "No step has finished", "recognises its key", "First do by hand"),
    ],
)
def test_show_says_which_decision_fits_and_so_does_the_question_of_resolve(
    shop, name, came, release, resolve
):
    digits = shop.begun(name)
    for command in ["show"], ["resolve", "--status=201", "--why=asked"]:
        before, _, advice = words(shop, *command, digits).partition("Release it")
        to_release, _, to_resolve = advice.partition("Resolve it")
        assert (came in before, release in to_release, OWN_ROWS in to_release) == (True, True, True)
        assert resolve in to_resolve


def test_nothing_is_advised_where_nothing_is_to_be_decided(shop):
    assert "Resolve" not in words(shop, "show", shop.begun("ok"))


def test_show_derives_the_keys_that_the_other_service_got(shop):
    """Also for a step that was cut off, and for a name that is no step's."""
    digits = shop.begun("order")
    (step,) = shop.show(digits)["steps"]
    assert [step["derived_key"]] == shop.calls
    (shown,) = shop.rows("show", digits, "--derive", "charge", "--derive", "refund")
    assert shown["derived"][0] == {"name": "charge", "derived_key": shop.calls[0]}
    assert shown["derived"][1]["name"] == "refund"
    assert f"charge {shop.calls[0]}" in words(shop, "show", digits, "--derive", "charge")


def test_more_digits_tell_two_records_apart_that_share_eight(shop):
    digits, other = shop.begun("order"), shop.begun("wrong")
    twin = digits + 15 * "0"
    assert shop.run("show", other.upper()).exit_code == 0
    shop.sql("update idempotency_record set key = :twin where name = 'wrong'",
             twin=bytes.fromhex(twin.ljust(46, "0")))  # fmt: skip
    for command in ["show"], ["release", "--why=asked"]:
        result = shop.run(*command, digits)
        assert (result.exit_code, "more than one record" in result.output) == (1, True)
    first, second = re.findall(f"{digits}[0-9a-f]{{8}}", result.output)
    assert {shop.show(each)["operation"] for each in (first, second)} == {"order", "wrong"}
    assert shop.show(twin[:16])["key"] == digits, "as list shows it"
    released = shop.run("release", "--why=asked", twin[:16])
    assert released.output.startswith(f"{digits}: may be run again")


def test_nothing_of_the_table_reaches_the_terminal_as_an_instruction(shop):
    """Titles, colours, line breaks, text that runs from right to left: anybody may write there."""
    odd = "\x1b]0;title\x07\x9b31m\r\nDEL\x7f\u202eübel"
    digits = shop.begun("ok")
    shop.sql("update idempotency_record set name = :odd, state = :state, steps ="
             " json_object(:odd, json_object('attempt', 1, 'at', 'now', 'result', 'x'))",
             odd=odd, state="x\x1b[2J")  # fmt: skip
    shown = r"\x1b]0;title\x07\x9b31m\r\nDEL\x7f\u202eübel"
    for count, command in (1, ["list"]), (2, ["show", digits]):
        output = shop.run(*command).stdout
        assert output.count(shown) == count
        assert all(line.isprintable() for line in output.split("\n"))
        assert shop.rows(*command)[0]["operation"] == odd
    failed = shop.run("release", "--why=asked", digits)
    assert r"x\x1b[2J: only what is" in failed.output
    assert all(line.isprintable() for line in failed.output.split("\n"))


@pytest.fixture
def app(tmp_path: Any) -> Any:
    """An application of one tenant, without routes."""
    app = build(f"sqlite:///{tmp_path}/shop.db", IDEMPOTENCY_STORE="sql", IDEMPOTENCY_NAMESPACE="app")
    runner(app)("create-table")
    yield app
    with app.app_context():
        app.extensions["sqlalchemy"].engine.dispose()


def add(app: Flask, endpoint: str, **options: Any) -> Any:
    """Add a route with these options; a function that sends it a request."""
    app.add_url_rule(f"/{endpoint}", endpoint, idempotent(**options)(dict), methods=["POST"])
    return lambda: app.test_client().post(f"/{endpoint}", headers={"Idempotency-Key": KEY})


def test_a_scope_is_looked_for_as_all_that_its_text_may_stand_for(app):
    run, user = runner(app), "5f0c8d0e-6c1f-4a6f-9f57-0d6c1a3a5b11"
    scopes = [17, "17", UUID(user), user, 7]
    post = add(app, "pay", scope=lambda: scopes[0])
    while scopes:
        assert post().status_code == 200
        scopes.pop(0)
    for text, count in ((user, 2), ("17", 2), ("7", 1), *((odd, 0) for odd in ODD_SEVENS)):
        for which in ["--key", KEY, "--operation", "pay"], []:
            found = json.loads(run("list", "--json", *which, "--scope", text).stdout)
            assert len(found) == count, text


ODD_SEVENS = ("0_7", "07", "+7", " 7", "\u0667", "18")
"""Python reads all but the last as 7."""


def test_the_namespace_is_that_of_the_route_or_the_one_given(app):
    run = runner(app)
    routes: dict[str, dict[str, str]] = {
        "pay": {},
        "two": {"namespace": "v2"},
        "fixed": {"name": "fixed", "namespace": "v3"},
    }
    for post in [add(app, path, **options) for path, options in routes.items()]:
        assert post().status_code == 200
    for name in routes:
        place = ["--key", f'"{KEY}"', "--operation", name]  # as it stands in the header
        (line,) = json.loads(run("list", "--json", *place).stdout)
        assert line["operation"] == name
        for wrong in ["--namespace", "v9"], ["--state", "failed"]:
            assert run("list", *place, *wrong).exit_code == 1
        assert run("list", *place, "--scope", "7").exit_code == 1
    for options, given in ({}, ()), ({"namespace": "v4"}, ("--namespace", "v4")):
        with app.app_context():
            Idempotency().run(KEY, dict, scope=None, name="job", **options)
        result = run("list", "--json", "--key", KEY, "--operation", "job", *given)
        assert len(json.loads(result.stdout)) == 1


FILL = """insert into idempotency_record
       (key, name, state, fingerprint_version, fingerprint, attempt, owner, created_at, expires_at,
        lease_expires_at)
select substring(sha256(int8send(n)) for 23), 'pay', {state}, 1, sha256('x'), 1, 'somebody',
       now(), now() + interval '1 h', {lease}
  from generate_series({first}, {last}) as n"""


@pytest.mark.parametrize("store", ["postgres"])
def test_a_large_table_is_estimated_but_what_should_be_few_is_counted_up_to_a_limit(
    world, run, monkeypatch
):
    """A table of many pages is estimated."""
    sql = statements.SQL.others.replace("100.0 * 1000", "100.0 * 200")
    monkeypatch.setattr(statements.SQL, "others", sql)
    interrupted = {"state": "'in_progress'", "lease": "clock_timestamp()"}
    world.sql(FILL.format(first=1, last=20_000, state="'completed'", lease="null::timestamptz"))
    world.sql(FILL.format(first=20_001, last=20_003, **interrupted))
    output = run("list").output
    about = re.search(r"\nabout ([\d,]+) records in all: ", output)
    assert int(about[1].replace(",", "")) == pytest.approx(20_003, rel=0.3)
    assert ", 3 interrupted\n" in output
    assert "waiting for a retry or an operator: 3, " in output
    assert run("list").output == output, "the same pages each time"
    world.sql("update idempotency_record set expires_at = '-infinity'")
    world.sql(FILL.format(first=20_004, last=20_000 + CAPPED, **interrupted))
    output = run("list").output
    assert "waiting for a retry or an operator: 10,000 or more, the oldest for " in output
    assert "waiting for a purge: 10,000 or more\n" in output, "since ever"
