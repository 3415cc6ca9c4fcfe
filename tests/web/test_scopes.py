"""Whose key it is, and for what: nobody meets another's operation."""

import uuid

import pytest
from flask import g, request
from werkzeug.local import LocalProxy

from flask_idempotency import ConfigurationError


def is_replayed(response):
    return "Idempotent-Replayed" in response.headers


@pytest.fixture
def scoped(make_world, add_view):
    """An application with these scopes, one for each request; and the list of its runs."""

    def make(*scopes, **config):
        left = list(scopes)
        world = make_world(init={"scope": lambda: left.pop(0)}, **config)
        return world, add_view(world)

    return make


COLLIDING = [("acme", "eu:42"), ("acme:eu", "42"), ("acme:eu:", "42"), ("acme", ":eu:42")]
SCOPES = [0, 1, "1", -1, 10**30, "one", "Büro", "\ud800", " ", uuid.UUID(int=1), str(uuid.UUID(int=1))]


def test_scopes_that_look_alike_are_apart(world, add_view, scoped):
    """As parts of a text, or as values of different types."""
    add_view(world)
    for user, key in COLLIDING:
        assert not is_replayed(world.post(user=user, key=key))
    typed, runs = scoped(*(scope for scope in SCOPES for _ in range(2)))
    assert [is_replayed(typed.post()) for _ in range(2 * len(SCOPES))] == [False, True] * len(SCOPES)
    assert len(runs) == len(SCOPES)


@pytest.mark.parametrize("wrong", [True, False, 1.5, b"1", ["alice"], object()], ids=type)
def test_a_scope_of_another_type_is_a_mistake_that_is_named(scoped, wrong):
    world, runs = scoped(wrong, TESTING=True)
    with pytest.raises(ConfigurationError, match=f"UUID or None, not {type(wrong).__name__}"):
        world.post()
    assert runs == world.records() == []


@pytest.mark.parametrize(
    ("scope", "end"),
    [
        (lambda: g.user.id, AttributeError),
        (lambda: request.form["tenant"], 400),
        (lambda: 1 // 0, 401),
    ],
)
def test_errors_of_a_scope_are_the_applications(make_world, add_view, scope, end):
    world = make_world(init={"scope": scope}, PROPAGATE_EXCEPTIONS=True)
    world.app.register_error_handler(ZeroDivisionError, lambda _error: ("sign in", 401))
    runs = add_view(world)
    if isinstance(end, int):
        assert world.post().status_code == end
    else:
        with pytest.raises(end):
            world.post()
    assert runs == world.records() == []


@pytest.mark.parametrize("init", [{}, {"scope": None}], ids=str)
def test_a_route_may_have_a_scope_of_its_own_or_none(make_world, add_view, assert_problem, init):
    """An application may add its own challenge: nobody else knows how its callers sign in."""
    world = make_world(init=init)
    shop = add_view(world, scope=lambda: request.headers.get("X-Shop"))
    everybody = add_view(world, "/all", endpoint="all", **({} if init else {"scope": None}))
    challenge = {401: {"WWW-Authenticate": "Bearer"}}
    world.app.after_request(lambda r: (r.headers.update(challenge.get(r.status_code, {})), r)[1])
    for user in "alice", "bob":
        assert world.post(user=user, headers={"X-Shop": "1"}).status_code == 201
        assert world.post("/all", user=user).status_code == 201
    assert shop == everybody == [1]
    refused = world.post()
    assert_problem(refused, 401, "scope-unknown")
    assert refused.headers["WWW-Authenticate"] == "Bearer"


def test_a_proxy_is_what_it_stands_for(scoped, assert_problem):
    nobody = [LocalProxy(lambda: None), LocalProxy(lambda: "")]
    world, runs = scoped(*nobody, "alice", LocalProxy(lambda: "alice"), LocalProxy(lambda: "bob"))
    for _ in nobody:
        assert_problem(world.post(), 401, "scope-unknown")
    assert [is_replayed(world.post()) for _ in range(3)] == [False, True, False]
    assert len(runs) == 2


def test_an_operation_has_a_name_and_a_namespace(world, make_world, add_view, assert_problem):
    """By default the name is the endpoint; with one of its own, renaming a view forgets no keys."""
    add_view(world)
    add_view(world, "/refunds", endpoint="refund")
    add_view(world, "/named", endpoint="one", name="payment")
    same = add_view(world, "/same", endpoint="two", name="payment")
    add_view(world, "/other", endpoint="three", name="payment", namespace="v2")
    for path in "/payments", "/refunds", "/named", "/other":
        assert [is_replayed(world.post(path)) for _ in range(2)] == [False, True], path
    assert_problem(world.post("/same"), 422, "key-reused")
    uri = world.app.config["SQLALCHEMY_DATABASE_URI"]
    after = make_world(SQLALCHEMY_DATABASE_URI=uri, IDEMPOTENCY_NAMESPACE="v2")
    renamed = add_view(after, "/other", endpoint="create_payment", name="payment")
    older = add_view(after, "/named", endpoint="older", name="payment", namespace="")
    assert is_replayed(after.post("/other"))
    assert is_replayed(after.post("/named"))
    assert same == renamed == older == []
