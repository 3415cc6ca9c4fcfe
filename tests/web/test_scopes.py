"""Whose key it is, and for what: nobody meets another's operation."""

import uuid

import pytest
from flask import Flask, g, request
from werkzeug.local import LocalProxy

from flask_idempotency import (
    ConfigurationError,
    current_operation,
    idempotent,
)


def test_the_same_key_at_two_endpoints_is_two_operations(world, add_view):
    runs = add_view(world), add_view(world, "/refunds", endpoint="refund")
    for path in "/payments", "/refunds":
        assert [world.post(path).status_code for _ in range(2)] == [201, 201]
    assert runs == ([1], [1])


COLLIDING = [("acme", "eu:42"), ("acme:eu", "42"), ("acme:eu:", "42"), ("acme", ":eu:42")]


def test_scopes_and_keys_that_look_alike_when_joined_are_apart(world, add_view):
    runs = add_view(world)
    for user, key in COLLIDING:
        assert "Idempotent-Replayed" not in world.post(user=user, key=key).headers
    assert len(runs) == len(COLLIDING)


SCOPES = [0, 1, "1", -1, 10**30, "one", "Büro", "\ud800", " ", uuid.UUID(int=1), str(uuid.UUID(int=1))]


def test_scopes_of_different_types_are_apart(make_world, add_view):
    scopes = []
    world = make_world(init={"scope": lambda: scopes[-1]})
    runs = add_view(world)
    for scope in SCOPES:
        scopes.append(scope)
        assert "Idempotent-Replayed" not in world.post().headers
        assert world.post().headers["Idempotent-Replayed"] == "true"
    assert len(runs) == len(SCOPES)


@pytest.mark.parametrize(
    "wrong", [True, False, 1.5, b"1", ["alice"], object()], ids=lambda value: type(value).__name__
)
def test_a_scope_of_another_type_is_a_mistake_that_is_named(make_world, add_view, wrong):
    world = make_world(init={"scope": lambda: wrong}, TESTING=True)
    runs = add_view(world)
    kind = type(wrong).__name__
    with pytest.raises(ConfigurationError, match=f"str, int, UUID or None, not {kind}"):
        world.post()
    assert runs == []
    assert world.records() == []


class SignedOut(KeyError):
    """An application's own error, which has a response."""


def signed_out():
    raise SignedOut


def lost_connection():
    raise OSError("the directory is away")


@pytest.mark.parametrize(
    ("scope", "error"), [(lost_connection, OSError), (lambda: g.user.id, AttributeError)]
)
def test_errors_of_a_scope_are_its_own(make_world, add_view, scope, error):
    world = make_world(init={"scope": scope}, TESTING=True)
    runs = add_view(world)
    with pytest.raises(error):
        world.post()
    assert runs == world.records() == []


@pytest.mark.parametrize(
    ("scope", "status"), [(lambda: request.form["tenant"], 400), (signed_out, 401)]
)
def test_a_scope_may_reject_the_request(make_world, add_view, scope, status):
    world = make_world(init={"scope": scope})
    world.app.register_error_handler(SignedOut, lambda error: ("sign in", 401))
    add_view(world)
    assert world.post().status_code == status


def test_an_api_with_one_tenant_has_no_scope(make_world, add_view):
    world = make_world(init={"scope": None})
    runs = add_view(world)
    assert world.post(user="alice").status_code == 201
    assert world.post(user="bob").headers["Idempotent-Replayed"] == "true"
    assert runs == [1]


def test_a_route_may_have_a_scope_of_its_own(world, add_view, assert_problem):
    shop = add_view(world, scope=lambda: request.headers.get("X-Shop"))
    everybody = add_view(world, "/everybody", endpoint="everybody", scope=None)
    for user in "alice", "bob":
        assert world.post(user=user, headers={"X-Shop": "1"}).status_code == 201
        assert world.post("/everybody", user=user).status_code == 201
    assert shop == everybody == [1]
    assert_problem(world.post(), 401, "scope-unknown")


@pytest.mark.parametrize("nobody", [None, ""])
def test_a_proxy_of_nobody_is_nobody(make_world, add_view, assert_problem, nobody):
    world = make_world(init={"scope": lambda: LocalProxy(lambda: nobody)})
    runs = add_view(world)
    assert_problem(world.post(), 401, "scope-unknown")
    assert runs == []


def test_a_proxy_of_somebody_is_that_scope(make_world, add_view):
    scopes = ["alice", LocalProxy(lambda: "alice"), LocalProxy(lambda: "bob")]
    world = make_world(init={"scope": lambda: scopes.pop(0)})
    runs = add_view(world)
    statuses = [world.post().headers.get("Idempotent-Replayed") for _ in range(3)]
    assert (statuses, len(runs)) == ([None, "true", None], 2)


def test_an_application_may_add_its_own_challenge(world, add_view, assert_problem):
    """As the page says: nobody else knows how its callers sign in."""

    @world.app.after_request
    def challenge(response):
        if response.status_code == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        return response

    add_view(world)
    refused = world.post(user="")
    assert_problem(refused, 401, "scope-unknown")
    assert refused.headers["WWW-Authenticate"] == "Bearer"
    assert "WWW-Authenticate" not in world.post().headers


def test_a_name_outlives_the_renaming_of_a_view(make_world, add_view, assert_replayed):
    before = make_world()
    add_view(before, endpoint="pay", name="payment")
    first = before.post()
    after = make_world(
        SQLALCHEMY_DATABASE_URI=before.app.config["SQLALCHEMY_DATABASE_URI"],
    )
    add_view(after, endpoint="create_payment", name="payment")
    assert_replayed(first, after.post())
    assert [record.name for record in after.records()] == ["payment"]


def test_two_views_of_one_name_share_their_keys(world, add_view, assert_problem):
    add_view(world, name="payment")
    other = add_view(world, "/refunds", endpoint="refund", name="payment")
    assert world.post().status_code == 201
    assert_problem(world.post("/refunds"), 422, "key-reused")
    assert other == []


def test_keys_of_two_namespaces_never_meet(make_world, add_view):
    world = make_world(IDEMPOTENCY_NAMESPACE="v1")
    runs = {
        "v1": add_view(world, "/1", endpoint="one", name="pay"),
        "v2": add_view(world, "/2", endpoint="two", name="pay", namespace="v2"),
        "": add_view(world, "/3", endpoint="three", name="pay", namespace=""),
    }
    for path in "/1", "/2", "/3":
        assert [world.post(path).status_code for _ in range(2)] == [201, 201]
    assert runs == {"v1": [1], "v2": [1], "": [1]}


def test_one_object_serves_two_applications(make_world, add_view, assert_problem):
    world = make_world(IDEMPOTENCY_REQUIRED=False)
    other = Flask("other")
    other.config.update(
        SQLALCHEMY_DATABASE_URI=make_world().app.config["SQLALCHEMY_DATABASE_URI"],
        IDEMPOTENCY_STORE="postgres",
        IDEMPOTENCY_HEADER="X-Token",
        IDEMPOTENCY_TABLE="other_record",
    )
    world.db.init_app(other)
    world.idempotency.init_app(other, world.db, scope=None)
    with other.app_context():
        world.db.create_all()

    @idempotent
    def pay():
        return {"app": g.get("account_id"), "there": bool(current_operation)}

    for app in world.app, other:
        app.add_url_rule("/payments", "pay", pay, methods=["POST"])
    assert world.post(key=None).json == {"app": "alice", "there": False}
    assert world.post().json == {"app": "alice", "there": True}
    client = other.test_client()
    assert_problem(client.post("/payments", headers={"Idempotency-Key": "k"}), 400, "key-required")
    for replayed in None, "true":
        answer = client.post("/payments", headers={"X-Token": "key-1"})
        assert answer.json == {"app": None, "there": True}
        assert answer.headers.get("Idempotent-Replayed") == replayed
    with other.app_context():
        for engine in world.db.engines.values():
            engine.dispose()
