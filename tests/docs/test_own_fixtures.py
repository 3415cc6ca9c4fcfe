"""The fixtures of ``docs/testing.md`` that roll a test back: the extension works in them as it is."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import orm

from flask_idempotency import Idempotency, idempotent
from tests.docs.pages import ROOT, blocks

OF_DB, OF_SESSION = [
    block.text for block in blocks(ROOT / "docs/testing.md", "python") if block.mark == "fragment"
][-2:]
TABLES = "payment", "idempotency_record"


@pytest.mark.parametrize("on_sqlite", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_a_fixture_rolls_a_request_and_its_record_back(postgres, plain, on_sqlite, tmp_path):
    app, url = Flask(__name__), f"sqlite:///{tmp_path}/test.db"
    app.testing = True
    if on_sqlite:
        app.config["IDEMPOTENCY_STORE"] = "sql"
    else:
        url = postgres.database(f"fixture_{plain}".lower())
    if plain:
        engine, base = sa.create_engine(url), orm.declarative_base()
        session = orm.scoped_session(orm.sessionmaker(engine))
        db: Any = SimpleNamespace(session=session, Model=base, metadata=base.metadata)
        Idempotency(app, session=session, metadata=base.metadata, scope=None)
        app.teardown_appcontext(lambda _error: session.remove())
    else:
        app.config["SQLALCHEMY_DATABASE_URI"] = url
        db = SQLAlchemy(app)
        Idempotency(app, db, scope=None)
        with app.app_context():
            engine = db.engine

    class Payment(db.Model):  # type: ignore[misc]
        __tablename__ = "payment"
        id = sa.Column(sa.Integer, primary_key=True)

    @app.post("/payments")
    @idempotent
    def pay() -> Any:
        payment = Payment()
        db.session.add(payment)
        db.session.commit()
        return {"id": payment.id}, 201

    db.metadata.create_all(engine)
    names = {"pytest": SimpleNamespace(fixture=lambda **_: contextmanager), "sa": sa, "db": db}
    names |= {"session": db.session, "engine": engine}
    code = OF_SESSION if plain else OF_DB
    exec(code, names)  # noqa: S102
    rolled_back: Any = names["rolled_back"]
    for _test in range(2):
        with rolled_back() if plain else rolled_back(app):
            answers = [
                app.test_client().post("/payments", headers={"Idempotency-Key": "k"}) for _ in range(2)
            ]
            assert [answer.status_code for answer in answers] == [201, 201]
            assert answers[1].json == answers[0].json
            assert "Idempotent-Replayed" in answers[1].headers
            assert "Idempotent-Replayed" not in answers[0].headers
        with engine.connect() as connection:
            for table in TABLES:
                assert connection.scalar(sa.text(f"SELECT count(*) FROM {table}")) == 0
    engine.dispose()
