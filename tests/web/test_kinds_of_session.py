"""Flask-SQLAlchemy-Lite and a plain ``scoped_session``, and mistakes with them."""

import pytest
import sqlalchemy as sa
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from flask_sqlalchemy_lite import SQLAlchemy as Lite
from sqlalchemy.orm import DeclarativeBase, scoped_session, sessionmaker

from flask_idempotency import ConfigurationError, Idempotency, idempotent


class Base(DeclarativeBase):
    pass


@pytest.mark.parametrize("status", [201, 503])
@pytest.mark.parametrize("kind", ["lite", "plain"])
def test_the_view_runs_once_and_what_it_committed_goes_with_its_response(databases, kind, status):
    """The applications of the page: ``tests/acceptance/test_readme.py``. A session may be older."""
    url, app, metadata = databases.take(), Flask("shop"), sa.MetaData()
    app.config.update(IDEMPOTENCY_STORE="postgres", SQLALCHEMY_ENGINES={"default": url})
    payment = sa.Table("payment", metadata, sa.Column("amount", sa.Integer))
    session = scoped_session(sessionmaker(sa.create_engine(url)))
    session.execute(sa.text("select 1"))
    given = {"db": Lite(app)} if kind == "lite" else {"session": session}
    Idempotency(app, **given, metadata=metadata, scope=None)
    engine = app.extensions["idempotency"].database
    metadata.create_all(engine)

    @app.post("/payments")
    @idempotent
    def pay():
        ours = given["db"].session if kind == "lite" else session
        ours.execute(payment.insert().values(amount=1))
        ours.commit()
        return {}, status

    for _ in range(2):
        response = app.test_client().post("/payments", headers={"Idempotency-Key": "k"})
        assert response.status_code == status
    assert ("Idempotent-Replayed" in response.headers) == (status == 201)
    session.remove()
    with engine.connect() as connection:
        count = connection.scalar(sa.select(sa.func.count()).select_from(payment))
    assert (count, engine.pool.checkedout()) == (status == 201, 0)
    for each in engine, session.bind:
        each.dispose()
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
