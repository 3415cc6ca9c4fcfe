"""Flask-SQLAlchemy-Lite and a plain ``scoped_session``: the applications of the page, and mistakes."""

import pytest
import sqlalchemy as sa
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from flask_sqlalchemy_lite import SQLAlchemy as Lite
from sqlalchemy.orm import DeclarativeBase, scoped_session, sessionmaker

from flask_idempotency import ConfigurationError, Idempotency, current_operation, idempotent
from tests.docs.pages import ROOT, blocks
from tests.drivers import EACH, with_driver

KINDS = pytest.mark.parametrize("kind", ["lite", "plain"])


class Base(DeclarativeBase):
    pass


@pytest.fixture
def shop(kind, databases, driver, monkeypatch):
    """The application of the page."""
    url = databases.take()
    monkeypatch.setenv("DATABASE_URL", with_driver(url, driver))
    source = {block.mark: block.source for block in blocks(ROOT / "docs/session.md", "python")}
    names = {"__name__": kind}
    code = compile(source[f"file: {kind}.py"], f"{kind}.py", "exec", dont_inherit=True)
    exec(code, names)  # noqa: S102
    app = names["app"]
    app.names = names
    app.engine = app.extensions["idempotency"].database
    yield app
    app.engine.dispose()
    databases.give_back(url)


def post(shop, path="/payments", account="alice"):
    headers = {"Idempotency-Key": "k", "X-Account": account}
    return shop.test_client().post(path, json={"amount": 5}, headers=headers)


def count(shop, table="payment"):
    with shop.engine.connect() as connection:
        found = connection.scalar(sa.text(f"select count(*) from {table}"))
    assert shop.engine.pool.checkedout() == 0
    return found


@EACH
@KINDS
def test_the_view_runs_once_and_what_it_committed_goes_with_an_error(shop, kind):
    runs = []

    @shop.post("/fail")
    @idempotent
    def fail():
        runs.append(current_operation.attempt)
        session = shop.names["session"]() if kind == "plain" else shop.names["db"].session
        session.add(shop.names["Payment"](amount=1))
        session.commit()
        if len(runs) == 1:
            raise LookupError
        return {}, 201

    first, again = post(shop), post(shop)
    assert (first.status_code, first.json) == (201, {"id": 1, "amount": 5})
    assert (again.data, again.headers["Idempotent-Replayed"]) == (first.data, "true")
    assert post(shop, account="bob").json == {"id": 2, "amount": 5}
    assert (count(shop), count(shop, "idempotency_record")) == (2, 2)
    assert [post(shop, "/fail").status_code for _ in range(3)] == [500, 201, 201]
    assert (runs, count(shop)) == ([1, 2], 3)


@pytest.mark.parametrize("status", [201, 503])
def test_a_session_that_was_made_before_the_extension_joins(databases, status):
    url = databases.take()
    engine = sa.create_engine(url)
    session = scoped_session(sessionmaker(engine))
    session.execute(sa.text("select 1"))
    app = Flask("early")
    app.config.update(IDEMPOTENCY_STORE="postgres", PROPAGATE_EXCEPTIONS=True)
    metadata = sa.MetaData()
    payment = sa.Table("payment", metadata, sa.Column("amount", sa.Integer))
    Idempotency(app, session=session, metadata=metadata, scope=None)
    metadata.create_all(engine)

    @app.post("/payments")
    @idempotent
    def pay():
        session.execute(payment.insert().values(amount=1))
        session.commit()
        return {}, status

    assert post(app).status_code == status
    session.remove()
    assert session.scalar(sa.select(sa.func.count()).select_from(payment)) == (status == 201)
    session.remove()
    engine.dispose()
    databases.give_back(url)


URL = "postgresql+psycopg2://shop@nowhere.invalid/shop"


def plain(**options):
    return {"session": scoped_session(sessionmaker(sa.create_engine(URL))), **options}


NOT_SCOPED = "scoped_session over a sessionmaker"
WRONG = [
    (None, {"session": sessionmaker(sa.create_engine(URL))}, NOT_SCOPED),
    (None, {"session": scoped_session(sessionmaker())}, "the session's bind is None; allowed: "),
    (None, plain(metadata=None), "metadata is None, and the tables"),
    (None, plain(metadata=Base), r"metadata=Base.metadata\) with neither"),
    (None, {"db": object()}, "Flask-SQLAlchemy-Lite"),
    (Lite, plain(), "both db and session"),
    (Lite, {"metadata": None}, r"Idempotency\(app, db, metadata=Base.metadata\)"),
    (Lite, {"IDEMPOTENCY_BIND_KEY": "north"}, "BIND_KEY is 'north'; allowed: 'default'"),
    (SQLAlchemy, {}, "beside Flask-SQLAlchemy, which has its own"),
    (SQLAlchemy, {"db": SQLAlchemy(), "metadata": None}, r"call db.init_app\(app\) before"),
]


@pytest.mark.parametrize(("kind", "given", "said"), WRONG)
def test_what_is_no_session_is_refused_with_what_is_allowed(kind, given, said):
    app, given = Flask("shop"), dict(given)
    app.config.update(SQLALCHEMY_ENGINES={"default": URL}, SQLALCHEMY_DATABASE_URI=URL)
    app.config["IDEMPOTENCY_BIND_KEY"] = given.pop("IDEMPOTENCY_BIND_KEY", None)
    if kind:
        given.setdefault("db", kind(app))
    with pytest.raises(ConfigurationError, match=said):
        Idempotency(app, **{"metadata": Base.metadata, "scope": None, **given})
