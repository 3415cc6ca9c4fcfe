"""``docs/steps.md`` does what it says: its views are called, and its situations are made."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from flask_idempotency import current_operation, idempotent
from tests.docs.how_to import Page


class TestSteps:
    @pytest.fixture
    def shop(self, page) -> Page:
        return page("steps.md")

    def test_the_finished_step_is_not_repeated(self, shop):
        provider = shop.names["provider"]
        assert shop.post("/payments").status_code == 503
        answer = shop.post("/payments")
        assert (answer.status_code, answer.json) == (201, {"id": "ch_1", "amount": 5})
        assert (len(provider.charges), len(provider.mails)) == (1, 2)
        assert len(provider.charges[0]) == 43

    def test_a_step_that_writes_commits_once(self, shop):
        assert [shop.post("/invoices").status_code for _ in range(2)] == [503, 201]
        assert shop.count("payment") == 1

    def test_a_conflict_in_a_step_gives_the_operation_back(self, shop):
        conflict = "DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$"

        @shop.app.post("/conflicts")
        @idempotent(atomic=False)
        def conflicts():
            current_operation.step("a", lambda: shop.db.session.execute(sa.text(conflict)), atomic=True)

        answers = [shop.post("/conflicts").json["type"].split(":")[-1] for _ in range(2)]
        assert answers == ["transaction-conflict", "transaction-conflict"]

    def test_a_long_step_gets_a_long_lease(self, shop):
        seen = []

        def render():
            left = "SELECT extract(epoch FROM lease_expires_at - now()) FROM idempotency_record"
            seen.append(shop.sql(left)[0][0])
            return {"pages": 1}

        shop.names["render"] = render
        assert shop.post("/reports").status_code == 201
        assert 500 < seen[0] <= 600
