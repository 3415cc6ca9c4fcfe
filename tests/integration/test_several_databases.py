"""Records in another database than the application's first, and a database for each tenant."""

import pytest
import sqlalchemy as sa
from flask_sqlalchemy import SQLAlchemy
from werkzeug.test import Client

from flask_idempotency import NotAtomic, current_operation, idempotent
from tests.docs.pages import ROOT, blocks
from tests.drivers import EACH, with_driver

TENANTS = ["eu", "us"]


@EACH
def test_an_application_for_each_tenant_as_the_page_has_it(databases, driver, monkeypatch):
    taken = {tenant: databases.take() for tenant in TENANTS}
    for tenant, url in taken.items():
        monkeypatch.setenv(f"{tenant.upper()}_DATABASE_URL", with_driver(url, driver))
    sources = {block.mark: block.source for block in blocks(ROOT / "docs/session.md", "python")}
    names = {"__name__": "shards"}
    code = compile(sources["file: shards.py"], "shards.py", "exec", dont_inherit=True)
    exec(code, names)  # noqa: S102
    client = Client(names["app"])

    def post(tenant, amount):
        headers = {"Idempotency-Key": "one-key", "X-Account": "a", "X-Tenant": tenant}
        return client.post("/payments", json={"amount": amount}, headers=headers)

    for amount, tenant in enumerate(TENANTS):
        first, again = post(tenant, amount), post(tenant, amount)
        assert (first.status_code, first.json["amount"]) == (201, amount)
        assert again.headers["Idempotent-Replayed"] == "true"
        assert again.data == first.data
    assert post("fr", 1).status_code == 404
    for app in names["shards"].values():
        with app.app_context():
            names["db"].engine.dispose()
    for url in taken.values():
        databases.give_back(url)


def test_records_and_writes_on_a_bind_commit_together_there_and_no_write_elsewhere(
    make_world, postgres
):
    db = SQLAlchemy()

    class Entry(db.Model):
        __bind_key__ = "ledger"
        id = sa.Column(sa.Integer, primary_key=True)

    world = make_world(
        db=db,
        SQLALCHEMY_BINDS={"ledger": postgres.database("ledger")},
        IDEMPOTENCY_BIND_KEY="ledger",
        IDEMPOTENCY_TABLE="operations",
    )

    @world.app.post("/<kind>")
    @idempotent
    def pay(kind):
        db.session.add(Entry() if kind == "entries" else world.Payment(amount=1))
        db.session.commit()
        numbers = sa.select(sa.func.txid_current())
        of_session = db.session.scalar(numbers, bind_arguments={"mapper": Entry.__mapper__})
        assert of_session == current_operation.connection.scalar(numbers)
        return {}, 201

    @world.app.post("/both")
    @idempotent(atomic=False)
    def pay_with_a_lease():
        db.session.add_all([Entry(), world.Payment(amount=1)])
        db.session.commit()
        return {}, 201

    def rows(table):
        with world.app.app_context(), db.engines["ledger"].connect() as connection:
            return connection.scalar(sa.text(f"select count(*) from {table}"))

    world.app.testing = True
    assert [world.post("/entries").status_code for _ in range(2)] == [201, 201]
    assert rows("entry") == rows("operations") == 1
    assert "operations" not in db.metadata.tables
    with pytest.raises(NotAtomic, match="another bind"):
        world.post("/payments", "key-2")
    assert (rows("entry"), world.count()) == (1, 0)
    assert [world.post("/both", "key-3").status_code for _ in range(2)] == [201, 201]
    assert (rows("entry"), world.count()) == (2, 1)
