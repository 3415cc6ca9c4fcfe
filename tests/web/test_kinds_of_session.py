"""Flask-SQLAlchemy-Lite and a plain ``scoped_session``: the applications of the page, and mistakes."""

import os
import re
import subprocess
import sys
import threading
from contextvars import copy_context

import pytest
import sqlalchemy as sa
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from flask_sqlalchemy_lite import SQLAlchemy as Lite
from sqlalchemy.orm import DeclarativeBase, Session, scoped_session, sessionmaker

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


def post(shop, path="/payments", key="k", account="alice"):
    headers = {"Idempotency-Key": key, "X-Account": account}
    return shop.test_client().post(path, json={"amount": 5}, headers=headers)


def count(shop, table="payment"):
    with shop.engine.connect() as connection:
        found = connection.scalar(sa.text(f"select count(*) from {table}"))
    assert shop.engine.pool.checkedout() == 0
    return found


@EACH
@KINDS
def test_the_view_runs_once_and_the_retry_gets_its_response(shop):
    first, again = post(shop), post(shop)
    assert (first.status_code, first.json) == (201, {"id": 1, "amount": 5})
    assert (again.data, again.headers["Idempotent-Replayed"]) == (first.data, "true")
    assert post(shop, account="bob").json == {"id": 2, "amount": 5}
    assert (count(shop), count(shop, "idempotency_record")) == (2, 2)


@EACH
@KINDS
def test_what_a_view_committed_goes_with_an_error_and_a_retry_begins_anew(shop, kind):
    session, runs = shop.names.get("session") or shop.names["db"], []

    @shop.post("/fail")
    @idempotent
    def fail():
        runs.append(current_operation.attempt)
        here = session.session if kind == "lite" else session
        here.add(shop.names["Payment"](amount=1))
        here.commit()
        if len(runs) == 1:
            raise LookupError
        return {}, 201

    assert [post(shop, "/fail").status_code for _ in range(3)] == [500, 201, 201]
    assert (runs, count(shop)) == ([1, 2], 1)


@pytest.mark.parametrize("kind", ["lite"])
def test_a_session_by_another_name_joins(shop):
    @shop.post("/second")
    @idempotent
    def second():
        session = shop.names["db"].get_session("second")
        session.add(shop.names["Payment"](amount=1))
        session.commit()
        raise LookupError

    assert post(shop, "/second").status_code == 500
    assert count(shop) == 0


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

    reply = app.test_client().post("/payments", headers={"Idempotency-Key": "k"})
    assert reply.status_code == status
    session.remove()
    assert session.scalar(sa.select(sa.func.count()).select_from(payment)) == (status == 201)
    session.remove()
    engine.dispose()
    databases.give_back(url)


URL = "postgresql+psycopg2://shop@nowhere.invalid/shop"


def lite_app():
    app = Flask("lite")
    app.config["SQLALCHEMY_ENGINES"] = {"default": URL}
    return app, Lite(app)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"session": sessionmaker(sa.create_engine(URL))}, "scoped_session over a sessionmaker"),
        ({"session": Session(sa.create_engine(URL))}, "scoped_session over a sessionmaker"),
        ({"session": scoped_session(Session)}, "scoped_session over a sessionmaker"),
        ({"session": scoped_session(sessionmaker())}, "the session's bind is None; allowed: "),
        (
            {"session": scoped_session(sessionmaker(sa.create_engine(URL))), "metadata": None},
            "metadata is None, and the tables",
        ),
        (
            {"session": scoped_session(sessionmaker(sa.create_engine(URL))), "metadata": Base},
            r"metadata=Base.metadata\) with neither",
        ),
        ({"db": object()}, "Flask-SQLAlchemy-Lite"),
    ],
)
def test_what_is_no_session_is_refused_with_what_is_allowed(given, said):
    with pytest.raises(ConfigurationError, match=said):
        Idempotency(Flask("shop"), **{"metadata": Base.metadata, "scope": None, **given})


def test_both_are_not_taken():
    app, db = lite_app()
    session = scoped_session(sessionmaker(sa.create_engine(URL)))
    with pytest.raises(ConfigurationError, match="both db and session"):
        Idempotency(app, db, session=session, metadata=Base.metadata, scope=None)


def test_lite_needs_the_metadata_and_flask_sqlalchemy_has_its_own():
    app, db = lite_app()
    with pytest.raises(ConfigurationError, match=r"Idempotency\(app, db, metadata=Base.metadata\)"):
        Idempotency(app, db, scope=None)
    app = Flask("usual")
    app.config["SQLALCHEMY_DATABASE_URI"] = URL
    db = SQLAlchemy(app)
    with pytest.raises(ConfigurationError, match="beside Flask-SQLAlchemy, which has its own"):
        Idempotency(app, db, metadata=Base.metadata, scope=None)


def test_a_database_that_is_not_there_is_named_with_those_that_are():
    app, db = lite_app()
    app.config["IDEMPOTENCY_BIND_KEY"] = "north"
    with pytest.raises(ConfigurationError, match="BIND_KEY is 'north'; allowed: 'default'"):
        Idempotency(app, db, metadata=Base.metadata, scope=None)


def test_the_package_does_not_need_lite():
    source = (ROOT / "flask_idempotency/session/sources.py").read_text("utf-8")
    assert not re.search("(?m)^ *(?:import|from) flask_sqlalchemy_lite", source)
    assert "flask_sqlalchemy_lite" in sys.modules


@pytest.mark.parametrize("kind", ["lite", "plain"])
@pytest.mark.parametrize("atomic", [True, False])
def test_two_threads_have_a_session_each(shop, kind, atomic, background):
    extension, gate = shop.names["idempotency"], threading.Barrier(2, timeout=10)

    def job():
        session = shop.names["session"]() if kind == "plain" else shop.names["db"].session
        session.add(shop.names["Payment"](amount=1))
        session.flush()
        gate.wait()
        session.commit()
        return id(session)

    def run(key):
        with shop.app_context():
            return extension.run(key, job, scope="s", name="job", atomic=atomic)

    with shop.app_context():
        jobs = [background(copy_context().run, run, key) for key in "ab"]
        assert len({each.result(10) for each in jobs}) == 2
        assert [run(key) for key in "ab"] == [each.result() for each in jobs]
    assert count(shop) == 2


def test_a_process_with_lite_and_a_console_ends_in_silence(databases, tmp_path):
    """The last counts are written at exit, when an application's async teardown works no more."""
    script = tmp_path / "shop.py"
    script.write_text(ENDING)
    found = subprocess.run(
        [sys.executable, script, databases.take()],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert (found.stdout, found.stderr) == ("201\n", "")


ENDING = """
import sys
from flask import Flask
from flask_sqlalchemy_lite import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase
from flask_idempotency import Idempotency, idempotent

class Base(DeclarativeBase):
    pass

app, db = Flask("shop"), SQLAlchemy()
app.config.update(SQLALCHEMY_ENGINES={"default": sys.argv[1]}, SECRET_KEY="k")
db.init_app(app)
idempotency = Idempotency(app, db, scope=None, metadata=Base.metadata)
app.register_blueprint(idempotency.console_blueprint(authorize=lambda: True))
app.post("/payments", endpoint="pay")(idempotent(lambda: ("", 201)))
with app.app_context():
    Base.metadata.create_all(db.engine)
print(app.test_client().post("/payments", headers={"Idempotency-Key": "k"}).status_code)
"""
