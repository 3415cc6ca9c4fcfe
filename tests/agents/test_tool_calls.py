"""``agent-tools.md`` does what it says with the MCP SDK, whose own client calls the tools.

The SDK needs newer releases than the lowest that the package allows, so it is no part of ``make test``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from mcp import Client
from mcp.server.auth.middleware.auth_context import auth_context_var
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken

from tests.docs import conftest
from tests.docs.how_to import Page
from tests.docs.pages import RECIPES, blocks

PAGE = RECIPES / "agent-tools.md"
names = conftest.names


class TestToolCalls:
    @pytest.fixture
    def shop(self, names) -> Page:
        page = Page(PAGE.name, names)
        [fragment] = [each for each in blocks(PAGE, "python") if each.mark == "fragment"]
        exec(compile(fragment.source, str(PAGE), "exec"), names)  # noqa: S102
        return page

    @pytest.fixture
    def sign_in(self) -> Iterator[Callable[[str], None]]:
        """Lets the calls that follow be somebody's, as the SDK's own middleware does."""
        before = auth_context_var.get()

        def sign_in(subject: str) -> None:
            token = AccessToken(token="t", client_id="host", scopes=[], subject=subject)
            auth_context_var.set(AuthenticatedUser(token))

        sign_in("alice")
        yield sign_in
        auth_context_var.set(before)

    def call(self, shop, name, arguments, **meta: Any) -> Any:
        """The result of a tool call in a session of its own, as after a restart."""

        async def send() -> Any:
            async with Client(shop.names["server"]) as client:
                return await client.call_tool(name, arguments, meta=meta or None)

        return asyncio.run(send())

    def words(self, result) -> str:
        assert result.is_error
        return result.content[0].text

    def pay(self, shop, amount=500, order="7") -> Any:
        return self.call(shop, "pay_order", {"order": order, "amount": amount})

    def test_an_order_is_paid_once_by_each_user_however_often_the_tool_is_called(self, shop, sign_in):
        results = [self.pay(shop) for _ in range(3)]
        assert [each.structured_content for each in results] == [{"payment": 1}] * 3
        assert "Ask the user." in self.words(self.pay(shop, amount=900))
        assert self.pay(shop, order="8").structured_content == {"payment": 2}
        sign_in("bob")
        assert self.pay(shop).structured_content == {"payment": 3}
        assert self.call(shop, "count_payments", {}).structured_content == {"result": 1}
        assert shop.count("payment") == 3

    def test_nobody_pays_nothing(self, shop):
        assert "Nobody is signed in." in self.words(self.pay(shop))
        assert shop.count("payment") == 0

    @pytest.mark.usefixtures("sign_in")
    def test_a_tip_is_given_once_for_each_call_of_the_model(self, shop):
        key = shop.names["CALL_ID"]
        for call_id in "call_1", "call_1", "call_2":
            assert not self.call(shop, "tip", {"amount": 100}, **{key: call_id}).is_error
        assert shop.count("payment") == 2
        assert "The host must send" in self.words(self.call(shop, "tip", {"amount": 100}))
