"""Connexion makes responses outside of Flask: what the page brings inside is stored, others refused."""

import connexion
import flask
import pytest
import sqlalchemy as sa
from connexion.exceptions import BadRequestProblem
from connexion.resolver import Resolver
from flask import abort
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency, idempotent
from tests.docs.pages import ROOT, blocks
from tests.stores import on_sqlite

PAGE = ROOT / "docs/http.md"


def raise_problem():
    raise BadRequestProblem("no")


ENDS = {
    "404": lambda: abort(404, "no"),
    "400": raise_problem,
    "rejected": lambda: abort(flask.make_response({"pay": "more"}, 402)),
}
PAY_MORE = b'{"pay":"more"}\n'


class Shop:
    def __init__(self, application):
        self.application, self.app = application, application.app
        self.app.config.update(on_sqlite(self))
        self.db = db = SQLAlchemy(self.app)
        self.payment = sa.Table("payment", db.metadata, sa.Column("id", sa.Integer, primary_key=True))
        self.idempotency = Idempotency(self.app, self.db, scope=None)
        with self.app.app_context():
            db.create_all()

    def count(self):
        with self.app.app_context():
            return self.db.session.scalar(sa.select(sa.func.count(self.payment.c.id)))

    def add(self, **views):
        """Register each view for POST at its name."""
        responses = {"default": {"description": "any", "content": {"application/json": {}}}}
        paths = {f"/{name}": {"post": {"operationId": name, "responses": responses}} for name in views}
        about = {"openapi": "3.0.3", "info": {"title": "shop", "version": "1"}}
        self.application.add_api({**about, "paths": paths}, resolver=Resolver(views.__getitem__))

    def post(self, name):
        """Status and content, and whether it is a replay."""
        response = self.application.test_client().post(f"/{name}", headers={"Idempotency-Key": "key-1"})
        kind = response.headers["Content-Type"]
        return (response.status_code, kind, response.content), "Idempotent-Replayed" in response.headers

    def paying(self, then):
        """A view that commits a payment before ``then``."""

        def pay():
            self.db.session.execute(sa.insert(self.payment))
            self.db.session.commit()
            return then()

        return pay


@pytest.fixture
def bare():
    return Shop(connexion.FlaskApp(__name__))


@pytest.fixture
def shop():
    """With the error handlers of the page."""
    names = {"__name__": __name__}
    [recipe] = [each for each in blocks(PAGE, "python") if "connexion" in each.text]
    exec(compile(recipe.source, str(PAGE), "exec"), names)  # noqa: S102
    return Shop(names["connexion_app"])


@pytest.mark.parametrize("wrap", [idempotent, idempotent(atomic=False), None])
def test_with_the_handlers_of_the_page_it_is_stored_with_the_commit(bare, shop, wrap):
    bare.add(**ENDS)
    shop.add(**{name: (wrap or (lambda view: view))(shop.paying(end)) for name, end in ENDS.items()})
    if wrap is None:
        shop.idempotency.protect(shop.app)
    for name in ENDS:
        (first, is_first_replay), (again, is_replay) = shop.post(name), shop.post(name)
        assert (first, is_first_replay, is_replay) == (again, False, True)
        assert first == (bare.post(name)[0] if name != "rejected" else (402, first[1], PAY_MORE))
    assert shop.count() == len(ENDS)


def test_without_them_a_commit_is_not_rolled_back_in_silence(bare, caplog):
    plain = {f"plain-{name}": end for name, end in ENDS.items() if name != "rejected"}
    bare.add(**plain, **{f"pay-{name}": idempotent(bare.paying(end)) for name, end in plain.items()})
    for name in plain:
        assert [bare.post(f"pay-{name}") for _ in range(2)] == [bare.post(name)] * 2
        undone = f"the view of /.pay-{name} committed changes and raised an error whose response"
        assert caplog.text.count(undone) == 1
    assert bare.count() == 0
