"""A document of OpenAPI, as of flask-smorest and APIFlask, says what protected operations do."""

import copy

import marshmallow as ma
import pytest
from apiflask import APIFlask
from flask import Flask
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


PaymentSchema = ma.Schema.from_dict({"amount": ma.fields.Integer(required=True)}, name="Payment")
ResultSchema = ma.Schema.from_dict(dict.fromkeys(("id", "amount"), ma.fields.Integer()), name="Result")


def set_up(app, **config):
    app.config.update(on_sqlite(app), **config)
    db = SQLAlchemy(app)
    idempotency = Idempotency(app, db, scope=None)
    with app.app_context():
        db.create_all()
    return idempotency


def protect(app, path, endpoint, methods=("POST",), **options):
    app.add_url_rule(path, endpoint, idempotent(**options)(dict), methods=methods)


@pytest.fixture
def app():
    app = Flask("shop")
    set_up(app)
    protect(app, "/payments", "pay", ("POST", "GET"))
    path = "/payments/<int:payment_id>/lines/<any('a:b', c):kind>"
    protect(app, path, "change", ("PATCH",), required=False)
    protect(app, "/orders", "order", key=dict)
    protect(app, "/seen", "seen", enforce=False)
    app.add_url_rule("/open", "open", dict, methods=["POST"])
    return app


def a_document(*posts, version="3.0.3", **paths):
    paths = {**{path: {"post": ok()} for path in posts}, **paths}
    return {"openapi": version, "info": {"title": "Shop", "version": "1"}, "paths": paths}


def ok(code="200"):
    return {"responses": {code: {"description": "Done"}}}


def described(app, path, **options):
    """The POST of a path, which the document has with one response, completed."""
    return add_idempotency(a_document(path), app, **options)["paths"][path]["post"]


def headers_of(operation):
    """The header parameters by name, with whether each is required."""
    parameters = operation.get("parameters", [])
    return {each["name"]: each["required"] for each in parameters if each["in"] == "header"}


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
    named = {"in": "path", "required": True, "schema": {"type": "string"}}
    parameters = [{"name": name, **named} for name in ("id", "kind")]
    unprotected = ["/open", "/elsewhere", "/seen"]
    lines = "/payments/{id}/lines/{kind}"
    paths = {"/payments": {"post": ok("201"), "get": ok()}}
    paths[lines] = {"parameters": parameters, "patch": ok("204")}
    document = a_document("/orders", *unprotected, version=version, **paths)
    before = copy.deepcopy(document)["paths"]
    assert add_idempotency(document, app) is document
    validate(document)
    paths = document["paths"]
    assert_complete(paths["/payments"]["post"], "201")
    assert_complete(paths[lines]["patch"], "204", required=False)
    responses = paths["/payments"]["post"]["responses"]
    for code, problem in ("400", "key-required"), ("422", "key-reused"):
        assert f"problem:{problem}" in responses[code]["description"]
    assert "parameters" not in paths["/orders"]["post"]  # its key is the application's
    assert {"400", "409", "422", "503"} < paths["/orders"]["post"]["responses"].keys()
    for path, method in ("/payments", "get"), *((path, "post") for path in unprotected):
        assert paths[path][method] == before[path][method]
    once = copy.deepcopy(document)
    assert add_idempotency(document, app) == once, "the second time, there is nothing to add"


def is_key(value):
    try:
        return bool(parse_key(value))
    except KeyMalformed:
        return False


def test_the_schema_of_the_header_accepts_the_keys_that_are_accepted(app):
    [parameter] = described(app, "/payments")["parameters"]
    schema = parameter["schema"]
    assert (schema["minLength"], schema["maxLength"]) == (1, 512)
    validator = Draft202012Validator(schema)
    parts = [("", "x", ""), *(('"', part, '"') for part in ("x", " ", r"\"", r"\\"))]
    values = [a + part * n + b for n in (0, 1, 2, 254, 255, 256) for a, part, b in parts]
    values += [a + chr(n) + b for n in range(0x100) for a, b in (("", ""), ('"', '"'), ("", "x" * 254))]
    values += ['"x' + end for end in ("", '";p=1', '"x', '","y"', "\\")]
    for value in values:
        if value == value.strip(" \n"):  # neither reaches an application
            assert validator.is_valid(value) is is_key(value), value


def test_what_the_document_says_itself_stays(app):
    parameter = {"$ref": "#/components/parameters/Key"}
    shared = {
        "responses": {"Bad": {"description": "Ours", "content": {"application/json": {}}}},
        "parameters": {"Key": {"name": KEY, "in": "header", "schema": {"maxLength": 9}}},
    }
    responses = {
        "201": {"description": "Done", "headers": {REPLAYED: {"description": "mine"}}},
        "400": {"$ref": "#/components/responses/Bad"},
        "422": {"$ref": "https://example.com/#/Else"},
        "503": {"description": "Again", "headers": {"Retry-After": {"schema": {"maximum": 9}}}},
        **{code: {"description": "Else"} for code in ("500", "default")},
    }
    operation = {"parameters": [parameter], "responses": copy.deepcopy(responses)}
    document = {**a_document(**{"/payments": {"post": operation}}), "components": copy.deepcopy(shared)}
    add_idempotency(document, app)
    assert operation["parameters"] == [parameter]
    found = operation["responses"]
    for code in "201", "422", "500", "default":
        assert found[code] == responses[code]
    assert found["503"].items() >= responses["503"].items()
    assert found["400"]["description"] == "Ours"
    assert found["400"]["content"].keys() == {"application/json", "application/problem+json"}
    assert {name: document["components"][name] for name in shared} == shared


def test_paths_may_lack_what_the_servers_have_a_setting_names_the_header_and_openapi_2_is_refused(app):
    assert headers_of(described(app, "/payments", prefix="/payments")) == {}
    document = a_document(**{"/lines/{kind}": {"patch": ok()}})
    add_idempotency(document, app, prefix="/payments/{id}")
    assert headers_of(document["paths"]["/lines/{kind}"]["patch"]) == {KEY: False}
    app = Flask("shop")
    set_up(app, IDEMPOTENCY_HEADER="X-Once")
    protect(app, "/payments", "pay")
    assert headers_of(described(app, "/payments")) == {"X-Once": True}
    with pytest.raises(ConfigurationError, match="OpenAPI 3"):
        add_idempotency({"swagger": "2.0", "paths": {}}, app)


def smorest():
    app = Flask("shop")
    app.config.update(API_TITLE="Shop", API_VERSION="1", OPENAPI_VERSION="3.0.3")
    set_up(app)
    api, blueprint = Api(app), Blueprint("payments", __name__)

    @blueprint.route("/payments/<int:shop_id>", methods=["POST"])
    @idempotent
    @blueprint.arguments(PaymentSchema)
    @blueprint.response(201, ResultSchema)
    def pay(payment, shop_id):
        return {"id": shop_id, **payment, "secret": 1}

    api.register_blueprint(blueprint)
    return app, lambda: add_idempotency(api.spec.to_dict(), app)


def apiflask():
    app = APIFlask("shop", title="Shop", version="1")
    set_up(app)
    app.spec_processor(lambda document: add_idempotency(document, app))

    @app.post("/payments/<int:shop_id>")
    @idempotent
    @app.input(PaymentSchema)
    @app.output(ResultSchema, status_code=201)
    def pay(shop_id, json_data):
        return {"id": shop_id, **json_data, "secret": 1}

    return app, lambda: app.test_client().get("/openapi.json").json


@pytest.mark.parametrize("make", [smorest, apiflask])
def test_a_framework_makes_its_own_document_which_is_completed(make):
    app, document = make()
    validate(document())
    path = document()["paths"]["/payments/{shop_id}"]
    assert_complete(path["post"], "201")
    assert "application/json" in path["post"]["responses"]["422"]["content"], "the framework's own"
    client = app.test_client()
    for replayed in None, "true":
        answer = client.post("/payments/1", json={"amount": 5}, headers={KEY: "key-1"})
        assert (answer.status_code, answer.json) == (201, {"id": 1, "amount": 5})
        assert answer.headers.get(REPLAYED) == replayed
    assert client.post("/payments/1", json={"amount": 5}).status_code == 400


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize(
    ("refuse", "said"), [(True, "It may be"), ("require", "It must be"), (None, "")]
)
def test_the_options_of_a_route_are_there_too(app, refuse, said, atomic):
    old = {} if refuse is None else {"refuse_old_keys": refuse}
    protect(app, "/trips", "trip", ttl=90, atomic=atomic, **old)
    operation = described(app, "/trips")
    (header,), responses = operation["parameters"], operation["responses"]
    old_keys = f"{said} a UUID of version 7: one made more than 90 seconds ago"
    assert (old_keys in header["description"]) == ("made" in header["description"]) == bool(said)
    assert ("problem:try-again" in responses["503"]["description"]) is not atomic
    assert ("500" in responses) is not atomic
    assert atomic or "problem:operation-failed" in responses["500"]["description"]
