"""``docs/other-services.md`` does what it says of steps: its situations are made."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from flask_idempotency import current_operation, idempotent
from tests.docs.how_to import Page


class TestSteps:
    @pytest.fixture
    def shop(self, page) -> Page:
        return page("other-services.md")

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
