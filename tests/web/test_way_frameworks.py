"""The way of a request in frameworks, which make responses of errors in ways of their own."""

import asyncio
import logging

import apiflask
import connexion
import flask
import flask_restful
import flask_restx
import flask_smorest
import httpx
import pytest
from connexion.lifecycle import ConnexionResponse
from connexion.resolver import Resolver
from flask.views import MethodView

from flask_idempotency import idempotent
from tests.web.way import KINDS, STORES, make_shop, nobody_was_warned

__all__ = ["make_shop", "nobody_was_warned"]

pytestmark = STORES


class Refused(Exception):
    """An error of the application, which no framework knows."""


def in_flask(app, view, atomic):
    app.post("/payments", endpoint="pay")(idempotent(atomic=atomic)(view))


def in_restful(app, view, atomic, package=flask_restful):
    members = {"post": lambda _self: view(), "method_decorators": [idempotent(atomic=atomic)]}
    package.Api(app).add_resource(type("Payments", (package.Resource,), members), "/payments")


def in_restx(app, view, atomic):
    in_restful(app, view, atomic, flask_restx)


def in_smorest(app, view, atomic):
    app.config.update(API_TITLE="shop", API_VERSION="1", OPENAPI_VERSION="3.0.3")
    blueprint = flask_smorest.Blueprint("shop", __name__)

    @blueprint.route("/payments")
    class Payments(MethodView):
        @idempotent(atomic=atomic)
        @blueprint.response(201)
        def post(self):
            return view()

    flask_smorest.Api(app).register_blueprint(blueprint)


def in_apiflask(app, view, atomic):
    blueprint = apiflask.APIBlueprint("shop", __name__)
    blueprint.post("/payments")(idempotent(atomic=atomic)(blueprint.output({}, status_code=201)(view)))
    app.register_blueprint(blueprint)


FRAMEWORKS = pytest.mark.parametrize("register", [in_flask, in_restful, in_restx, in_smorest])


def ending(shop, end):
    """A view that commits a payment, and then does ``end``; and the list of its runs."""
    runs = []

    def pay():
        shop.db.session.add(shop.Payment(amount=5))
        shop.db.session.commit()
        runs.append(1)
        return end() or {"run": len(runs)}

    return pay, runs


def fail():
    raise Refused


def abort(status, package=flask):
    def end():
        package.abort(status)

    return end


ABORTS = {
    in_flask: flask,
    in_restful: flask_restful,
    in_restx: flask_restx,
    in_smorest: flask_smorest,
}


@FRAMEWORKS
@KINDS
def test_a_rejection_of_the_framework_is_stored_with_the_commit(
    make_shop, register, atomic, assert_replayed
):
    shop = make_shop()
    pay, runs = ending(shop, abort(409, ABORTS[register] if register is not in_smorest else flask))
    register(shop.app, pay, atomic)
    first = shop.post()
    assert first.status_code == 409
    assert_replayed(first, shop.post())
    assert (shop.count(), len(runs)) == (1, 1)


@FRAMEWORKS
def test_a_rejection_of_the_caller_rolls_back_which_is_said_once(make_shop, register, caplog):
    shop = make_shop()
    pay, runs = ending(shop, abort(403))
    register(shop.app, pay, True)
    assert [shop.post().status_code for _ in range(3)] == [403] * 3
    assert (shop.count(), len(runs)) == (0, 3)
    assert len([each for each in caplog.messages if "undone" in each]) == 1


@FRAMEWORKS
@KINDS
@pytest.mark.parametrize("propagate", [False, True])
def test_an_unknown_error_is_rolled_back_or_stored_as_failed(make_shop, register, atomic, propagate):
    shop = make_shop(PROPAGATE_EXCEPTIONS=propagate)
    pay, runs = ending(shop, fail)
    register(shop.app, pay, atomic)
    if propagate:
        with pytest.raises(Refused):
            shop.post()
    else:
        assert shop.post().status_code == 500
    assert shop.count() == (not atomic)
    if atomic and propagate:
        with pytest.raises(Refused):
            shop.post()
    else:
        assert shop.post().status_code == 500
    assert (shop.count(), len(runs)) == ((0, 2) if atomic else (1, 1))


@FRAMEWORKS
@KINDS
def test_the_applications_handler_is_asked_as_without_us(make_shop, register, atomic):
    """Flask-RESTful and Flask-RESTX do not ask it: to them it is an unknown error."""
    statuses = []
    for enabled in False, True:
        shop = make_shop(IDEMPOTENCY_ENABLED=enabled)
        shop.app.register_error_handler(Refused, lambda _error: ({"refused": True}, 409))
        pay, runs = ending(shop, fail)
        register(shop.app, pay, atomic)
        before = shop.count()
        first = shop.post()
        statuses.append(first.status_code)
    again = shop.post()
    assert statuses == [first.status_code] * 2
    rows = shop.count() - before
    if first.status_code == 409:
        assert (first.json, again.json) == ({"refused": True}, {"refused": True})
        assert again.headers["Idempotent-Replayed"] == "true"
        assert (rows, len(runs)) == (1, 1)
    else:
        assert (rows, len(runs)) == ((0, 2) if atomic else (1, 1))


def test_restx_asks_its_own_handler(make_shop, assert_replayed):
    shop = make_shop()
    pay, runs = ending(shop, fail)
    api = flask_restx.Api(shop.app)

    @api.errorhandler(Refused)
    def refuse(_error):
        return {"refused": True}, 409

    members = {"post": lambda _self: pay(), "method_decorators": [idempotent]}
    api.add_resource(type("Payments", (flask_restx.Resource,), members), "/payments")
    first = shop.post()
    assert (first.status_code, first.json["refused"]) == (409, True)
    assert_replayed(first, shop.post())
    assert (shop.count(), len(runs)) == (1, 1)


@pytest.fixture
def make_api(make_shop):
    """An application of APIFlask on the database of a world."""
    made = []

    def make(**config):
        shop = make_shop()
        app = apiflask.APIFlask("api")
        names = ("SQLALCHEMY_DATABASE_URI", "IDEMPOTENCY_STORE")
        app.config.update({name: shop.app.config[name] for name in names}, **config)
        shop.db.init_app(app)
        shop.idempotency.init_app(app, shop.db, scope=None)
        made.append((shop, app))
        shop.api = app
        return shop

    yield make
    for shop, app in made:
        with app.app_context():
            shop.db.engine.dispose()


@KINDS
def test_apiflask(make_api, atomic):
    shop = make_api()

    def post(key):
        return shop.api.test_client().post("/payments", headers={"Idempotency-Key": key}, json={})

    ends = [lambda: apiflask.abort(409, "no"), fail, lambda: None]

    def end():
        return ends[0]()

    pay, runs = ending(shop, end)
    in_apiflask(shop.api, pay, atomic)
    refused, again = post("one"), post("one")
    assert (refused.status_code, refused.json) == (again.status_code, again.json)
    assert (refused.status_code, refused.json["message"]) == (409, "no")
    assert again.headers["Idempotent-Replayed"] == "true"
    assert (shop.count(), len(runs)) == (1, 1)
    ends.pop(0)
    assert [post("two").status_code for _ in range(2)] == [500, 500]
    assert (shop.count(), len(runs)) == ((1, 3) if atomic else (2, 2))
    ends.pop(0)
    done = [post("three") for _ in range(2)]
    assert [each.status_code for each in done] == [201, 201]
    assert done[1].headers["Idempotent-Replayed"] == "true"
    assert shop.count() == (2 if atomic else 3)


class TestConnexion:
    """It makes responses outside of Flask, of which we see nothing."""

    @pytest.fixture
    def make(self, make_shop):
        made = []

        def make(end, atomic, inside=None):
            shop = make_shop()
            application = connexion.FlaskApp(__name__)
            app = application.app
            names = ("SQLALCHEMY_DATABASE_URI", "IDEMPOTENCY_STORE")
            app.config.update({name: shop.app.config[name] for name in names})
            shop.db.init_app(app)
            shop.idempotency.init_app(app, shop.db, scope=None)
            if inside is not None:
                app.register_error_handler(inside, lambda _error: ({"inside": True}, 409))

            def outside(_request, _error):
                return ConnexionResponse(status_code=400, body='{"outside": true}')

            application.add_error_handler(Exception, outside)
            responses = {"default": {"description": "any", "content": {"application/json": {}}}}
            document = {
                "openapi": "3.0.3",
                "info": {"title": "shop", "version": "1"},
                "paths": {"/payments": {"post": {"operationId": "pay", "responses": responses}}},
            }
            pay, runs = ending(shop, end)
            views = {"pay": idempotent(atomic=atomic)(pay)}
            application.add_api(document, resolver=Resolver(views.__getitem__))
            made.append((shop, app))
            return shop, runs, lambda: asyncio.run(post(application))

        async def post(application):
            transport = httpx.ASGITransport(application)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                return await client.post("/payments", headers={"Idempotency-Key": "key-1"})

        yield make
        for shop, app in made:
            with app.app_context():
                shop.db.engine.dispose()

    @pytest.mark.parametrize("end", ["error", "zero", "abort"])
    def test_an_atomic_commit_is_rolled_back_which_is_said(self, make, end, caplog):
        """Connexion has a handler of its own for what is aborted with, the application one for all."""
        shop, runs, post = make({"error": fail, "zero": lambda: 1 // 0, "abort": abort(409)}[end], True)
        assert [post().status_code for _ in range(3)] == [409 if end == "abort" else 400] * 3
        assert (shop.count(), len(runs)) == (0, 3)
        said = [each for each in caplog.records if "committed changes and raised" in each.getMessage()]
        assert [each.levelno for each in said] == [logging.WARNING]

    def test_one_with_a_lease_is_stored_as_failed(self, make):
        shop, runs, post = make(fail, False)
        first, again = post(), post()
        assert (first.status_code, first.json()) == (400, {"outside": True})
        assert (again.status_code, again.headers["Idempotent-Replayed"]) == (500, "true")
        assert (shop.count(), len(runs)) == (1, 1)

    @KINDS
    def test_a_handler_inside_of_flask_is_seen(self, make, atomic, caplog):
        shop, runs, post = make(fail, atomic, inside=Refused)
        first, again = post(), post()
        assert first.json() == again.json() == {"inside": True}
        assert again.headers["Idempotent-Replayed"] == "true"
        assert (shop.count(), len(runs)) == (1, 1)
        assert "undone" not in caplog.text
