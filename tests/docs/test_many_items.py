"""``docs/protect.md`` does what it says."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from flask_idempotency.web.run_many import Outcome
from tests.docs.how_to import Page
from tests.docs.pages import ROOT, blocks


class TestManyItems:
    PATH = "/payments/batch"

    @pytest.fixture
    def shop(self, page) -> Page:
        return page("protect.md", "many items")

    def items(self, *amounts):
        return {"payments": [{"key": f"p-{a}", "account": "a", "amount": a} for a in amounts]}

    def test_its_response_is_the_real_one(self, shop):
        asked, shown = (block.text for block in blocks(ROOT / "docs/protect.md", "http"))
        real = shop.post(self.PATH, json.loads(asked.partition("\n\n")[2]), key="call-1")
        head, _, body = shown.partition("\n\n")
        assert head.splitlines()[0] == f"HTTP/1.1 {real.status}"
        assert real.json == json.loads(body)

    def test_another_call_makes_what_is_not_made(self, shop):
        first = shop.post(self.PATH, self.items(5, 0), key="a")
        assert shop.post(self.PATH, self.items(5, 0), key="a").data == first.data
        again = shop.post(self.PATH, self.items(0, 5, 6), key="b").json["payments"]
        assert [each["outcome"] for each in again] == ["failed", "replayed", "executed"]
        assert shop.count("payment") == 2

    def test_its_table_has_every_outcome(self):
        text = (ROOT / "docs/protect.md").read_text(encoding="utf-8")
        for outcome in get_args(Outcome):
            assert f"| `{outcome}` |" in text
