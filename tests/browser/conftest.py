"""The console in a real Chromium: the one on this machine, or Playwright's own."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from flask import request
from playwright.sync_api import Browser, Page, sync_playwright

from flask_idempotency import current_operation, idempotent
from tests.served import served

ROOT = "/operations"

LIGHT, DARK = "light", "dark"

RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Fails, with what to install, where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def store() -> str:
    return "postgres"


@pytest.fixture
def world(make_world: Any) -> Any:
    world = make_world(PROPAGATE_EXCEPTIONS=False)
    blueprint = world.idempotency.console_blueprint(authorize=lambda: "ada@example.org")
    world.app.register_blueprint(blueprint, url_prefix=ROOT)
    with world.app.app_context():
        world.db.create_all()

    @world.app.post("/payments")
    @idempotent
    def pay() -> Any:
        return {"amount": request.get_json()["amount"], "note": "<i>canary</i>"}, 201

    for number in range(12):
        world.post(key=f"key-{number}")
    world.post(key="key-0")
    world.post(key="key-0", json={"amount": 6})
    return world


@pytest.fixture
def interrupted(world: Any) -> str:
    """The path of an operation that was begun, did one step and never ended."""

    def work() -> None:
        current_operation.step("reserve", lambda: {"ok": True})
        raise SystemExit(1)

    with world.app.app_context(), pytest.raises(SystemExit):
        world.idempotency.run("key-1", work, scope="alice", name="charge", atomic=False)
    return path_of(world, "charge")


@pytest.fixture
def completed(world: Any) -> str:
    """The path of an operation that has its response."""
    return path_of(world, "pay")


def path_of(world: Any, name: str) -> str:
    digits = "select encode(key, 'hex') from idempotency_record where name = :name"
    return f"{ROOT}/records/{world.sql(digits, name=name)[0][0][:16]}"


@pytest.fixture
def url(world: Any) -> Iterator[str]:
    with served(world.app) as url:
        yield url


@pytest.fixture
def scheme() -> str:
    return LIGHT


@contextmanager
def watched_page(chromium: Browser, url: str, expected: str, width: int, **options: Any) -> Any:
    """A page. More on its console than ``expected``, or a request to elsewhere, fails the test."""
    viewport = {"width": width, "height": 800}
    context = chromium.new_context(base_url=url, viewport=viewport, **options)
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda sent: sent.url.startswith(url) or said.append(sent.url))
    page.said = said
    yield page
    context.close()
    assert [text for text in said if not re.search(expected, text)] == []


@pytest.fixture
def page(chromium: Browser, url: str, scheme: Any) -> Iterator[Page]:
    """A page of the console. A browser says of each refusal that it is one."""
    refusal = r"status of 40[0349] \("
    with watched_page(chromium, url, refusal, 1100, color_scheme=scheme) as page:
        page.set_default_timeout(10_000)
        yield page


def assert_no_faults(page: Page) -> None:
    """None that axe finds."""
    faults = Axe().run(page, options=RULES).response["violations"]
    assert [(page.url, fault["id"], fault["nodes"][0]["html"]) for fault in faults] == []
