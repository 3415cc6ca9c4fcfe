"""``flask idempotency list --key``: an operator who has a customer's key finds the record."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from flask_idempotency import idempotent
from tests.integration.commands.running import runner

KEY = "canary-key-7f3a"
USER = "5f0c8d0e-6c1f-4a6f-9f57-0d6c1a3a5b11"


@pytest.fixture
def found(run: Any) -> Callable[..., list[str]]:
    """The digits that the command gives."""

    def found(*options: str, key: str = KEY) -> list[str]:
        result = run("list", "--json", "--key", key, *options)
        assert "canary" not in result.output
        digits = [line["key"] for line in json.loads(result.output)]
        assert result.exit_code == (0 if digits else 1), "as grep's"
        return digits

    return found


def digits(world: Any) -> list[str]:
    return [bytes(record.key).hex()[:8] for record in world.records()]


def test_a_record_is_found_by_its_key_operation_and_scope(world, run, pay, found):
    pay(key=KEY, user="alice")
    for key, user in (KEY, "bob"), ("another", "alice"):
        pay(key=key, user=user)
    ours = digits(world)[:1]
    place = "--operation", "pay", "--scope", "alice"
    assert found(*place) == ours
    assert found(*place, key=f'"{KEY}"') == ours, "as it stands in the header"
    assert found(*place, "--state", "completed") == ours
    assert found(*place, "--state", "failed") == []
    assert found("--operation", "pay") == found("--operation", "brief", "--scope", "alice") == []
    assert found(*place, "--namespace", "v2") == []
    result = run("list", "--key", KEY, *place)
    assert result.output.splitlines()[1].split()[:2] == [*ours, "pay"]
    result = run("list", "--key", "canary-other", *place)
    assert result.output == "no record of this key, operation, scope and namespace\n"
    assert result.exit_code == 1
    assert run("list", "--state", "failed").exit_code == 0, "to have no records is no failure"
    assert run("show", ours[0].upper()).exit_code == 0


@pytest.mark.parametrize("scope", [17, "17", UUID(USER), USER, None])
def test_a_scope_is_looked_for_as_all_that_its_text_may_stand_for(world, add_view, found, scope):
    add_view(world, scope=None if scope is None else lambda: scope)
    world.post(key=KEY)
    given = [] if scope is None else ["--scope", str(scope)]
    assert found("--operation", "pay", *given) == digits(world)
    assert found("--operation", "pay", "--scope", "18") == []


def test_two_scopes_of_one_text_are_both_shown(world, add_view, found):
    scopes = [17, "17"]
    add_view(world, scope=lambda: scopes[0])
    world.post(key=KEY)
    scopes.reverse()
    world.post(key=KEY)
    assert found("--operation", "pay", "--scope", "17") == digits(world)[::-1]


def test_the_namespace_is_that_of_the_route_or_the_one_given(make_world, add_view):
    world = make_world(IDEMPOTENCY_NAMESPACE="of-app")
    run = runner(world.app)
    add_view(world)
    add_view(world, "/v2", endpoint="two", namespace="v2")
    world.app.post("/named", endpoint="named")(idempotent(name="fixed", namespace="v3")(dict))
    for path, name in ("/payments", "pay"), ("/v2", "two"), ("/named", "fixed"):
        world.post(path, key=KEY)
        place = "--key", KEY, "--operation", name, "--scope", "alice"
        assert digits(world)[-1] in run("list", *place).output
        assert "no record" in run("list", *place, "--namespace", "v9").output
    for options, given in ({}, ()), ({"namespace": "v4"}, ("--namespace", "v4")):
        with world.app.app_context():
            world.idempotency.run(KEY, dict, scope="alice", name="job", **options)
        place = "--key", KEY, "--operation", "job", "--scope", "alice", *given
        assert digits(world)[-1] in run("list", *place).output


@pytest.mark.parametrize(
    "options", ["--key canary", "--key canary --scope s", "--namespace n --operation pay"]
)
def test_a_key_needs_its_operation_and_a_scope_a_key(run, options):
    result = run("list", *options.split())
    assert result.exit_code == 1
    assert "by its key and operation" in result.output
    assert "canary" not in result.output


@pytest.mark.parametrize("command", [["show"], ["release", "--why=asked"]])
def test_a_key_in_the_place_of_digits_is_sent_to_where_it_is_looked_up(run, command):
    result = run(*command, KEY)
    assert result.exit_code == 1
    assert "flask idempotency list --key KEY --operation NAME" in result.output
    assert KEY not in result.output
