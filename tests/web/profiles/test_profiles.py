"""``IDEMPOTENCY_PROFILE``: what it sets, what wins over it, and where it is told."""

import pytest
from openapi_spec_validator import validate
from werkzeug.http import http_date

from flask_idempotency import ConfigurationError, idempotent
from flask_idempotency.cli import cli
from flask_idempotency.core.errors import PROBLEMS
from flask_idempotency.integrations.openapi import add_idempotency
from flask_idempotency.testing import assert_idempotent
from flask_idempotency.web.setup.profiles import PROFILES
from flask_idempotency.web.setup.settings import SETTINGS

PROFILE = pytest.mark.parametrize("profile", PROFILES)


@pytest.mark.parametrize("wrong", ["ACP", "stripe", "", None, 1, ["acp"]])
def test_an_unknown_profile_lists_the_known_ones(make_world, wrong):
    known = "allowed: 'ietf', 'acp', 'repeatable-requests'"
    with pytest.raises(ConfigurationError, match=f"IDEMPOTENCY_PROFILE is .*; {known}"):
        make_world(IDEMPOTENCY_PROFILE=wrong)


def test_what_a_profile_changes_has_its_row_below_that_of_the_profile():
    names = [setting.name.lower() for setting in SETTINGS]
    changed = {name for profile in PROFILES.values() for name in profile.defaults}
    assert changed <= set(names[names.index("profile") + 1 :])


def test_every_problem_that_a_profile_names_is_one():
    known = {kind.type for kind in PROBLEMS} | {"key-expired"}
    for profile in PROFILES.values():
        assert {*profile.statuses, *(profile.codes or {})} <= known


def test_a_setting_of_the_application_wins(make_world):
    profile, header = "repeatable-requests", "X-Request-ID"
    world = make_world(
        IDEMPOTENCY_PROFILE=profile, IDEMPOTENCY_HEADER=header, IDEMPOTENCY_REQUIRED=True
    )
    settings = world.app.extensions["idempotency"].settings
    assert (settings.header, settings.required, settings.profile.name) == (header, True, profile)


def test_two_applications_of_one_extension_may_have_different_ones(make_world, add_view):
    worlds = [make_world(IDEMPOTENCY_PROFILE=profile) for profile in ("acp", "ietf")]
    for world in worlds:
        add_view(world)
    types = [world.post(key=None).content_type for world in worlds]
    assert types == ["application/json", "application/problem+json"]


def test_without_a_profile_responses_have_no_header_more(world, add_view):
    add_view(world)
    names = {name for name, _ in world.post().headers}
    assert names == {"Content-Type", "Content-Length"}


class TestOpenAPI:
    @pytest.fixture
    def described(self, make_world):
        """What the document says about the one operation, and the document."""

        def describe(profile):
            world = make_world(IDEMPOTENCY_PROFILE=profile)
            world.app.post("/payments", endpoint="pay")(idempotent(dict))
            operation = {"responses": {"201": {"description": "Paid."}}}
            document = {"openapi": "3.0.3", "info": {"title": "Shop", "version": "1"}}
            document["paths"] = {"/payments": {"post": operation}}
            for _ in range(2):
                validate(add_idempotency(document, world.app))
            return operation, document["components"]["schemas"]["IdempotencyProblem"]

        return describe

    def test_acp(self, described):
        operation, schema = described("acp")
        assert set(operation["responses"]) == {"201", "400", "409", "422", "503"}
        for response in operation["responses"].values():
            assert "Idempotency-Key" in response["headers"]
        assert list(operation["responses"]["422"]["content"]) == ["application/json"]
        assert "idempotency_conflict" in operation["responses"]["422"]["description"]
        assert "Idempotent-Replayed" in operation["responses"]["201"]["headers"]
        assert schema["required"] == ["type", "code", "message"]

    def test_repeatable_requests(self, described):
        operation, schema = described("repeatable-requests")
        names = [each["name"] for each in operation["parameters"]]
        assert names == ["Repeatability-First-Sent", "Repeatability-Request-ID"]
        assert not any(each["required"] for each in operation["parameters"])
        statuses = {"400", "409", "503"}  # and 412, where a key can be too old
        assert set(operation["responses"]) - {"412"} == {"201", *statuses}
        assert "key-reused" in operation["responses"]["400"]["description"]
        for response in operation["responses"].values():
            assert "Repeatability-Result" in response["headers"]
        assert schema["required"] == ["type", "title", "status", "detail"]


@PROFILE
def test_the_kit_for_tests_knows_what_a_profile_wants(make_world, add_view, profile):
    world = make_world(IDEMPOTENCY_PROFILE=profile)
    add_view(world)
    alice, bob = {"X-User": "alice"}, {"X-User": "bob"}
    assert_idempotent(
        world.client,
        "POST",
        "/payments",
        json={"amount": 5},
        headers=alice,
        effects=world.count,
        changed=True,
        other={"headers": bob},
        duplicates=2,
    )


@PROFILE
def test_a_command_finds_the_key_as_it_was_sent(make_world, add_view, profile):
    world = make_world(IDEMPOTENCY_PROFILE=profile)
    add_view(world)
    name = world.app.extensions["idempotency"].settings.header
    headers = {name: "112A3A3E", "Repeatability-First-Sent": http_date()}
    assert world.post(key=None, headers=headers).status_code == 201
    words = ["list", "--key", "112A3A3E", "--operation", "pay", "--scope", "alice", "--json"]
    found = world.app.test_cli_runner().invoke(cli, words)
    assert (found.exit_code, '"completed"' in found.output) == (0, True), found.output
