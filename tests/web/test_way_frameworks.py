"""The way of a request in frameworks, which make responses of errors in ways of their own."""

import apiflask
import flask
import flask_restful
import flask_restx
import flask_smorest
import pytest
from flask.views import MethodView

from flask_idempotency import idempotent
from tests.web.way import (
    KINDS,
    STORES,
    Refused,
    is_replayed,
    make_shop,
    nobody_was_warned,
    refuse,
    undone,
)

__all__ = ["make_shop", "nobody_was_warned"]

pytestmark = STORES


def in_restful(app, view, options, package=flask_restful):
    members = {"post": lambda _self: view(), "method_decorators": [idempotent(**options)]}
    package.Api(app).add_resource(type("Payments", (package.Resource,), members), "/payments")


def in_restx(app, view, options):
    in_restful(app, view, options, flask_restx)


def in_restx_with_a_handler(app, view, options):
    api = flask_restx.Api(app)
    api.errorhandler(Refused)(refuse)
    members = {"post": lambda _self: view(), "method_decorators": [idempotent(**options)]}
    api.add_resource(type("Payments", (flask_restx.Resource,), members), "/payments")


def in_smorest(app, view, options):
    app.config.update(API_TITLE="shop", API_VERSION="1", OPENAPI_VERSION="3.0.3")
    blueprint = flask_smorest.Blueprint("shop", __name__)

    @blueprint.route("/payments")
    class Payments(MethodView):
        @idempotent(**options)
        @blueprint.response(201)
        def post(self):
            return view()

    flask_smorest.Api(app).register_blueprint(blueprint)


def in_apiflask(app, view, options):
    blueprint = apiflask.APIBlueprint("shop", __name__)
    blueprint.post("/payments")(idempotent(**options)(blueprint.output({}, status_code=201)(view)))
    app.register_blueprint(blueprint)


FRAMEWORKS = {
    in_restful: flask_restful,
    in_restx: flask_restx,
    in_restx_with_a_handler: flask_restx,
    in_smorest: flask,
    in_apiflask: apiflask,
}
"""And what its views abort with."""

ASK_FLASK = (in_smorest, in_apiflask)
"""To the others, what the application handles is an unknown error."""


def fail():
    raise Refused


@pytest.fixture
def make(make_shop):
    """Makes an application; one of APIFlask on the database of another."""

    def make(register, **config):
        shop = make_shop(**config)
        if register is in_apiflask:
            with (plain := shop.app).app_context():
                shop.db.engine.dispose()
            shop.app = apiflask.APIFlask("api")
            names = ("SQLALCHEMY_DATABASE_URI", "IDEMPOTENCY_STORE", "PROPAGATE_EXCEPTIONS")
            shop.app.config.update({name: plain.config[name] for name in names})
            shop.db.init_app(shop.app)
            shop.idempotency.init_app(shop.app, shop.db, scope=None)
        return shop

    return make


@pytest.mark.parametrize("register", FRAMEWORKS)
@KINDS
@pytest.mark.parametrize("end", ["returns", "aborts", "rejects", "fails", "handled"])
def test_what_the_framework_makes_of_the_views_end_is_stored_or_undoes_it(
    make, register, atomic, end, caplog
):
    shop, runs = make(register), []
    if end == "handled":
        shop.app.register_error_handler(Refused, refuse)
    ends = {
        "returns": dict,
        "aborts": lambda: FRAMEWORKS[register].abort(409),
        "rejects": lambda: FRAMEWORKS[register].abort(403),
    }

    def pay():
        shop.db.session.add(shop.Payment(amount=5))
        shop.db.session.commit()
        runs.append(1)
        return ends.get(end, fail)()

    register(shop.app, pay, {"atomic": atomic})
    is_handled = (end == "handled" and register in ASK_FLASK) or register is in_restx_with_a_handler
    first, again = shop.post(), shop.post()
    if end in ("fails", "handled"):
        expected = 409 if is_handled else 500
    else:
        expected = {"aborts": 409, "rejects": 403}.get(end, first.status_code)
    assert (first.status_code, again.status_code) == (expected, expected)
    is_stored = expected < 500 if atomic else True
    is_stored = is_stored and end != "rejects"
    assert is_replayed(again) == is_stored
    assert len(runs) == (1 if is_stored else 2)
    assert shop.count() == (1 if is_stored else 0 if atomic else 2)
    if is_stored and expected < 500:
        assert first.data == again.data
    assert len(undone(caplog)) == (atomic and not is_stored)


@pytest.mark.parametrize("register", FRAMEWORKS)
@KINDS
def test_an_error_that_is_propagated_is_rolled_back_or_stored_as_failed(make, register, atomic):
    shop, runs = make(register, PROPAGATE_EXCEPTIONS=True), []

    def pay():
        shop.db.session.add(shop.Payment(amount=5))
        shop.db.session.commit()
        runs.append(1)
        raise ZeroDivisionError

    register(shop.app, pay, {"atomic": atomic})
    with pytest.raises(ZeroDivisionError):
        shop.post()
    if not atomic:
        assert (shop.post().status_code, runs) == (500, [1])
    assert shop.count() == (not atomic)
