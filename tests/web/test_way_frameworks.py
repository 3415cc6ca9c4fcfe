"""The way of a request in frameworks, which make responses of errors in ways of their own."""

import apiflask
import flask
import flask_restful
import flask_restx
import flask_smorest
import pytest
from flask.views import MethodView

from flask_idempotency import idempotent
from tests.web.way import KINDS, Refused, is_replayed, make_shop, nobody_was_warned, undone

__all__ = ["make_shop", "nobody_was_warned"]

pytestmark = pytest.mark.parametrize("store", ["sql"], indirect=True)


def fail(_package):
    raise Refused


def refuse(_error):
    return {"refused": True}, 409


def in_restful(app, view, options, package=flask_restful):
    api = package.Api(app)
    if package is flask_restx:
        api.errorhandler(Refused)(refuse)
    members = {"post": lambda _self: view(), "method_decorators": [idempotent(**options)]}
    api.add_resource(type("Payments", (package.Resource,), members), "/payments")


def in_restx(app, view, options):
    in_restful(app, view, options, flask_restx)


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
    app.register_error_handler(Refused, refuse)


def in_apiflask(app, view, options):
    blueprint = apiflask.APIBlueprint("shop", __name__)
    blueprint.post("/payments")(idempotent(**options)(blueprint.output({}, status_code=201)(view)))
    app.register_blueprint(blueprint)
    app.register_error_handler(Refused, refuse)


ABORTS = {in_restful: flask_restful, in_restx: flask_restx, in_smorest: flask, in_apiflask: apiflask}
"""What the views of each abort with. All but Flask-RESTful have a handler for an error."""

ENDS = {
    "returns": (lambda _package: {}, None),
    "aborts": (lambda package: package.abort(409), 409),
    "rejects": (lambda package: package.abort(403), 403),
    "is handled": (fail, 409),
    "fails": (lambda _package: 1 // 0, 500),
}


@pytest.fixture
def make(make_shop):
    """Makes an application; one of APIFlask on the database of another."""

    def make(register, **config):
        shop = make_shop(**config)
        if register is in_apiflask:
            plain, shop.app = shop.app, apiflask.APIFlask("api")
            names = ("SQLALCHEMY_DATABASE_URI", "IDEMPOTENCY_STORE", "PROPAGATE_EXCEPTIONS")
            shop.app.config.update({name: plain.config[name] for name in names})
            shop.db.init_app(shop.app)
            shop.idempotency.init_app(shop.app, shop.db, scope=None)
        return shop

    return make


@KINDS
@pytest.mark.parametrize("register", ABORTS)
@pytest.mark.parametrize(("ends", "status"), ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("propagates", [False, True])
def test_what_the_framework_makes_of_the_views_end_is_stored_or_undoes_it(
    make, register, atomic, ends, status, propagates, caplog
):
    shop, runs = make(register, PROPAGATE_EXCEPTIONS=propagates), []
    if ends is fail and register is in_restful:
        status = 500  # an unknown error
    lets_out = propagates and status == 500

    def pay():
        shop.db.session.add(shop.Payment(amount=5))
        shop.db.session.commit()
        runs.append(1)
        return ends(ABORTS[register])

    register(shop.app, pay, {"atomic": atomic})
    is_stored = status != 403 and not (atomic and status == 500)
    found = []
    for is_retry in False, True:
        if lets_out and not (is_retry and is_stored):
            with pytest.raises((ZeroDivisionError, Refused)):
                shop.post()
        else:
            found.append(shop.post())
            assert found[-1].status_code == (status or found[0].status_code)
            assert is_replayed(found[-1]) == (is_stored and is_retry)
    if is_stored and status != 500:
        assert found[0].data == found[1].data
    assert len(runs) == (1 if is_stored else 2)
    assert shop.count() == (1 if is_stored else 0 if atomic else 2)
    assert len(undone(caplog)) == (atomic and not is_stored)
