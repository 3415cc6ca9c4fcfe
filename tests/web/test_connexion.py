"""Connexion makes responses outside of Flask: what the page brings inside is stored, others refused."""

import asyncio

import connexion
import flask
import httpx
import pytest
from connexion.exceptions import BadRequestProblem
from connexion.resolver import Resolver
from flask import abort

from flask_idempotency import idempotent
from tests.docs.pages import ROOT, blocks

PAGE = ROOT / "docs/http.md"


def raise_problem():
    raise BadRequestProblem("no")


ERRORS = {404: lambda: abort(404, "no"), 400: raise_problem}


class Shop:
    """An application of Connexion on the database of a world, whose rows it writes."""

    def __init__(self, world, application):
        self.world, self.application, self.app = world, application, application.app
        names = ("SQLALCHEMY_DATABASE_URI", "IDEMPOTENCY_STORE", "IDEMPOTENCY_REDIS_URL")
        self.app.config.update({name: world.app.config[name] for name in names})
        world.db.init_app(self.app)
        world.idempotency.init_app(self.app, world.db, scope=None)

    def add(self, **views):
        """Register each view for POST at its name."""
        responses = {"default": {"description": "any", "content": {"application/json": {}}}}
        paths = {f"/{name}": {"post": {"operationId": name, "responses": responses}} for name in views}
        about = {"openapi": "3.0.3", "info": {"title": "shop", "version": "1"}}
        self.application.add_api({**about, "paths": paths}, resolver=Resolver(views.__getitem__))

    def post(self, name):
        """Status, headers and content as compared, and whether it is a replay."""

        async def post():
            transport = httpx.ASGITransport(self.application)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                return await client.post(f"/{name}", headers={"Idempotency-Key": "key-1"})

        response = asyncio.run(post())
        replayed = response.headers.pop("Idempotent-Replayed", None) == "true"
        response.headers.pop("Cache-Control", None)
        return (response.status_code, response.headers.multi_items(), response.content), replayed

    def paying(self, then):
        """A view that commits a payment before ``then``."""

        def pay():
            self.world.db.session.add(self.world.Payment(amount=5))
            self.world.db.session.commit()
            return then()

        return pay


@pytest.fixture
def make_shop(make_world):
    shops = []

    def make(application):
        shops.append(Shop(make_world(), application))
        return shops[-1]

    yield make
    for shop in shops:
        with shop.app.app_context():
            shop.world.db.engine.dispose()


@pytest.fixture
def bare(make_shop):
    """As Connexion makes it."""
    return make_shop(connexion.FlaskApp(__name__))


@pytest.fixture
def shop(make_shop):
    """With the error handlers of the page."""
    names = {"__name__": __name__}
    [recipe] = [each for each in blocks(PAGE, "python") if "connexion" in each.text]
    exec(compile(recipe.source, str(PAGE), "exec"), names)  # noqa: S102
    return make_shop(names["connexion_app"])


@pytest.mark.parametrize("wrap", [idempotent, idempotent(atomic=False), None])
def test_with_the_handlers_of_the_page_it_is_stored_with_the_commit(bare, shop, wrap):
    ends = {f"error{status}": end for status, end in ERRORS.items()}
    bare.add(**ends)
    ends["rejected"] = lambda: abort(flask.make_response({"pay": "more"}, 402))
    shop.add(**{name: (wrap or (lambda view: view))(shop.paying(end)) for name, end in ends.items()})
    if wrap is None:
        shop.world.idempotency.protect(shop.app)
    for name in ends:
        (first, is_first_replay), (again, is_replay) = shop.post(name), shop.post(name)
        assert (first, is_first_replay, is_replay) == (again, False, True)
        if name == "rejected":
            assert first[::2] == (402, b'{"pay":"more"}\n')
        else:
            assert first == bare.post(name)[0]
    assert shop.world.count() == len(ends)


@pytest.mark.parametrize("status", ERRORS)
def test_without_them_a_commit_is_not_rolled_back_in_silence(bare, status, caplog):
    does = ERRORS[status]
    pay = f"pay{status}"  # each view is warned of once
    bare.add(**{"plain": does, pay: idempotent(bare.paying(does)), "read": idempotent(does)})
    expected = bare.post("plain")[0], False
    assert [bare.post("read") for _ in range(2)] == [expected] * 2
    assert "committed" not in caplog.text
    assert [bare.post(pay) for _ in range(2)] == [expected] * 2
    undone = f"the view of /.{pay} committed changes and raised an error whose response"
    assert caplog.text.count(undone) == 1
    assert bare.world.count() == 0


@pytest.mark.parametrize("does", [lambda: abort(503), lambda: abort(401), lambda: 1 // 0])
@pytest.mark.parametrize("kind", ["bare", "shop"])
def test_what_is_not_stored_is_rolled_back_as_in_flask(request, does, kind, caplog):
    shop = request.getfixturevalue(kind)
    shop.add(plain=does, pay=idempotent(shop.paying(does)))
    assert shop.post("pay") == shop.post("plain")
    assert "NotAtomic" not in caplog.text
    assert shop.world.count() == 0
