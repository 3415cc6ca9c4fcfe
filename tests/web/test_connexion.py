"""Connexion makes responses outside of Flask: what the page brings inside is stored, others refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

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


def raise_problem() -> None:
    raise BadRequestProblem("no")


ERRORS: dict[int, Callable[[], Any]] = {404: lambda: abort(404, "no"), 400: raise_problem}


def abort_with_a_response() -> None:
    abort(flask.make_response({"pay": "more"}, 402))


ALL = pytest.mark.parametrize("status", ERRORS)


class Shop:
    """An application of Connexion on the database of a world, whose rows it writes."""

    def __init__(self, world: Any, application: Any) -> None:
        self.world, self.application, self.app = world, application, application.app
        names = ("SQLALCHEMY_DATABASE_URI", "IDEMPOTENCY_STORE", "IDEMPOTENCY_REDIS_URL")
        self.app.config.update({name: world.app.config[name] for name in names})
        world.db.init_app(self.app)
        world.idempotency.init_app(self.app, world.db, scope=None)

    def add(self, **views: Any) -> None:
        """Register each view for POST at its name."""
        responses = {"default": {"description": "any", "content": {"application/json": {}}}}
        operations = {name: {"operationId": name, "responses": responses} for name in views}
        document = {
            "openapi": "3.0.3",
            "info": {"title": "shop", "version": "1"},
            "paths": {f"/{name}": {"post": operation} for name, operation in operations.items()},
        }
        self.application.add_api(document, resolver=Resolver(views.__getitem__))

    def post(self, name: str) -> httpx.Response:
        return asyncio.run(self._post(name))

    async def _post(self, name: str) -> httpx.Response:
        transport = httpx.ASGITransport(self.application)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return await client.post(f"/{name}", headers={"Idempotency-Key": "key-1"})

    def paying(self, then: Callable[[], Any]) -> Callable[[], Any]:
        """A view that commits a payment before ``then``."""

        def pay() -> Any:
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
    names: dict[str, Any] = {"__name__": __name__}
    [recipe] = [each for each in blocks(PAGE, "python") if "connexion" in each.text]
    exec(compile(recipe.source, str(PAGE), "exec"), names)  # noqa: S102
    return make_shop(names["connexion_app"])


def compared(response):
    own = {"idempotent-replayed", "cache-control"}
    lines = [(name, value) for name, value in response.headers.items() if name not in own]
    return response.status_code, lines, response.content


@ALL
@pytest.mark.parametrize("atomic", [True, False])
def test_with_the_handlers_of_the_page_it_is_stored_with_the_commit(bare, shop, status, atomic):
    bare.add(plain=ERRORS[status])
    shop.add(pay=idempotent(atomic=atomic)(shop.paying(ERRORS[status])))
    first, again = shop.post("pay"), shop.post("pay")
    assert compared(bare.post("plain")) == compared(first) == compared(again)
    assert first.status_code == status
    assert again.headers["Idempotent-Replayed"] == "true"
    assert shop.world.count() == 1


def test_a_response_that_is_aborted_with_is_the_response(shop):
    shop.add(pay=idempotent(shop.paying(abort_with_a_response)))
    first, again = shop.post("pay"), shop.post("pay")
    assert compared(first) == compared(again)
    assert (first.status_code, first.json()) == (402, {"pay": "more"})
    assert again.headers["Idempotent-Replayed"] == "true"
    assert shop.world.count() == 1


@ALL
def test_without_them_a_commit_is_not_rolled_back_in_silence(bare, status, caplog):
    bare.add(**{f"pay{status}": idempotent(bare.paying(ERRORS[status]))})
    for _ in range(2):
        assert bare.post(f"pay{status}").status_code == status
    assert (
        caplog.text.count(
            f"the view of /.pay{status} committed changes and raised an error whose response"
        )
        == 1
    )
    assert bare.world.count() == 0


@ALL
def test_before_any_commit_it_goes_outside_as_without_us(bare, status):
    bare.add(plain=ERRORS[status], pay=idempotent(ERRORS[status]))
    plain, *others = (bare.post(name) for name in ("plain", "pay", "pay"))
    for other in others:
        assert compared(other) == compared(plain)
        assert "Idempotent-Replayed" not in other.headers


@pytest.mark.parametrize("does", [lambda: abort(503), lambda: abort(401), lambda: 1 // 0])
@pytest.mark.parametrize("kind", ["bare", "shop"])
def test_what_is_not_stored_is_rolled_back_as_in_flask(request, does, kind, caplog):
    shop = request.getfixturevalue(kind)
    shop.add(plain=does, pay=idempotent(shop.paying(does)))
    assert compared(shop.post("pay")) == compared(shop.post("plain"))
    assert "NotAtomic" not in caplog.text
    assert shop.world.count() == 0


def test_protect_stores_the_response_as_connexion_makes_it(bare, shop):
    for each in bare, shop:
        each.add(pay=each.paying(lambda: "paid"))
    shop.world.idempotency.protect(shop.app)
    first, again = shop.post("pay"), shop.post("pay")
    assert compared(bare.post("pay")) == compared(first) == compared(again)
    assert first.json() == "paid"
    assert again.headers["Idempotent-Replayed"] == "true"
    assert shop.world.count() == 1
