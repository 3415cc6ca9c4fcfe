"""``docs/session.md`` does what it says: each of its patterns is used, and retried."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from flask_idempotency import NotAtomic, idempotent
from tests.docs.how_to import Page


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

    def test_what_a_listener_of_before_commit_writes_commits_with_the_operation(self, shop):
        @sa.event.listens_for(shop.db.session, "before_commit")
        def write_outbox(session):
            session.add(shop.names["Note"](text="order created"))

        @shop.app.post("/shipments")
        @idempotent
        def create_shipment():
            shop.db.session.commit()
            return {}, 201

        assert [shop.post("/shipments").status_code for _ in range(2)] == [201, 201]
        assert shop.sql("SELECT text FROM note") == [("order created",)]

    def test_a_helper_with_a_context_of_its_own_joins(self, shop):
        shop.sql("INSERT INTO counter (value) VALUES (41)")
        assert [shop.post("/invoices").json for _ in range(2)] == [{"number": 42}] * 2
        assert shop.sql("SELECT value FROM counter") == [(42,)]
        assert shop.count("note") == 1

    def test_a_helper_is_refused_while_the_view_has_uncommitted_work(self, shop):
        shop.sql("INSERT INTO counter (value) VALUES (41)")
        shop.app.config["PROPAGATE_EXCEPTIONS"] = True

        @shop.app.post("/late-numbers")
        @idempotent
        def number_too_late():
            shop.db.session.add(shop.names["Note"](text="first"))
            shop.db.session.flush()
            return {"number": shop.names["next_number"]()}, 201

        with pytest.raises(NotAtomic, match="at the same time"):
            shop.post("/late-numbers")
        assert (shop.sql("SELECT value FROM counter"), shop.count("note")) == ([(41,)], 0)

    def test_a_double_of_commit_is_noticed(self, shop, monkeypatch):
        @shop.app.post("/notes")
        @idempotent
        def create_note():
            shop.db.session.add(shop.names["Note"](text="not committed"))
            shop.db.session.commit()
            return {}, 201

        monkeypatch.setattr(shop.db.session, "commit", shop.db.session.flush)
        shop.app.config["PROPAGATE_EXCEPTIONS"] = True
        with pytest.raises(NotAtomic, match="nobody committed"):
            shop.post("/notes")

    def test_emptied_tables_know_no_key(self, shop):
        assert shop.post("/orders").status_code == 201
        shop.names["empty_tables"]()
        again = shop.post("/orders")
        assert (again.status_code, "Idempotent-Replayed" in again.headers) == (201, False)
        assert shop.count("payment") == 1
