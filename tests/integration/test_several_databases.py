"""A database for each tenant: an application for each, as the page has it."""

import pytest
from werkzeug.test import Client

from tests.docs.pages import ROOT, blocks
from tests.drivers import EACH

TENANTS = ["eu", "us"]


@pytest.fixture
def urls(databases, driver):
    taken = {name: databases.take() for name in TENANTS}
    yield {name: url.replace("postgresql://", f"{driver}://") for name, url in taken.items()}
    for url in taken.values():
        databases.give_back(url)


@EACH
def test_an_application_for_each_tenant(urls, monkeypatch):
    for tenant in TENANTS:
        monkeypatch.setenv(f"{tenant.upper()}_DATABASE_URL", urls[tenant])
    sources = {block.mark: block.source for block in blocks(ROOT / "docs/session.md", "python")}
    names = {"__name__": "shards"}
    code = compile(sources["file: shards.py"], "shards.py", "exec", dont_inherit=True)
    exec(code, names)  # noqa: S102
    client = Client(names["app"])

    def post(tenant, amount):
        headers = {"Idempotency-Key": "one-key", "X-Account": "a", "X-Tenant": tenant}
        return client.post("/payments", json={"amount": amount}, headers=headers)

    for amount, tenant in enumerate(TENANTS):
        answers = [post(tenant, amount) for _ in range(2)]
        assert [each.status_code for each in answers] == [201, 201]
        assert answers[0].json["amount"] == amount
        assert answers[1].headers["Idempotent-Replayed"] == "true"
        assert answers[0].data == answers[1].data
    assert post("fr", 1).status_code == 404
    for app in names["shards"].values():
        with app.app_context():
            names["db"].engine.dispose()
