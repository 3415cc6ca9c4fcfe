"""``docs/move.md`` does what it says of live APIs."""

from __future__ import annotations

import re

import pytest
from flask import request
from sqlalchemy import inspect, text

from flask_idempotency import idempotent
from tests.docs.how_to import Page
from tests.docs.pages import ROOT, blocks


@pytest.mark.usefixtures("patient_observing")
class TestAdopt:
    @pytest.fixture
    def shop(self, page) -> Page:
        return page("move.md")

    def test_the_lines_of_the_log_are_those_of_such_requests(self, shop, caplog):
        statuses = iter([201, 201, 201, 201, 201, 409, 201])
        view = idempotent(enforce=False)(lambda: (request.get_data(), next(statuses)))
        shop.app.add_url_rule("/observed", "create_payment", view, methods=["POST"])
        with caplog.at_level("INFO", "flask_idempotency"):
            for key, amount in [(None, 1), (1, 1), (1, 1), (1, 2), (2, 1), (2, 1), ("bad key", 1)]:
                headers = {} if key is None else {"key": str(key)}
                shop.post("/observed", {"amount": amount}, **{"key": None, **headers})
        said = [f"{record.levelname} {record.getMessage()}" for record in caplog.records]
        text = (ROOT / "docs/move.md").read_text(encoding="utf-8")
        shown = re.findall(r"(?m)^(?:INFO|WARNING) operation create_payment .*$", text)
        assert [_plain(line) for line in said] == [_plain(line) for line in shown]


def _plain(line):
    return re.sub(r"seconds [\d.]+|id [0-9a-f]{8}", "", line)


def test_after_its_statement_no_table_of_the_extension_is_left(names):
    (block,) = blocks(ROOT / "docs/move.md", "postgres")
    db = names["db"]
    with names["app"].app_context():
        db.create_all()
        before = inspect(db.engine).get_table_names()
        with db.engine.begin() as connection:
            connection.execute(text(block.text))
        assert any("idempotency" in table for table in before)
        assert not any("idempotency" in table for table in inspect(db.engine).get_table_names())
