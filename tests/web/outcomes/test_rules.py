"""The page of rules: what a client can know before it sends anything."""

import pytest

from flask_idempotency import idempotent
from flask_idempotency.outcomes import outcomes_blueprint


class TestPolicy:
    def test_it_has_the_rules_of_the_application(self, client):
        answer = client.get("/idempotency/idempotency-policy")
        assert answer.status_code == 200
        rules = answer.json
        assert rules["header"]["name"] == "Idempotency-Key"
        assert (rules["header"]["min_length"], rules["header"]["max_length"]) == (1, 255)
        assert "1 to 255 characters" in rules["header"]["syntax"]
        assert rules["form_field"] == "idempotency_key"
        assert rules["replayed_header"] == {"name": "Idempotent-Replayed", "value": "true"}
        assert (rules["required"], rules["retention_seconds"]) == (True, 86400)
        assert rules["scope"] == "per account"
        statuses = {
            problem["type"].rpartition(":")[2]: problem["status"] for problem in rules["problems"]
        }
        assert statuses["key-required"] == 400
        assert statuses["request-in-progress"] == statuses["key-expired"] == 409
        assert statuses["key-reused"] == 422
        assert statuses["store-unavailable"] == 503
        assert rules["operations"] == []

    def test_what_is_only_observed_has_no_rules(self, client, world, add_view):
        add_view(world, "/payments", enforce=False)
        add_view(world, "/orders", endpoint="order", key="request", ttl=30)
        (rules,) = client.get("/idempotency/idempotency-policy").json["operations"]
        assert (rules["operation"], rules["key"]) == ("order", "request")

    def test_it_has_every_protected_route_and_no_other(self, app, client, world, add_view):
        add_view(world, "/payments/<int:number>", methods=("GET", "POST", "PUT"))
        add_view(
            world,
            "/orders",
            endpoint="order",
            name="orders",
            key="json:/id",
            fingerprint=["/id", "header:prefer"],
            exclude=["query:at", "form:token"],
            ttl=1.5,
            refuse_old_keys="require",
            required=False,
            scope=None,
        )
        world.idempotency.protect(app)
        app.add_url_rule("/covered", "covered", dict, methods=["PATCH", "DELETE"])
        view = world.idempotency.exempt(lambda: {})  # noqa: PIE807
        app.add_url_rule("/exempt", "exempt", view, methods=["POST"])
        operations = client.get("/idempotency/idempotency-policy").json["operations"]
        usual = {
            "required": True,
            "key": "header",
            "fingerprint": "request",
            "compared_without": [],
            "retention_seconds": 86400,
            "refuse_old_keys": False,
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
                "fingerprint": ["/id", "header:Prefer"],
                "compared_without": ["query:at", "form:token"],
                "retention_seconds": 1.5,
                "refuse_old_keys": "require",
                "scope": "one tenant",
            },
            {"operation": "covered", "method": "PATCH", "path": "/covered", **usual},
        ]

    def test_it_lists_what_it_enforces_also_after_the_first_request(self, app, client, world):
        """``protect`` wraps a view when it is first asked for."""
        world.idempotency.protect(app)
        app.add_url_rule("/covered", "covered", dict, methods=["POST"])
        before = client.get("/idempotency/idempotency-policy").json
        world.post("/covered")
        assert client.get("/idempotency/idempotency-policy").json == before

    @pytest.mark.parametrize(
        "config",
        [
            {
                "IDEMPOTENCY_HEADER": "X-Once",
                "IDEMPOTENCY_TTL": 60,
                "IDEMPOTENCY_REQUIRED": False,
                "IDEMPOTENCY_MIN_KEY_LENGTH": 16,
                "IDEMPOTENCY_MAX_KEY_LENGTH": 64,
            }
        ],
        ids=["settings"],
    )
    def test_it_follows_the_settings(self, client):
        rules = client.get("/idempotency/idempotency-policy").json
        assert (rules["header"]["name"], rules["retention_seconds"]) == ("X-Once", 60)
        assert rules["required"] is False
        assert (rules["header"]["min_length"], rules["header"]["max_length"]) == (16, 64)
        assert "16 to 64 characters" in rules["header"]["syntax"]

    def test_it_may_be_left_out(self, make_world, assert_problem):
        world = make_world()
        world.app.register_blueprint(outcomes_blueprint("lookup", publish_policy=False))
        view = idempotent(dict)
        world.app.add_url_rule("/payments", "pay", view, methods=["POST"])
        answer = world.client.get("/lookup/idempotency-policy", headers={"X-User": "alice"})
        assert_problem(answer, 404, "outcome-unknown")
