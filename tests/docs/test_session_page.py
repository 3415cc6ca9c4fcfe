"""``docs/session.md`` does what it says: each of its patterns is used, and retried."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import idempotent
from tests.docs.how_to import Page
from tests.docs.pages import ROOT, blocks


class TestSessionPage:
    @pytest.fixture
    def shop(self, page) -> Page:
        return page("session.md")

    @pytest.mark.parametrize("path", ["/payments", "/orders"])
    def test_what_is_committed_above_the_view_is_there_once(self, shop, path):
        answers = [shop.post(path) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [201, 201]
        assert "Idempotent-Replayed" in answers[1].headers
        assert shop.count("payment") == 1

    def test_an_error_above_the_view_keeps_nothing(self, shop):
        shop.sql("ALTER TABLE payment ADD CONSTRAINT one UNIQUE (amount) DEFERRABLE INITIALLY DEFERRED")
        assert shop.post("/payments", key="1").status_code == 201
        for path in ("/payments", "/orders"):
            assert [shop.post(path, key=path).status_code for _ in range(2)] == [500, 500]
        assert shop.count("payment") == 1

    def test_each_tenant_has_a_schema(self, shop):
        for tenant in ("acme", "initech"):
            shop.sql(f"CREATE SCHEMA {tenant}")
            shop.sql(f"CREATE TABLE {tenant}.payment (LIKE payment INCLUDING ALL)")
            headers = {"X-Tenant": tenant}
            answers = [shop.post("/tenants/payments", **headers) for _ in range(2)]
            assert [answer.json for answer in answers] == [{"payments": 1}] * 2
        tables = ("payment", "acme.payment", "initech.payment")
        assert [shop.count(table) for table in tables] == [0, 1, 1]

    def test_row_level_security_holds_in_the_view(self, shop):
        role = "DO $$ BEGIN CREATE ROLE shop_tenant; EXCEPTION WHEN duplicate_object THEN NULL; END $$"
        for statement in (
            role,
            "GRANT INSERT, SELECT ON payment TO shop_tenant",
            "GRANT USAGE ON payment_id_seq TO shop_tenant",
            "ALTER TABLE payment ENABLE ROW LEVEL SECURITY",
            "CREATE POLICY own ON payment USING (tenant = current_setting('app.tenant'))",
        ):
            shop.sql(statement)
        assert [shop.post("/secured/payments").status_code for _ in range(2)] == [201, 201]
        assert shop.sql("SELECT tenant FROM payment") == [("alice",)]
        shop.sql("DROP OWNED BY shop_tenant")
        shop.sql("DROP ROLE shop_tenant")

    def test_an_audit_row_survives_the_rollback(self, shop):
        assert [shop.post("/transfers").status_code for _ in range(2)] == [503, 503]
        assert (shop.count("payment"), shop.count("note")) == (0, 2)

    def test_reads_outside_of_operations_go_to_the_replica(self, make_world, postgres):
        names: dict[str, Any] = {}
        [code] = [each for each in blocks(ROOT / "docs/session.md", "python") if "routing" in each.mark]
        exec(compile(code.source, "session.md", "exec"), names)  # noqa: S102
        replica = postgres.database("replica")  # nothing of the primary ever arrives in it
        db = SQLAlchemy(session_options={"class_": names["RoutingSession"]})
        world = make_world(db=db, SQLALCHEMY_BINDS={"replica": replica})

        def database() -> str:
            return db.session.scalar(sa.text("SELECT current_database()"))

        @world.app.post("/payments")
        @idempotent
        def pay():
            db.session.add(world.Payment(amount=1))
            db.session.commit()
            return {"from": database()}, 201

        world.app.get("/database", endpoint="database")(database)
        answers = [world.post() for _ in range(2)]
        assert [answer.json for answer in answers] == [answers[0].json] * 2
        assert answers[0].json["from"] != world.client.get("/database").text == "replica"
        assert world.count() == 1
