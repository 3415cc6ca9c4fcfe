"""The Agentic Commerce Protocol: its RFC on agentic checkout, sections 3.1 and 6.

Read at commit c2afc863 (15 June 2026) of agentic-commerce-protocol/agentic-commerce-protocol. The
numbers in the names are its sections. What does not hold is expected as it is, with the reason. What
does not depend on the profile is not repeated: whose a key is, what a replay is, how long it is kept.
"""

import json

import pytest
from flask import request
from werkzeug.http import http_date

from flask_idempotency import KeyReused, Retryable, idempotent
from flask_idempotency.client.responses import problem_type
from flask_idempotency.core.errors import PROBLEMS
from flask_idempotency.web.setup.profiles import PROFILES

JSON = "application/json"


@pytest.fixture
def world(make_world):
    return make_world(IDEMPOTENCY_PROFILE="acp")


@pytest.fixture
def assert_error():
    """Holds a response against the flat form of errors (section 3.1) and the table of section 6.4."""

    def check(response, status, code, kind="invalid_request"):
        assert response.status_code == status, response.text
        assert response.content_type == JSON
        assert set(response.json) == {
            "type",
            "code",
            "message",
        }  # the schema allows no others but param
        assert (response.json["type"], response.json["code"]) == (kind, code)
        assert response.json["message"]
        assert "canary" not in response.text

    return check


@pytest.fixture
def send(world):
    """A function that sends a body as it is written."""

    def post(body, path="/payments", **kwargs):
        return world.post(path, data=body, content_type=JSON, **kwargs)

    return post


def test_6_1_a_request_without_a_key_gets_400(world, add_view, assert_error):
    runs = add_view(world)
    assert_error(world.post(key=None), 400, "idempotency_key_required")
    assert runs == []


def test_6_1_a_key_is_a_text_of_up_to_255_characters(world, add_view, assert_error):
    add_view(world)
    assert world.post(key="k" * 255).status_code == 201
    assert_error(world.post(key="k" * 256), 400, "key_malformed")  # a code left to the server


def test_6_1_on_another_session_of_one_endpoint_a_key_is_refused(world, add_view, assert_error):
    """If the RFC's "endpoint path" is the concrete one, the key would run here; we say 422."""
    runs = add_view(world, "/checkout_sessions/<int:of>")
    assert world.post("/checkout_sessions/1").status_code == 201
    assert_error(world.post("/checkout_sessions/2"), 422, "idempotency_conflict")
    assert len(runs) == 1


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ('{"a": 1, "b": [1, 2]}', ' {"b":[1,2],"a":1}', True),
        ('{"a": 1.0}', '{"a": 1}', True),
        ('{"a": 1, "ext": {"loyalty": "x"}}', '{"a": 1, "ext": {"loyalty": "y"}}', False),  # 6.7
    ],
    ids=["order of members", "number", "extension"],
)
def test_6_2_bodies_are_compared_as_json(add_view, world, send, first, second, same):
    runs = add_view(world)
    assert send(first).status_code == 201
    assert send(second).status_code == (201 if same else 422)
    assert len(runs) == 1


def test_6_4_while_the_first_request_runs_the_key_gets_409(
    world, add_view, assert_error, gate, background
):
    """Whatever the body: ``tests/contract/test_amended.py``, which has section 6.5, too."""
    add_view(world, during=gate)
    first = background(world.post)
    gate.wait_until_reached()
    refused = world.post()
    assert_error(refused, 409, "idempotency_in_flight")
    assert int(refused.headers["Retry-After"]) >= 1
    assert refused.headers["Idempotency-Key"] == "key-1"
    gate.open()
    assert first.result().status_code == 201
    assert world.post(json={"amount": 6}).status_code == 422


def test_6_5_what_called_others_is_not_repeated_after_a_server_error(world, add_view, assert_error):
    """Not 6.5 to the letter: the effect may have happened, and section 6.3 forbids to repeat it."""

    @world.app.post("/charges")
    @idempotent(atomic=False)
    def charge():
        return {"declined": "perhaps"}, 502

    assert world.post("/charges").status_code == 502
    again = world.post("/charges")
    assert (again.status_code, again.headers["Idempotent-Replayed"]) == (502, "true")
    assert_error(world.post("/charges", json={"amount": 6}), 422, "idempotency_conflict")


def test_6_5_a_view_that_says_so_runs_again_but_its_finished_steps_keep_their_body(world, assert_error):
    runs = []

    @world.app.post("/charges")
    @idempotent(atomic=False)
    def charge():
        runs.append(request.json["amount"])
        if len(runs) == 1:
            raise Retryable
        return {}, 201

    assert_error(world.post("/charges"), 503, "try_again", "service_unavailable")
    assert_error(world.post("/charges", json={"amount": 6}), 422, "idempotency_conflict")
    assert world.post("/charges").status_code == 201
    assert runs == [5, 5]


class TestEcho:
    """Section 3.1: the key's header is on all responses to a POST."""

    def test_it_is_on_first_responses_replays_and_errors(self, world, add_view):
        add_view(world)
        for sent, key in ({}, '"8e03"'), ({}, "8e03"), ({"json": {"amount": 6}}, "8e03"):
            assert world.post(key=key, **sent).headers.getlist("Idempotency-Key") == [key]
        assert "Idempotency-Key" not in world.post(key=None).headers

    def test_it_is_the_retrys_own_where_the_view_had_set_one(self, world):
        @world.app.post("/payments")
        @idempotent
        def pay():
            return {}, 201, {"Idempotency-Key": "of the view"}

        assert world.post(key="8e03").headers.getlist("Idempotency-Key") == ["8e03"]
        assert world.post(key='"8e03"').headers.getlist("Idempotency-Key") == ['"8e03"']

    def test_it_is_on_the_response_of_an_error_that_nobody_handled(self, world, add_view):
        world.app.config["PROPAGATE_EXCEPTIONS"] = False
        add_view(world, during=lambda: 1 / 0)
        response = world.post()
        assert (response.status_code, response.headers["Idempotency-Key"]) == (500, "key-1")

    @pytest.mark.parametrize("key", ["a,b", "k" * 256])
    def test_a_malformed_key_comes_back_too(self, world, add_view, key):
        add_view(world)
        response = world.post(key=key)
        assert (response.status_code, response.headers["Idempotency-Key"]) == (400, key)

    @pytest.mark.parametrize("key", ["a\tb", "a\x01b", "", "a\x80b"])
    def test_but_nothing_that_no_server_may_send(self, world, add_view, key):
        add_view(world)
        response = world.post(key=key)
        assert response.status_code == 400
        assert "Idempotency-Key" not in response.headers

    def test_unprotected_and_observed_routes_stay_as_they_are(self, world, add_view):
        add_view(world, "/observed", endpoint="observed", enforce=False)
        world.app.post("/plain")(dict)
        for path in "/observed", "/plain":
            assert "Idempotency-Key" not in world.post(path).headers


def test_an_application_may_still_respond_in_its_own_form(world, add_view):
    add_view(world)
    world.app.register_error_handler(KeyReused, lambda error: ({"own": error.type}, error.status))
    assert world.post().status_code == 201
    refused = world.post(json={"amount": 6})
    assert (refused.status_code, refused.json) == (422, {"own": "key-reused"})
    assert refused.headers["Idempotency-Key"] == "key-1"


@pytest.mark.parametrize("profile", ["ietf", "repeatable-requests"])
def test_in_another_profile_an_amended_body_is_refused(make_world, profile):
    world = make_world(IDEMPOTENCY_PROFILE=profile, IDEMPOTENCY_HEADER="Idempotency-Key")
    when = {"Repeatability-First-Sent": http_date()}
    world.app.config["PROPAGATE_EXCEPTIONS"] = False
    world.app.post("/payments")(idempotent(lambda: 1 / 0))
    assert world.post(headers=when).status_code == 500
    refused = world.post(json={"amount": 6}, headers=when)
    assert refused.json["type"].endswith(":key-reused")


def test_the_client_knows_each_problem_by_its_name():
    for kind in PROBLEMS:
        body = PROFILES["acp"].named(kind, "")
        assert (
            problem_type({"Content-Type": "application/json"}, json.dumps(body).encode()) == kind.type
        )
    other = b'{"type": "invalid_request", "code": 5}'
    assert problem_type({"Content-Type": "application/json"}, other) == "invalid_request"
