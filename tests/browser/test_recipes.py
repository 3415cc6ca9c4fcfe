"""The JavaScript of ``callers.md``, as it stands there, in tabs that share what they keep."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page

from tests.docs.pages import ROOT, blocks

RECIPE = "".join(block.text for block in blocks(ROOT / "example/recipes/callers.md", "javascript"))
SHOP = "https://api.example.com"


class Shop:
    """What a browser meets under the address of the recipe."""

    def __init__(self, context: BrowserContext) -> None:
        self.keys: list[str] = []
        self.answers: list[dict[str, Any]] = []
        context.route("**/*", self.meet)

    def meet(self, route: Any) -> None:
        if route.request.method == "GET":
            route.fulfill(content_type="text/html", body="<!doctype html><title>Shop</title>")
            return
        self.keys.append(route.request.headers["idempotency-key"])
        route.fulfill(**(self.answers.pop(0) if self.answers else {"status": 201, "json": {"id": 1}}))


@pytest.fixture
def context(chromium: Browser) -> Iterator[BrowserContext]:
    context = chromium.new_context()
    yield context
    context.close()


@pytest.fixture
def shop(context: BrowserContext) -> Shop:
    return Shop(context)


def tab(context: BrowserContext) -> Page:
    page = context.new_page()
    page.goto(SHOP)
    return page


def press(*tabs: Page, order: int = 7) -> list[str]:
    """All of them pay at the same moment; their outcomes."""
    program = RECIPE.replace("order-7", f"order-{order}") + "\nwindow.outcome = outcome;"
    at = (time.time() + 0.3) * 1000
    for page in tabs:
        wait = f"window.outcome = 0; await new Promise((go) => setTimeout(go, {at} - Date.now()));"
        page.add_script_tag(type="module", content=wait + program)
    return [page.wait_for_function("window.outcome").json_value() for page in tabs]


def test_tabs_that_begin_at_the_same_moment_have_one_key(context, shop):
    tabs = [tab(context), tab(context)]
    for order in range(5):
        shop.keys.clear()
        assert press(*tabs, order=order) == ["done", "done"]
        assert len(set(shop.keys)) == 1


def test_a_key_outlives_its_tab_and_ends_with_a_refusal(context, shop):
    shop.answers += [{"status": 401}, {"status": 402, "headers": {"Idempotent-Replayed": "true"}}]
    first, second = tab(context), tab(context)
    assert press(first) == ["sign in"]
    first.close()
    assert press(second) == ["refused"]
    assert press(second) == press(tab(context)) == ["done"]
    assert [shop.keys.index(key) for key in shop.keys] == [0, 0, 2, 2]
