"""The look-up of outcomes: whose, of which operation, by which key, and from which store."""

import functools
import itertools
import secrets

import flask_login
import pytest
from flask import Blueprint, Flask, abort, current_app, request
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import ConfigurationError, Idempotency, idempotent
from flask_idempotency.cli import cli
from flask_idempotency.outcomes import outcomes_blueprint


def test_another_user_gets_no_hint(world, look, add_view, assert_problem):
    add_view(world)
    world.post()
    assert look().status_code == 200
    for other in look(user="bob"), look("another"):
        assert assert_problem(other, 404, "outcome-unknown") == assert_problem(
            look("never-sent"), 404, "outcome-unknown"
        )


def test_an_operation_of_run_is_found_by_the_commands_alone(app, world, look, add_view, assert_problem):
    add_view(world)
    with app.app_context():
        world.idempotency.run("key-1", dict, scope="alice", name="invoice")
    assert_problem(look(operation="invoice"), 404, "outcome-unknown")
    runner = app.test_cli_runner()
    listed = runner.invoke(cli, ["list", "--operation", "invoice"])
    digits = listed.output.splitlines()[1].split()[0]
    assert "completed" in runner.invoke(cli, ["show", digits]).output


def test_authorize_replay_is_asked(world, look, add_view, assert_problem):
    asked = []

    def refuse(operation):
        asked.append((operation.scope, operation.key, operation.attempt))
        return False

    add_view(world, authorize_replay=refuse)
    assert_problem(look(), 404, "outcome-unknown")
    assert asked == []
    world.post()
    assert_problem(look(), 403, "replay-forbidden")
    assert asked == [("alice", "key-1", 1)]


def test_scope_name_and_namespace_of_the_route_count(app, world, look, add_view, assert_problem):
    add_view(world, scope=None, name="payment", namespace="v2")
    world.post()
    assert look(user="bob", operation="payment").json["state"] == "completed"
    assert_problem(look(operation="pay"), 404, "outcome-unknown")
    app.config["IDEMPOTENCY_NAMESPACE"] = "v3"  # read once: changes nothing
    assert look(operation="payment").status_code == 200


def test_a_protected_blueprint_is_looked_up_by_its_endpoint(app, world, look):
    world.idempotency.protect(app)
    app.add_url_rule("/payments", "pay", dict, methods=["POST", "GET"])
    world.post()
    assert look().json["state"] == "completed"


def test_the_operation_may_be_left_out_if_there_is_one(world, look, add_view, assert_problem):
    add_view(world)
    world.post()
    assert look(operation=None).json["operation"] == "pay"
    assert_problem(look(operation="canary"), 404, "outcome-unknown")


def test_the_operation_must_be_named_if_there_are_several(world, look, add_view, assert_problem):
    add_view(world)
    add_view(world, "/refunds", endpoint="refund")
    world.post()
    answer = assert_problem(look(operation=None), 404, "outcome-unknown")
    assert "?operation=" in answer["detail"]
    assert_problem(look(operation="refund"), 404, "outcome-unknown")
    assert look().status_code == 200


def test_any_key_can_be_looked_up(world, add_view, look):
    """In the path where a URL can hold it, otherwise in the header."""
    add_view(world, key=lambda: plain)
    for key in "a/b/c", "a%20b", "a;b,c", "idempotency-policy", "\u00fc", "a//b":
        plain = key.replace("%20", " ")
        world.post(key=None)
        if key not in {"idempotency-policy", "a//b"}:
            assert look(key).json["state"] == "completed"
        if plain.isascii():
            header = {"Idempotency-Key": f'"{plain}"'}
            assert look(None, headers=header).json["state"] == "completed"


def test_a_key_that_cannot_be_is_refused(look, add_view, world, assert_problem):
    add_view(world)
    assert_problem(look("x" * 256), 400, "key-malformed")
    assert_problem(look(None), 400, "key-required")
    assert_problem(look(None, headers={"Idempotency-Key": '"canary'}), 400, "key-malformed")


@pytest.mark.parametrize("kind", ["memory", "sql", "redis"])
def test_every_store_can_be_asked(kind, tmp_path, redis_server):
    app, db = Flask("shop"), SQLAlchemy()
    app.config.update(
        SQLALCHEMY_DATABASE_URI=f"sqlite:///{tmp_path}/shop.db",
        IDEMPOTENCY_STORE=kind,
        IDEMPOTENCY_REDIS_URL=redis_server.url if kind == "redis" else None,
        IDEMPOTENCY_REDIS_PREFIX=secrets.token_hex(8),
    )
    db.init_app(app)
    Idempotency(app, db, scope=None)
    app.register_blueprint(outcomes_blueprint())
    states = []

    @idempotent(atomic=False)
    def pay():
        states.append(current_app.test_client().get("/idempotency/key-1").json["state"])
        return {}, 201, {"Location": "/payments/1"}

    app.add_url_rule("/payments", "pay", pay, methods=["POST"])
    with app.app_context():
        db.create_all()
    client = app.test_client()
    assert client.get("/idempotency/key-1").status_code == 404
    client.post("/payments", headers={"Idempotency-Key": "key-1"})
    assert states == ["in_progress"]
    assert client.get("/idempotency/key-1").json["answer"]["location"] == "/payments/1"
    with app.app_context():
        db.engine.dispose()


def test_decorators_guard_every_page(make_world, add_view, assert_problem):
    """The last one stands outermost, as those of a ``MethodView``."""
    world, passed = make_world(), []

    def asking(name):
        def decorator(view):
            @functools.wraps(view)
            def wrapper(**values):
                passed.append(name)
                if request.headers.get("X-Token") != name:
                    abort(401, name)
                return view(**values)

            return wrapper

        return decorator

    guards = [asking("inner"), asking("outer")]
    world.app.register_blueprint(outcomes_blueprint(decorators=guards))
    add_view(world)
    world.post()
    pages = "/key-1?operation=pay", "?operation=pay", "/never-sent?operation=pay", "/idempotency-policy"
    for page in pages:
        passed.clear()
        stranger = world.client.get(f"/idempotency{page}", headers={"X-User": "alice"})
        assert (stranger.status_code, passed) == (401, ["outer"])
        half = world.client.get(f"/idempotency{page}", headers={"X-Token": "outer"})
        assert (half.status_code, passed) == (401, ["outer", "outer", "inner"])


def test_a_stranger_does_not_learn_what_there_is(world, look, add_view, assert_problem):
    add_view(world)
    add_view(world, "/refunds", endpoint="refund")
    world.post()
    for key, operation in itertools.product(["key-1", "never-sent"], ["pay", "canary", None]):
        assert_problem(look(key, user="", operation=operation), 401, "scope-unknown")


def test_a_handler_of_all_errors_around_the_pages_does_not_answer_for_them(make_world, assert_problem):
    world, outer = make_world(), Blueprint("outer", __name__)
    outer.register_error_handler(Exception, lambda error: ("caught", 418))
    outer.register_blueprint(outcomes_blueprint())
    world.app.register_blueprint(outer)
    world.app.add_url_rule("/payments", "pay", idempotent(dict), methods=["POST"])
    refused = world.client.get("/idempotency/canary", headers={"X-User": "alice"})
    assert_problem(refused, 404, "outcome-unknown")


@pytest.mark.parametrize("wrong", [flask_login.login_required, ["login_required"], "login_required"])
def test_decorators_that_are_none_are_refused(wrong):
    with pytest.raises(ConfigurationError, match=r"decorators=.*a list of decorators"):
        outcomes_blueprint(decorators=wrong)
