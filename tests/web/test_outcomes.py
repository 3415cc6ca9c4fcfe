"""The look-up of outcomes, and the page of rules."""

from __future__ import annotations

import secrets

import pytest
from flask import Flask, Response, current_app
from flask_sqlalchemy import SQLAlchemy

import servers
from flask_idempotency import Idempotency, Retryable, idempotent
from flask_idempotency.outcomes import outcomes_blueprint


@pytest.fixture
def store():
    return "postgres"


@pytest.fixture
def config():
    return {}


@pytest.fixture
def world(make_world, config):
    world = make_world(PROPAGATE_EXCEPTIONS=False, **config)
    world.app.register_blueprint(outcomes_blueprint())
    return world


@pytest.fixture
def look(world):
    def look(key="key-1", user="alice", operation="pay", headers=()):
        query = {} if operation is None else {"operation": operation}
        path = "/idempotency" if key is None else f"/idempotency/{key}"
        names = {"X-User": user, **dict(headers)}
        return world.client.get(path, query_string=query, headers=names)

    return look


class Killed(BaseException):
    pass


def test_a_finished_operation_says_where_its_result_is(world, look):
    links = [("Location", "/payments/7"), ("Link", "</a>; rel=a"), ("Link", "</b>; rel=b")]
    view = idempotent(lambda: Response("canary", 201, [*links, ("X-Other", "1")]))
    world.app.add_url_rule("/payments", "pay", view, methods=["POST"])
    world.post()
    answer = look()
    assert (answer.status_code, answer.headers["Cache-Control"]) == (200, "no-store")
    assert answer.json == {
        "operation": "pay",
        "state": "completed",
        "attempt": 1,
        "detail": "The operation has finished. The same request gets its answer.",
        "answer": {"status": 201, "location": "/payments/7", "link": "</a>; rel=a, </b>; rel=b"},
    }
    assert "canary" not in answer.text


@pytest.mark.parametrize(
    "config", [{"IDEMPOTENCY_ENCRYPTION_KEYS": [secrets.token_urlsafe(32)]}], ids=["keys"]
)
def test_a_sealed_answer_is_opened(world, look):
    view = idempotent(lambda: ({}, 201, {"Location": "/payments/7"}))
    world.app.add_url_rule("/payments", "pay", view, methods=["POST"])
    world.post()
    assert look().json["answer"] == {"status": 201, "location": "/payments/7"}


def test_nothing_is_known_of_a_key_that_was_not_sent(world, look, add_view, assert_problem):
    add_view(world)
    assert_problem(look(), 404, "outcome-unknown")


def test_another_user_gets_no_hint(world, look, add_view, assert_problem):
    add_view(world)
    world.post()
    assert look().status_code == 200
    for other in look(user="bob"), look("another"):
        assert assert_problem(other, 404, "outcome-unknown") == assert_problem(
            look("never-sent"), 404, "outcome-unknown"
        )


def test_a_stranger_is_told_so_and_no_more(world, look, add_view, assert_problem):
    add_view(world)
    world.post()
    assert_problem(look(user=""), 401, "scope-unknown")


def test_an_expired_record_is_not_known(world, look, add_view, assert_problem):
    add_view(world)
    world.post()
    world.sql("update idempotency_record set expires_at = clock_timestamp()")
    assert_problem(look(), 404, "outcome-unknown")


def test_a_running_operation_is_in_progress(world, look, add_view, gate, background):
    add_view(world, during=gate)
    first = background(world.post)
    gate.wait_until_reached()
    answer = look()
    assert (answer.json["state"], answer.json["attempt"]) == ("in_progress", 1)
    assert "answer" not in answer.json
    assert answer.headers["Retry-After"] == "1"
    gate.open()
    first.result()
    assert look().json["state"] == "completed"


def test_an_operation_that_was_rolled_back_may_be_sent_again(world, look, add_view):
    def fail():
        raise RuntimeError

    add_view(world, during=fail)
    assert world.post().status_code == 500
    assert look().json["state"] == "in_progress"
    assert "Send the same request again" in look().json["detail"]


@pytest.mark.parametrize(
    ("policy", "advice"), [("hold", "operator must decide"), ("retry", "Send the same request again")]
)
def test_an_interrupted_operation_is_told_with_its_way_out(world, look, add_view, policy, advice):
    def die():
        raise Killed

    add_view(world, during=die, atomic=False, on_interrupted=policy)
    with pytest.raises(Killed):
        world.post()
    answer = look()
    assert answer.json["state"] == "interrupted"
    assert advice in answer.json["detail"]
    assert "Retry-After" not in answer.headers


def test_a_failed_operation_is_told(world, look, add_view):
    def fail():
        raise RuntimeError

    add_view(world, during=fail, atomic=False)
    assert world.post().status_code == 500
    assert (look().json["state"], look().json["answer"]) == ("failed", {"status": 500})


def test_a_leased_operation_is_in_progress_while_its_lease_runs(
    world, look, add_view, gate, background
):
    add_view(world, during=gate, atomic=False)
    first = background(world.post)
    gate.wait_until_reached()
    assert look().json["state"] == "in_progress"
    gate.open()
    first.result()


def test_an_operation_that_is_free_again_is_not_finished(world, look, add_view):
    def fail():
        raise Retryable

    add_view(world, during=fail, atomic=False)
    world.post()
    assert look().json["state"] != "completed"


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


def test_scope_name_and_namespace_of_the_route_count(world, look, add_view, assert_problem):
    add_view(world, scope=None, name="payment", namespace="v2")
    world.post()
    assert look(user="bob", operation="payment").json["state"] == "completed"
    assert_problem(look(operation="pay"), 404, "outcome-unknown")
    world.app.config["IDEMPOTENCY_NAMESPACE"] = "v3"  # read once: changes nothing
    assert look(operation="payment").status_code == 200


def test_a_protected_blueprint_is_looked_up_by_its_endpoint(world, look):
    world.idempotency.protect(world.app)
    world.app.add_url_rule("/payments", "pay", dict, methods=["POST", "GET"])
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


@pytest.mark.parametrize("key", ["a/b/c", "a%20b", "a;b,c", "idempotency-policy", "\u00fc", "a//b"])
def test_any_key_can_be_looked_up(world, add_view, look, key):
    """In the path where a URL can hold it, otherwise in the header."""
    plain = key.replace("%20", " ")
    add_view(world, key=lambda: plain)
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


def test_without_the_database_it_says_when_to_ask_again(world, assert_problem):
    nowhere = f"postgresql+psycopg2://shop@127.0.0.1:{servers.free_port()}/shop"
    app, db = Flask("nowhere"), SQLAlchemy()
    app.config["SQLALCHEMY_DATABASE_URI"] = nowhere
    db.init_app(app)
    Idempotency(app, db, scope=None)
    app.add_url_rule("/payments", "pay", idempotent(dict), methods=["POST"])
    app.register_blueprint(outcomes_blueprint(), url_prefix="/api/outcomes")
    answer = app.test_client().get("/api/outcomes/key-1")
    assert_problem(answer, 503, "store-unavailable", retry=True)


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


class TestPolicy:
    def test_it_has_the_rules_of_the_application(self, world):
        answer = world.client.get("/idempotency/idempotency-policy")
        assert answer.status_code == 200
        rules = answer.json
        assert rules["header"]["name"] == "Idempotency-Key"
        assert rules["header"]["max_length"] == 255
        assert "1 to 255 characters" in rules["header"]["syntax"]
        assert rules["form_field"] == "idempotency_key"
        assert rules["replayed_header"] == {"name": "Idempotent-Replayed", "value": "true"}
        assert (rules["required"], rules["retention_seconds"]) == (True, 86400)
        assert rules["scope"] == "per account"
        statuses = {
            problem["type"].rpartition(":")[2]: problem["status"] for problem in rules["problems"]
        }
        assert statuses["key-required"] == 400
        assert statuses["request-in-progress"] == 409
        assert statuses["key-reused"] == 422
        assert statuses["store-unavailable"] == 503
        assert rules["operations"] == []

    def test_it_has_every_protected_route_and_no_other(self, world, add_view):
        add_view(world, "/payments/<int:number>", methods=("GET", "POST", "PUT"))
        add_view(
            world,
            "/orders",
            endpoint="order",
            name="orders",
            key="json:/id",
            fingerprint=["/id"],
            ttl=1.5,
            required=False,
            scope=None,
        )
        world.idempotency.protect(world.app)
        world.app.add_url_rule("/covered", "covered", dict, methods=["PATCH", "DELETE"])
        view = world.idempotency.exempt(lambda: {})  # noqa: PIE807
        world.app.add_url_rule("/exempt", "exempt", view, methods=["POST"])
        operations = world.client.get("/idempotency/idempotency-policy").json["operations"]
        usual = {
            "required": True,
            "key": "header",
            "fingerprint": "request",
            "retention_seconds": 86400,
            "scope": "per account",
        }
        path = "/payments/<int:number>"
        assert operations == [
            {"operation": "pay", "method": "POST", "path": path, **usual},
            {"operation": "pay", "method": "PUT", "path": path, **usual},
            {
                "operation": "orders",
                "method": "POST",
                "path": "/orders",
                "required": False,
                "key": "json:/id",
                "fingerprint": ["/id"],
                "retention_seconds": 1.5,
                "scope": "one tenant",
            },
            {"operation": "covered", "method": "PATCH", "path": "/covered", **usual},
        ]

    def test_it_lists_what_it_enforces_also_after_the_first_request(self, world):
        """``protect`` wraps a view when it is first asked for."""
        world.idempotency.protect(world.app)
        world.app.add_url_rule("/covered", "covered", dict, methods=["POST"])
        before = world.client.get("/idempotency/idempotency-policy").json
        world.post("/covered")
        assert world.client.get("/idempotency/idempotency-policy").json == before

    @pytest.mark.parametrize(
        "config",
        [{"IDEMPOTENCY_HEADER": "X-Once", "IDEMPOTENCY_TTL": 60, "IDEMPOTENCY_REQUIRED": False}],
        ids=["settings"],
    )
    def test_it_follows_the_settings(self, world):
        rules = world.client.get("/idempotency/idempotency-policy").json
        assert (rules["header"]["name"], rules["retention_seconds"]) == ("X-Once", 60)
        assert rules["required"] is False

    def test_it_may_be_left_out(self, make_world, assert_problem):
        world = make_world()
        world.app.register_blueprint(outcomes_blueprint("lookup", publish_policy=False))
        view = idempotent(dict)
        world.app.add_url_rule("/payments", "pay", view, methods=["POST"])
        answer = world.client.get("/lookup/idempotency-policy", headers={"X-User": "alice"})
        assert_problem(answer, 404, "outcome-unknown")
