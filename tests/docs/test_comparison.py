"""The thirty lines of ``example/recipes`` do, and lack, what the page says."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import sqlalchemy as sa

from tests.docs.how_to import Page
from tests.killed import Killed


class TestOfYourOwn:
    @pytest.fixture
    def shop(self, page) -> Page:
        """A view that inserts a row, and then does what ``shop.names["then"]`` does."""
        shop = page("thirty-lines.md")
        shop.sql("CREATE TABLE payment (amount integer)")
        shop.names["then"] = lambda: None

        @shop.app.post("/payments")
        @shop.names["once"]
        def pay():
            session = shop.db.session
            session.execute(sa.text("INSERT INTO payment VALUES (5)"))
            paid = session.scalar(sa.text("SELECT count(*) FROM payment"))
            return shop.names["then"]() or ({"paid": paid}, 201)

        return shop

    def test_a_retry_gets_the_response_and_another_body_422(self, shop):
        answers = [shop.post("/payments") for _ in range(2)]
        assert [(answer.status_code, answer.json) for answer in answers] == [(201, {"paid": 1})] * 2
        assert shop.post("/payments", {"amount": 6}).status_code == 422
        assert shop.post("/payments", key=None).status_code == 400
        assert shop.count("payment") == 1

    @pytest.mark.parametrize("answer", [({"error": "no"}, 500), None], ids=["5xx", "death"])
    def test_after_a_5xx_and_after_a_death_the_retry_runs(self, shop, answer):
        def fail():
            if answer is None:
                raise Killed
            return answer

        shop.names["then"] = fail
        with nullcontext() if answer else pytest.raises(Killed):
            assert shop.post("/payments").status_code == 500
        assert (shop.count("payment"), shop.count("done")) == (0, 0)
        shop.names["then"] = lambda: None
        assert shop.post("/payments").json == {"paid": 1}
