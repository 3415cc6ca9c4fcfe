"""``agent-tools.md`` does what it says: its tools are called by JSON-RPC, and by a loop."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from tests.docs.how_to import Page


class TestToolCalls:
    @pytest.fixture
    def shop(self, page) -> Page:
        return page("agent-tools.md")

    def call(self, shop, name, call_id=None, _numbers=itertools.count(), **arguments: Any) -> Any:  # noqa: B008
        """What a tool says, and whether it is an error; each request has another identifier."""
        params = {"name": name, "arguments": arguments}
        if call_id is not None:
            params["_meta"] = {shop.names["CALL_ID"]: call_id}
        message = {"jsonrpc": "2.0", "id": next(_numbers), "method": "tools/call", "params": params}
        answer = shop.post("/mcp", message, key=None).json
        assert answer["id"] == message["id"]
        [content] = answer["result"]["content"]
        return content["text"], answer["result"]["isError"]

    def test_an_order_is_paid_once_however_often_the_tool_is_called(self, shop):
        for _ in range(3):
            text, failed = self.call(shop, "pay_order", order="7", amount=500)
            assert (json.loads(text), failed) == ({"payment": 1}, False)
        assert shop.count("payment") == 1
        assert self.call(shop, "pay_order", order="8", amount=500) == ('{"payment": 2}', False)
        assert self.call(shop, "count_payments") == ("2", False)

    def test_a_tip_is_given_once_for_each_call_of_the_model(self, shop):
        for call_id in "call_1", "call_1", "call_2":
            assert self.call(shop, "tip", call_id, amount=100)[1] is False
        assert shop.count("payment") == 2
        assert self.call(shop, "tip", amount=100)[1] is True

    def test_an_end_that_nobody_knows_is_not_called_again(self, shop):
        def send_parcel(_account):
            raise LookupError

        def parcel(call_id):
            return shop.names["once"](call_id, send_parcel, atomic=False, name="parcel")

        shop.names["TOOLS"]["parcel"] = parcel
        run = shop.names["run_tool"]
        call = {"id": "call_1", "name": "parcel", "arguments": {}}
        with pytest.raises(LookupError):
            run("alice", "talk-1", call)
        with pytest.raises(shop.names["ToolFailed"], match="Do not call again"):
            run("alice", "talk-1", call)

    def test_a_loop_that_is_restarted_gets_the_results_it_had(self, shop):
        run = shop.names["run_tool"]
        call = {"id": "call_1", "name": "tip", "arguments": {"amount": 100}}
        assert [run("alice", "talk-1", call) for _ in range(2)] == [{"payment": 1}] * 2
        run("alice", "talk-2", call)
        run("bob", "talk-1", call)
        assert shop.count("payment") == 3
