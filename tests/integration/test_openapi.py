"""A document of OpenAPI, as of flask-smorest and APIFlask, says what protected operations do."""

from __future__ import annotations

import copy

import marshmallow as ma
import pytest
from apiflask import APIFlask
from flask import Flask
from flask.views import MethodView
from flask_smorest import Api, Blueprint
from flask_sqlalchemy import SQLAlchemy
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from flask_idempotency import ConfigurationError, Idempotency, KeyMalformed, idempotent
from flask_idempotency.core.keys import parse_key
from flask_idempotency.integrations.openapi import add_idempotency
from tests.stores import on_sqlite

KEY = "Idempotency-Key"
REPLAYED = "Idempotent-Replayed"


class PaymentSchema(ma.Schema):
    amount = ma.fields.Integer(required=True)


class ResultSchema(ma.Schema):
    id = ma.fields.Integer()
    amount = ma.fields.Integer()


@pytest.fixture
def set_up():
    """Sets the extension up on an application."""
    made = []

    def set_up(app, **config):
        app.config.update(on_sqlite(app), **config)
        db = SQLAlchemy(app)
        made.append((app, db))
        idempotency = Idempotency(app, db, scope=None)
        with app.app_context():
            db.create_all()
        return idempotency

    yield set_up
    for app, db in made:
        with app.app_context():
            db.engine.dispose()


@pytest.fixture
def app(set_up):
    app = Flask("shop")
    set_up(app)
    app.add_url_rule("/payments", "pay", idempotent(dict), methods=["POST", "GET"])
    app.add_url_rule(
        "/payments/<int:payment_id>/lines/<any('a:b', c):kind>",
        "change",
        idempotent(required=False)(dict),
        methods=["PATCH"],
    )
    app.add_url_rule("/orders", "order", idempotent(key=dict)(dict), methods=["POST"])
    app.add_url_rule("/open", "open", dict, methods=["POST"])
    return app


def a_document(version="3.0.3", **paths):
    return {"openapi": version, "info": {"title": "Shop", "version": "1"}, "paths": paths}


def ok(code="200"):
    return {"responses": {code: {"description": "Done"}}}


def headers_of(operation):
    """The header parameters by name, with whether each is required."""
    return {
        each["name"]: each["required"] for each in operation["parameters"] if each["in"] == "header"
    }


def assert_complete(operation, kept="200", *, required=True):
    """An operation that is protected says so."""
    assert headers_of(operation) == {KEY: required}
    responses = operation["responses"]
    for code in "400", "409", "422", "503":
        problem = responses[code]["content"]["application/problem+json"]
        assert problem["schema"] == {"$ref": "#/components/schemas/IdempotencyProblem"}
        assert ("Retry-After" in responses[code].get("headers", {})) is (code in {"409", "503"})
    assert REPLAYED in responses[kept]["headers"]
    assert not {"401", "403"} & responses.keys(), "who may call is the application's to say"


@pytest.mark.parametrize("version", ["3.0.3", "3.1.0"])
def test_a_document_is_completed_and_valid(app, version):
    lines = {
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in ("id", "kind")
        ],
        "patch": ok("204"),
    }
    document = a_document(
        version,
        **{
            "/payments": {"post": ok("201"), "get": ok()},
            "/payments/{id}/lines/{kind}": lines,
            "/orders": {"post": ok()},
            "/open": {"post": ok()},
            "/elsewhere": {"post": ok()},
        },
    )
    before = copy.deepcopy(document)
    assert add_idempotency(document, app) is document
    validate(document)
    paths = document["paths"]
    assert_complete(paths["/payments"]["post"], "201")
    assert_complete(paths["/payments/{id}/lines/{kind}"]["patch"], "204", required=False)
    assert "parameters" not in paths["/orders"]["post"]  # its key is in the body
    assert {"400", "409", "422", "503"} < paths["/orders"]["post"]["responses"].keys()
    assert paths["/payments"]["get"] == before["paths"]["/payments"]["get"]
    for path in "/open", "/elsewhere":
        assert paths[path] == before["paths"][path]
    problems = paths["/payments"]["post"]["responses"]
    assert "urn:flask-idempotency:problem:key-required" in problems["400"]["description"]
    assert "urn:flask-idempotency:problem:key-reused" in problems["422"]["description"]
    once = copy.deepcopy(document)
    assert add_idempotency(document, app) == once, "the second time, there is nothing to add"


def key_schema(app):
    document = add_idempotency(a_document(**{"/payments": {"post": ok()}}), app)
    [parameter] = document["paths"]["/payments"]["post"]["parameters"]
    return parameter["schema"]


def test_the_schema_of_the_header_accepts_the_keys_that_are_accepted(app):
    schema = key_schema(app)
    assert (schema["minLength"], schema["maxLength"]) == (1, 512)
    validator = Draft202012Validator(schema)
    around = [0, 1, 2, 254, 255, 256]
    values = ["x" * n for n in around]
    values += ['"' + part * n + '"' for n in around for part in ("x", " ", r"\"", r"\\")]
    values += [beginning + chr(n) + "x" * 254 for n in range(0x100) for beginning in ("", "x")]
    values += [chr(n) for n in range(0x100)] + [f'"{chr(n)}"' for n in range(0x100)]
    values += ['"x' + end for end in ("", '";p=1', '"x', '","y"', "\\")]
    for value in values:
        if value == value.strip(" \n"):  # neither reaches an application
            assert validator.is_valid(value) is is_key(value), value


def is_key(value):
    try:
        return bool(parse_key(value))
    except KeyMalformed:
        return False


def test_what_the_document_says_itself_stays(app):
    shared = {
        "responses": {"Bad": {"description": "Ours", "content": {"application/json": {}}}},
        "parameters": {"Key": {"name": KEY, "in": "header", "schema": {"maxLength": 9}}},
    }
    mine = {"description": "Try again", "headers": {"Retry-After": {"schema": {"maximum": 9}}}}
    elsewhere = {"$ref": "https://example.com/responses#/Elsewhere"}
    responses = {
        "201": {"description": "Done", "headers": {REPLAYED: {"description": "mine"}}},
        "400": {"$ref": "#/components/responses/Bad"},
        "422": elsewhere,
        "503": mine,
        "500": {"description": "Broken"},
        "default": {"description": "Else"},
    }
    operation = {"parameters": [{"$ref": "#/components/parameters/Key"}], "responses": responses}
    document = a_document(**{"/payments": {"post": operation}})
    document["components"] = copy.deepcopy(shared)
    add_idempotency(document, app)
    assert operation["parameters"] == [{"$ref": "#/components/parameters/Key"}]
    assert responses["201"]["headers"] == {REPLAYED: {"description": "mine"}}
    assert responses["400"]["description"] == "Ours"
    assert responses["400"]["content"].keys() == {"application/json", "application/problem+json"}
    assert responses["422"] is elsewhere
    assert responses["503"]["headers"] == {"Retry-After": {"schema": {"maximum": 9}}}
    assert responses["503"]["description"] == "Try again"
    assert "headers" not in responses["500"]
    assert "headers" not in responses["default"]
    assert {name: document["components"][name] for name in shared} == shared


def test_paths_may_lack_what_the_servers_have(app):
    document = a_document(**{"/": {"post": ok()}, "/payments": {"post": ok()}})
    add_idempotency(document, app, prefix="/payments")
    assert "parameters" not in document["paths"]["/payments"]["post"]
    document = a_document(**{"/lines/{kind}": {"patch": ok()}})
    add_idempotency(document, app, prefix="/payments/{id}")
    assert headers_of(document["paths"]["/lines/{kind}"]["patch"]) == {KEY: False}


def test_a_setting_names_the_header(set_up):
    app = Flask("shop")
    set_up(app, IDEMPOTENCY_HEADER="X-Once")
    app.add_url_rule("/payments", "pay", idempotent(dict), methods=["POST"])
    operation = add_idempotency(a_document(**{"/payments": {"post": ok()}}), app)["paths"]["/payments"]
    assert headers_of(operation["post"]) == {"X-Once": True}


def test_what_is_only_observed_is_not_described_and_a_natural_key_takes_no_header(set_up):
    app = Flask("shop")
    set_up(app)
    for endpoint, options in ("seen", {"enforce": False}), ("own", {"key": dict}):
        view = idempotent(**options)(dict)
        app.add_url_rule(f"/{endpoint}", endpoint, view, methods=["POST"])
    paths = {"/seen": {"post": ok()}, "/own": {"post": ok()}}
    document = add_idempotency(a_document(**copy.deepcopy(paths)), app)
    assert document["paths"]["/seen"] == paths["/seen"]
    assert "parameters" not in document["paths"]["/own"]["post"]


def test_openapi_2_is_refused(app):
    with pytest.raises(ConfigurationError, match="OpenAPI 3"):
        add_idempotency({"swagger": "2.0", "paths": {}}, app)


def test_flask_smorest(set_up):
    app = Flask("shop")
    app.config.update(API_TITLE="Shop", API_VERSION="1", OPENAPI_VERSION="3.0.3")
    set_up(app)
    api = Api(app)
    blueprint = Blueprint("payments", __name__, url_prefix="/payments")
    runs = []

    @blueprint.route("/<int:shop_id>")
    class Payments(MethodView):
        @blueprint.response(200, ResultSchema)
        def get(self, shop_id):
            return {"id": shop_id}

        @idempotent
        @blueprint.arguments(PaymentSchema)
        @blueprint.response(201, ResultSchema)
        def post(self, payment, shop_id):
            runs.append(payment)
            return {"id": len(runs), **payment, "secret": 1}

    api.register_blueprint(blueprint)
    document = add_idempotency(api.spec.to_dict(), app)
    validate(document)
    path = document["paths"]["/payments/{shop_id}"]
    assert_complete(path["post"], "201")
    assert "application/json" in path["post"]["responses"]["422"]["content"], "flask-smorest's own"
    assert "parameters" not in path["get"]

    client = app.test_client()
    for replayed in None, "true":
        answer = client.post("/payments/1", json={"amount": 5}, headers={KEY: "key-1"})
        assert (answer.status_code, answer.json) == (201, {"id": 1, "amount": 5})
        assert answer.headers.get(REPLAYED) == replayed
    assert client.post("/payments/1", json={"amount": 5}).status_code == 400


def test_apiflask(set_up):
    app = APIFlask("shop", title="Shop", version="1")
    idempotency = set_up(app)
    idempotency.protect(app)
    app.spec_processor(lambda document: add_idempotency(document, app))
    runs = []

    @app.post("/payments/<int:shop_id>")
    @idempotent
    @app.input(PaymentSchema)
    @app.output(ResultSchema, status_code=201)
    def pay(shop_id, json_data):
        runs.append(json_data)
        return {"id": len(runs), **json_data, "secret": 1}

    @app.patch("/payments/<int:shop_id>")
    @app.input(PaymentSchema)
    @app.output(ResultSchema)
    def change(shop_id, json_data):
        return json_data

    @app.get("/payments/<int:shop_id>")
    @app.output(ResultSchema)
    def show(shop_id):
        return {"id": shop_id}

    client = app.test_client()
    document = client.get("/openapi.json").json
    validate(document)
    path = document["paths"]["/payments/{shop_id}"]
    assert_complete(path["post"], "201")
    assert_complete(path["patch"])
    assert "application/json" in path["post"]["responses"]["422"]["content"], "APIFlask's own"
    assert KEY not in str(path["get"])
    for replayed in None, "true":
        answer = client.post("/payments/1", json={"amount": 5}, headers={KEY: "key-1"})
        assert (answer.status_code, answer.json) == (201, {"id": 1, "amount": 5})
        assert answer.headers.get(REPLAYED) == replayed


def test_what_a_route_that_is_not_atomic_may_respond_with_is_there_too(app):
    for path, atomic in ("/trips", False), ("/flights", True):
        view = idempotent(atomic=atomic)(dict)
        app.add_url_rule(path, path[1:], view, methods=["POST"])
    paths = add_idempotency(a_document(**{p: {"post": ok()} for p in ("/trips", "/flights")}), app)[
        "paths"
    ]
    trip, flight = (paths[path]["post"]["responses"] for path in ("/trips", "/flights"))
    assert "problem:operation-failed" in trip["500"]["description"]
    assert "problem:try-again" in trip["503"]["description"]
    assert "500" not in flight
    assert "problem:try-again" not in flight["503"]["description"]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (False, []),
        (True, ["more than 90 seconds ago", "409 `key-expired`"]),
        ("require", ["more than 90 seconds ago", "UUID of version 7"]),
    ],
)
def test_the_header_says_whether_old_keys_are_refused(app, option, said):
    app.add_url_rule(
        "/trips", "trip", idempotent(ttl=90, refuse_old_keys=option)(dict), methods=["POST"]
    )
    operation = add_idempotency(a_document(**{"/trips": {"post": ok()}}), app)["paths"]["/trips"][
        "post"
    ]
    (header,) = operation["parameters"]
    assert all(words in header["description"] for words in said)
    assert ("made" in header["description"]) is bool(option)
    assert "problem:key-expired" in operation["responses"]["409"]["description"]
